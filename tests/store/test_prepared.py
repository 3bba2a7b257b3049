"""Statements that go to the driver as text: what they find, what they change, and how many."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, bindparam, create_engine, insert, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import StaticPool

from app.store.prepared import Prepared, parameters_of
from app.store.tables import condemned, metadata

TIMES = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}

_since = (
    select(condemned.c.location)
    .where(
        condemned.c.condemned_at >= bindparam("since"),
        condemned.c.location.in_(bindparam("locations", expanding=True)),
    )
    .order_by(condemned.c.location)
)
_insertion = insert(condemned).values(parameters_of(condemned, "removed_at"))


@contextmanager
def opened() -> Iterator[Connection]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    metadata.create_all(engine, [condemned])
    with engine.connect() as connection:
        rows = [{"location": name, "condemned_at": time} for name, time in TIMES.items()]
        assert Prepared(_insertion.inline()).run(connection, rows) == len(TIMES)
        yield connection
    engine.dispose()


@pytest.fixture
def connection() -> Iterator[Connection]:
    with opened() as connection:
        yield connection


def test_it_finds_what_sqlalchemy_finds() -> None:
    prepared = Prepared(_since)
    with opened() as connection:

        @given(st.integers(0, 6), st.lists(st.sampled_from([*TIMES, "x", "'", "é"]), min_size=1))
        def check(since: int, locations: list[str]) -> None:
            values = {"since": since, "locations": locations}
            found = prepared.find(connection, values)
            assert found == connection.execute(_since, values).all()
            assert locations == values["locations"]

        check()


def test_there_is_one_text_for_all_lengths_up_to_a_power_of_two(connection: Connection) -> None:
    run: list[str] = []
    driver: Any = connection.connection.driver_connection
    driver.set_trace_callback(run.append)
    prepared = Prepared(_since)
    for length in range(1, 9):
        prepared.find(connection, {"since": 0, "locations": [*TIMES, "x", "y", "z"][:length]})
    lists = [text.partition(" IN (")[2].partition(")")[0] for text in run]
    assert [len(values.split(",")) for values in lists] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_it_tells_how_many_rows_it_changed(connection: Connection) -> None:
    def unless_there(given: Connection) -> Any:
        assert given.dialect.name == "sqlite"
        statement = sqlite.insert(condemned).values(parameters_of(condemned, "removed_at"))
        return statement.on_conflict_do_nothing().inline()

    prepared = Prepared(unless_there)
    rows = [{"condemned_at": 9, "location": name, "left": "out"} for name in ("e", "f", "g")]
    assert prepared.run(connection, rows) == 2
    assert prepared.run(connection, rows) == 0
    values = {"since": 9, "locations": ["e", "f", "g"]}
    assert Prepared(_since).find(connection, values) == [("f",), ("g",)]


def test_an_error_of_the_driver_is_one_of_sqlalchemy(connection: Connection) -> None:
    with pytest.raises(Exception, match="UNIQUE") as raised:
        Prepared(_insertion.inline()).run(connection, [{"location": "a", "condemned_at": 1}])
    assert type(raised.value).__module__ == "sqlalchemy.exc"
    assert isinstance(raised.value.__cause__, sqlite3.IntegrityError)
