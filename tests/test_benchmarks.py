"""What the benchmarks conclude from what they measured."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from app.settings import load_settings
from app.store import migrate
from tests.benchmarks.service import limit_of
from tests.benchmarks.soak import TABLES, count_file_rows
from tests.benchmarks.table import Row


def test_growth_to_the_last_number_of_workers_has_no_limit() -> None:
    told = limit_of({1: 1000.0, 2: 1500.0, 3: 2000.0}, {1: 0.9, 2: 1.5, 3: 2.0}, 2)
    assert told == "it grows up to 3 workers, the most that were tried"


def test_cores_that_are_full_are_the_limit() -> None:
    told = limit_of({1: 1000.0, 2: 1500.0, 3: 1510.0}, {1: 1.2, 2: 1.85, 3: 1.9}, 2)
    assert told == (
        "it grows up to 2 workers; the cores are the limit then: 1.9 of 2 cores are busy"
    )


def test_the_database_is_the_limit_where_cores_are_left() -> None:
    told = limit_of({1: 1000.0, 2: 990.0}, {1: 0.8, 2: 0.9}, 2)
    assert told == (
        "it grows up to 1 worker; the database is the limit then: 0.9 of 2 cores are busy"
    )


@pytest.mark.parametrize(("ratio", "verdict"), [(0.8, "reached"), (0.79, "MISSED")])
def test_a_goal_is_reached_from_its_figure_on(ratio: float, verdict: str) -> None:
    row = Row("work", "s")
    row.judge("of the peer", ratio, least=0.8)
    assert row.show().splitlines()[-1].split() == [
        verdict, "of", "the", "peer", "=", f"{ratio:.2f}", "(at", "least", "0.8)",
    ]  # fmt: skip


def test_a_soak_counts_the_rows_of_every_table(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path)
    migrate(settings)
    with sqlite3.connect(tmp_path / "consignee.db") as connection:
        found = connection.execute("select name from sqlite_master where type = 'table'")
        there = {name for (name,) in found} - {"alembic_version", "sqlite_sequence"}
        connection.execute("insert into condemned (location, condemned_at) values ('x', 1)")
    connection.close()
    assert set(TABLES) == there
    assert {
        name for name, count in count_file_rows(tmp_path / "consignee.db").items() if count
    } == {"condemned"}
