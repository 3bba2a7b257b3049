"""Statements of the hottest path: made into text once, and handed to the driver as that.

What SQLAlchemy does around a statement costs several times what SQLite needs to run it, so its
driver gets the text from here; PostgreSQL's is only reached through SQLAlchemy. Nothing is
converted on this way, and nothing has to be: drivers take and give the text, the numbers and the
octets of our tables as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import BindParameter, Connection, Executable, Table, bindparam

from app.store.database_errors import sqlite_driver

Values = Mapping[str, Any]
"""The parameters of a statement by name; a list for one that is `expanding`."""

_Prepared = tuple[str, Callable[[Values], tuple[Any, ...]]]
"""A statement as a driver takes it, and what puts its parameters in their order."""


class Prepared:
    """One statement of at least two parameters: a text for each dialect, and each length of a list.

    A list is filled up with its last value to a power of two, so that there are few lengths. It
    must not be empty, and what it is for must not mind: `in` does not.
    """

    def __init__(self, statement: Executable | Callable[[Connection], Executable]) -> None:
        """`statement`, or what gives that of a connection's dialect."""
        self._statement = statement
        self._known: dict[tuple[str, int], _Prepared] = {}

    def find(self, connection: Connection, values: Values) -> Sequence[Sequence[Any]]:
        """The rows for `values`, among which there is one list at most."""
        text, parameters = self._ready(connection, values)
        if not _is_sqlite(connection):
            return connection.exec_driver_sql(text, parameters).all()
        with sqlite_driver(connection, text) as driver:
            rows: list[Any] = driver.execute(text, parameters).fetchall()
            return rows

    def run(self, connection: Connection, rows: Sequence[Values]) -> int:
        """Run the statement for each of `rows`, without lists; how many rows it changed."""
        text, in_order = self._of(connection, 0, {})
        parameters = [in_order(row) for row in rows]
        if not _is_sqlite(connection):
            return connection.exec_driver_sql(text, parameters).rowcount
        with sqlite_driver(connection, text) as driver:
            return driver.executemany(text, parameters).rowcount

    def _ready(self, connection: Connection, values: Values) -> tuple[str, tuple[Any, ...]]:
        """The text for `values`, and these in its order."""
        spread, length = _spread(values)
        text, in_order = self._of(connection, length, values)
        return text, in_order(spread)

    def _of(self, connection: Connection, length: int, values: Values) -> _Prepared:
        key = connection.dialect.name, length
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._prepare(connection, length, values)
        return known

    def _prepare(self, connection: Connection, length: int, values: Values) -> _Prepared:
        given = self._statement
        statement: Any = given(connection) if callable(given) else given
        options: dict[str, Any] = {}
        if length:
            filled = {k: _filled(v) if isinstance(v, list) else v for k, v in values.items()}
            statement = statement.params(filled)
            options["render_postcompile"] = True
        compiled = statement.compile(dialect=connection.dialect, compile_kwargs=options)
        return compiled.string, itemgetter(*compiled.positiontup)


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"


def parameters_of(table: Table, *left_out: str) -> dict[str, BindParameter[Any]]:
    """A parameter of its own name for each column, as `values` of an insertion."""
    names = [column.name for column in table.c if column.name not in left_out]
    return {name: bindparam(name) for name in names}


def _spread(values: Values) -> tuple[dict[str, Any], int]:
    """Every value of a list under a name of its own, as SQLAlchemy names them; how many they are.

    A list's length is 0 where there is no list.
    """
    spread = dict(values)
    length = 0
    for name, value in values.items():
        if isinstance(value, list):
            filled = _filled(value)
            length = len(filled)
            spread.update((f"{name}_{place}", one) for place, one in enumerate(filled, 1))
    return spread, length


def _filled(values: list[Any]) -> list[Any]:
    length = 1 << (len(values) - 1).bit_length()
    return values + values[-1:] * (length - len(values))
