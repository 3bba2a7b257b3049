"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from app import cli
from app.http import framing
from app.http.metrics import Metrics
from app.http.problems import STATUSES
from app.settings import ALL_PERMISSIONS
from app.uhp.errors import CODES
from tests.reference import README, updated

TEXT = README.read_text(encoding="utf-8")
SOURCES = [
    path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent.parent / "app").rglob("*.py"))
]


def test_the_tables_of_settings_are_those_of_the_code() -> None:
    assert updated(TEXT) == TEXT, "run: python -m tests.reference"


def test_the_two_commands_come_first() -> None:
    commands = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    assert commands[:2] == ["dev", "test"]


@pytest.mark.parametrize("permission", sorted(ALL_PERMISSIONS))
def test_every_permission_is_explained(permission: str) -> None:
    assert f"`{permission}`" in TEXT


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_is_named(name: str) -> None:
    assert isinstance(cli.cli.get_command(click.Context(cli.cli), name), click.Command)
    assert f"consignee {name}" in TEXT


def test_every_metric_is_explained() -> None:
    names = re.findall(rb"^# HELP (consignee_[a-z_]+)", Metrics().render(), re.MULTILINE)
    assert names
    missing = [
        name.decode()
        for name in names
        if not name.endswith(b"_created") and f"`{name.decode()}" not in TEXT
    ]
    assert not missing


@pytest.mark.requirement("AHP-R49")
def test_what_a_confirmation_says_of_durability_is_told() -> None:
    """The protocol promises nothing there: it is this receiver's own policy."""
    told = TEXT[TEXT.index("**201 means**") :].partition("\n\n")[0]
    for fact in ("synced", "committed", "PostgreSQL", "object store", "no backup"):
        assert fact in " ".join(told.split())


def test_every_refusal_of_an_upload_head_is_listed() -> None:
    source = Path(framing.__file__).read_text(encoding="utf-8")
    codes = set(re.findall(r'"([a-z]+_[a-z_]+)"', source))
    missing = {code for code in codes if f"`{code}`" not in TEXT}
    assert codes >= {"malformed_digest", "length_required"}
    assert not missing


def test_every_status_of_the_table_of_problems_is_listed() -> None:
    missing = {status for status, _ in STATUSES.values() if f"{status}" not in TEXT}
    assert not missing


def test_own_codes_of_the_envelope_carry_the_prefix() -> None:
    own = [code for code in CODES if code.startswith("consignee_")]
    assert own
    assert "codes that the specification does not" in TEXT


def test_no_setting_is_read_past_the_settings() -> None:
    reading = [
        source for source in SOURCES if re.search(r"environ(\.get\(|\[)\W*CONSIGNEE_", source)
    ]
    assert SOURCES
    assert not reading
