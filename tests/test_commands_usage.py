"""`consignee usage`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from app import cli
from tests import backends
from tests.store.sessions import add_upload
from tests.store.stores import new_store, put


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a store in which two scopes keep something."""
    folder = tmp_path / "data"

    async def fill() -> None:
        store = await new_store(folder)
        await put(store, b"12345", scope="a")
        await put(store, b"12345", scope="a")
        await add_upload(store, b"12345", scope="b\n1")
        await store.close()

    asyncio.run(fill())
    for name, value in backends.environment_of(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return folder


def usage(data_dir: Path, *arguments: str) -> int:
    return cli.main(["usage", "--data-dir", str(data_dir), *arguments])


def test_every_scope_is_one_line(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(data_dir) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split("\t")[:7] == [
        "scope", "references", "files", "sessions", "events", "logical_bytes", "stored_bytes"
    ]  # fmt: skip
    assert first.split("\t")[:7] == ["a", "2", "0", "0", "0", "10", "5"]
    assert second.split("\t")[:7] == ["b\\x0a1", "0", "1", "0", "0", "5", "5"]
    assert first.split("\t")[7].endswith("Z")


def test_one_scope_as_json(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(data_dir, "--scope", "a", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.pop("oldest") <= facts.pop("newest")
    assert facts == {
        "scope": "a",
        "references": 2,
        "files": 0,
        "sessions": 0,
        "events": 0,
        "logical_bytes": 10,
        "stored_bytes": 5,
    }


def test_an_unknown_scope_keeps_nothing(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(data_dir, "--scope", "nobody", "--json") == 0
    assert capsys.readouterr().out == ""
