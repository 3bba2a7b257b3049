"""The tables. Only types that SQLite and PostgreSQL both have.

`blobs` says where the bytes of a digest are: in the row (`data`) or at a `location`.
`content_refs` says who may have them. `condemned` holds the locations that a sweep takes away:
written before the bytes go, so that a crash in between is made good by the next sweep, and read
by every commit, so that no row ever names bytes that are going. `writers` has the newest batch of
everybody who writes to a PostgreSQL server, committed with it: whoever loses the connection in a
commit can see there whether it came through.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

DIGEST_BYTES = 32

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

# SQLite gives a row number only to a primary key of exactly the type INTEGER.
row_number = BigInteger().with_variant(Integer, "sqlite")

blobs = Table(
    "blobs",
    metadata,
    Column("id", row_number, primary_key=True),
    Column("digest", LargeBinary(DIGEST_BYTES), nullable=False, unique=True),
    Column("size", BigInteger, nullable=False),
    Column("location", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("data", LargeBinary),
    CheckConstraint("(data IS NULL) <> (location IS NULL)", name="one_place"),
)
Index(
    "uq_blobs_location",
    blobs.c.location,
    unique=True,
    sqlite_where=blobs.c.location.is_not(None),
    postgresql_where=blobs.c.location.is_not(None),
)

content_refs = Table(
    "content_refs",
    metadata,
    Column("id", row_number, primary_key=True),
    Column("ref", Text, nullable=False, unique=True),
    Column("scope", Text, nullable=False),
    Column("blob_id", row_number, ForeignKey("blobs.id", ondelete="RESTRICT"), nullable=False),
    Column("principal", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    sqlite_autoincrement=True,
)
Index("ix_content_refs_scope", content_refs.c.scope, content_refs.c.id)
Index("ix_content_refs_blob_id", content_refs.c.blob_id)
Index(
    "ix_content_refs_expires_at",
    content_refs.c.expires_at,
    sqlite_where=content_refs.c.expires_at.is_not(None),
    postgresql_where=content_refs.c.expires_at.is_not(None),
)

condemned = Table(
    "condemned",
    metadata,
    Column("location", Text, primary_key=True),
    Column("condemned_at", BigInteger, nullable=False),
    Column("removed_at", BigInteger),
)
Index(
    "ix_condemned_due",
    condemned.c.location,
    sqlite_where=condemned.c.removed_at.is_(None),
    postgresql_where=condemned.c.removed_at.is_(None),
)

writers = Table(
    "writers",
    metadata,
    Column("writer", Text, primary_key=True),
    Column("batch", BigInteger, nullable=False),
    Column("written_at", BigInteger, nullable=False),
)


def referring_columns() -> list[tuple[Column[Any], Column[Any]]]:
    """Every column, of every table, that keeps a blob alive, and the column of `blobs` it names.

    References name the row's number: that index grows at its end, where an index on digests is
    written all over, which at a million references costs half of an upload. Files name the digest,
    which their listings show.
    """
    return [
        (column, key)
        for table in metadata.sorted_tables
        for column in table.columns
        for key in (blobs.c.id, blobs.c.digest)
        if column.references(key)
    ]
