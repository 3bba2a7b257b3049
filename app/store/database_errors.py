"""The one border where errors of the database and its drivers are translated."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncpg.exceptions import InternalClientError, TargetServerAttributeNotMatched
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from app.errors import Conflict, Exhausted, Refusal, Unavailable

DATABASE_ERRORS = (SQLAlchemyError, OSError, TargetServerAttributeNotMatched)
"""What talking to a database raises: a server that cannot be reached is an error of the system,
and one that is a standby one of the driver's own."""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NO_ROOM_EXTENDED = frozenset({sqlite3.SQLITE_IOERR_SHMSIZE})

# SQLSTATEs of PostgreSQL.
_ABORTED = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_NO_CONNECTION = ("08", "57P")  # connection exception; shutdown, crash, starting up
_TOO_MANY = "53300"
_LOCKED = "55P03"
_READ_ONLY = "25006"
_NO_ROOM = "53100"
_NO_TIME = frozenset({"57014", "25P03"})  # a statement took too long, or the pause between two
_PASSING = _ABORTED | {_TOO_MANY, _READ_ONLY}
_OCCUPIED = _ABORTED | _NO_TIME | {_TOO_MANY, _LOCKED}


@contextmanager
def database_border() -> Iterator[None]:
    """Translate every error of SQLAlchemy and its drivers inside into a refusal."""
    try:
        yield
    except DATABASE_ERRORS as error:
        raise refusal_of(error) from error


@contextmanager
def sqlite_driver(connection: Connection, statement: str) -> Iterator[sqlite3.Connection]:
    """The driver's own connection, for a `statement` that goes past SQLAlchemy.

    Its errors become those of SQLAlchemy, as if it had not.
    """
    driver: Any = connection.connection.driver_connection
    try:
        yield driver
    except sqlite3.Error as error:
        raise DBAPIError.instance(statement, None, error, sqlite3.Error) from error


def refusal_of(error: Exception) -> Refusal:
    """What an error of the database means for the one who asked."""
    if _is_out_of_room(error):
        return Exhausted()
    if isinstance(error, IntegrityError):
        return Conflict("conflict", "What this refers to has changed meanwhile; try again.")
    if _is_busy(error):
        return Unavailable("database_busy", "The database is busy; try again.")
    return Unavailable(
        "storage_unavailable", "The database cannot be read or written at the moment; try again."
    )


def is_passing(error: Exception) -> bool:
    """Whether the same transaction may well succeed in a moment, on another connection.

    Not what already took as long as it may: a lock, a statement, a turn in the pool.
    """
    if isinstance(error, OSError | TargetServerAttributeNotMatched):
        return not isinstance(error, TimeoutError)
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if _has_lost_its_place(error):
        return True
    state = sqlstate_of(error)
    return state in _PASSING or state.startswith(_NO_CONNECTION)


def leaves_doubt(error: BaseException) -> bool:
    """Whether the connection is not to be used again: it is cut off, or leads to a standby."""
    return (
        isinstance(error, OSError) or sqlstate_of(error) == _READ_ONLY or _has_lost_its_place(error)
    )


def _has_lost_its_place(error: BaseException) -> bool:
    """Whether the driver no longer knows what its connection is about: it was cut off in the
    middle of an answer."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return isinstance(getattr(cause, "__cause__", None), InternalClientError)


def sqlstate_of(error: BaseException) -> str:
    """The SQLSTATE that PostgreSQL gave; empty where it is not PostgreSQL that speaks."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlstate", None) or ""


def _is_out_of_room(error: Exception) -> bool:
    extended = _sqlite_code(error)
    return (
        extended & 0xFF == sqlite3.SQLITE_FULL
        or extended in _NO_ROOM_EXTENDED
        or sqlstate_of(error) == _NO_ROOM
    )


def _is_busy(error: Exception) -> bool:
    return (
        isinstance(error, PoolTimeoutError | TimeoutError)
        or _sqlite_code(error) & 0xFF in _BUSY
        or sqlstate_of(error) in _OCCUPIED
    )


def _sqlite_code(error: Exception) -> int:
    cause = error.orig if isinstance(error, DBAPIError) else None
    code: int = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code
