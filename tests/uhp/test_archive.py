"""All files of a session at once: every one of them, safe to unpack, or no archive."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.errors import Unavailable
from app.store.files import FileRecord, Files
from app.uhp.archive import entries_of
from tests.backends import bodies_of
from tests.http.messages import Sent, http_scope, receiving
from tests.uhp.calling import FIRST, error_of
from tests.uhp.containers import STRANGER, Depot, depot_in

pytestmark = pytest.mark.anyio


@pytest.fixture
async def depot(tmp_path: Path) -> AsyncIterator[Depot]:
    async with depot_in(tmp_path / "data") as made:
        yield made


async def fetched(depot: Depot, method: str = "GET", **more: str) -> Sent:
    return await depot.call(method, f"/v1/sessions/{depot.session.id}/files/archive", **more)


def opened(sent: Sent) -> zipfile.ZipFile:
    assert sent.status == 200
    assert int(sent.headers[b"content-length"]) == len(sent.body)
    archive = zipfile.ZipFile(io.BytesIO(sent.body))
    assert archive.testzip() is None
    return archive


@pytest.mark.requirement("UHP-27", "B58")
async def test_every_artifact_is_in_it(depot: Depot) -> None:
    large = bytes(range(256)) * 1000
    old = await depot.add(b"old", "report.md")
    await depot.add(large, "data/large.bin")
    await depot.add(b"", "empty")
    await depot.add(b"new", "report.md")
    await depot.add(b"other", "report (1).md")
    sent = await fetched(depot)
    assert sent.headers[b"content-type"] == b"application/zip"
    assert f'filename="{depot.session.id}.zip"'.encode() in sent.headers[b"content-disposition"]
    assert sent.headers[b"content-disposition"].startswith(b"attachment")
    with opened(sent) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            "data/large.bin": large,
            "empty": b"",
            "report.md": b"new",
            "report (1).md": b"other",
            f"previous/{old.id}/report.md": b"old",
        }
        assert all(stat.S_ISREG(info.external_attr >> 16) for info in archive.infolist())
    assert (await fetched(depot)).body == sent.body


@pytest.mark.requirement("B51")
async def test_its_head_opens_nothing(depot: Depot, monkeypatch: pytest.MonkeyPatch) -> None:
    await depot.add(bytes(200_000))
    sent = await fetched(depot)
    monkeypatch.delattr(Files, "open")
    monkeypatch.delattr(Files, "small")
    head = await fetched(depot, "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers == sent.headers


@pytest.mark.requirement("B64")
async def test_an_empty_session_and_one_with_nothing_in_its_file(depot: Depot) -> None:
    empty = await fetched(depot)
    assert len(empty.body) == 22
    assert opened(empty).namelist() == []
    await depot.add(b"", "empty")
    assert opened(await fetched(depot)).namelist() == ["empty"]


@pytest.mark.requirement("B64", "UHP-29", "UHP-28")
async def test_foreign_and_deleted_sessions_have_none(depot: Depot) -> None:
    await depot.add(b"x")
    foreign = await fetched(depot, token=STRANGER)
    assert foreign.status == 404
    assert error_of(foreign)["code"] == "session_not_found"
    await depot.store.sessions.delete("a", depot.session.id)
    assert (await fetched(depot)).body == foreign.body
    for session_id in ("hsess_0", "..", "x"):
        unknown = await depot.call("GET", f"/v1/sessions/{session_id}/files/archive")
        assert unknown.body == foreign.body


HOSTILE = ["../../evil", "/etc/x", "C:\\x", "a/../../b", "..\\..\\x", "C:/y", "a\x00b", "//x", "."]


def record_at(path: str, number: int, *, current: bool = True) -> FileRecord:
    return FileRecord(
        id=f"file_{number}",
        scope="a",
        principal="first",
        kind="artifact",
        filename="x",
        path=path,
        media_type="text/plain",
        size=1,
        sha256="0" * 64,
        created_at=1_786_400_000,
        container_id="cntr_1",
        session_id="hsess_1",
        response_id=None,
        purpose=None,
        current=current,
        expires_at=None,
        position=number,
    )


@pytest.mark.requirement("B41")
def test_no_name_leads_out_of_the_folder_it_is_unpacked_in() -> None:
    records = [record_at(path, number) for number, path in enumerate(HOSTILE)]
    names = [entry.name for entry in entries_of(records)]
    assert len(set(names)) == len(HOSTILE)
    for name in names:
        assert not name.startswith("/")
        assert "\\" not in name
        assert ":" not in name
        assert "\0" not in name
        assert not {"", ".", ".."} & set(name.split("/"))


@pytest.mark.requirement("B41")
async def test_the_names_before_the_bytes_are_those_of_the_directory(depot: Depot) -> None:
    await depot.add(b"x", "..\\..\\x")
    await depot.add(b"y", "\u62a5\u544a.txt")
    sent = await fetched(depot)
    with opened(sent) as archive:
        for info in archive.infolist():
            begin = info.header_offset + 30
            local = sent.body[begin : begin + len(info.filename.encode())]
            assert local.decode() == info.filename


@pytest.mark.requirement("B58")
def test_the_current_files_keep_their_names() -> None:
    records = [
        record_at("a", 1, current=False),
        record_at("previous/file_1/a", 2),
        record_at("a", 3),
    ]
    entries = {entry.key: entry.name for entry in entries_of(records)}
    assert entries["file_3"] == "a"
    assert entries["file_2"] == "previous/file_1/a"
    assert len(set(entries.values())) == 3
    assert entries == {entry.key: entry.name for entry in entries_of(records)}


@pytest.mark.requirement("B62")
async def test_a_first_file_that_cannot_be_read_is_an_error_and_no_archive(
    depot: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    await depot.add(bytes(200_000))
    monkeypatch.setattr(Files, "open", _unreadable)
    sent = await fetched(depot)
    assert sent.status == 503
    assert error_of(sent)["code"] == "consignee_unavailable"


@pytest.mark.requirement("B62")
async def test_a_later_file_that_cannot_be_read_cuts_the_answer(depot: Depot) -> None:
    await depot.add(bytes(600_000), "1")
    await depot.add(bytes(200_000), "2")
    blobs = bodies_of(depot.settings.data_dir)
    min(blobs, key=lambda body: len(body.read_bytes())).unlink()
    sent = Sent()
    with pytest.raises(Unavailable):
        await _fetch_into(depot, sent)
    assert sent.status == 200
    assert not sent.is_complete
    assert b"PK\x05\x06" not in sent.body


def _unreadable(*_: object, **__: object) -> None:
    raise Unavailable("storage_unavailable", "The stored body cannot be read at the moment.")


async def _fetch_into(depot: Depot, sent: Sent) -> None:
    scope = http_scope(
        "GET",
        f"/v1/sessions/{depot.session.id}/files/archive",
        [(b"authorization", b"Bearer " + FIRST.encode())],
    )
    await depot.app(scope, receiving(), sent)


@pytest.mark.requirement("B63")
async def test_many_files_cost_few_questions(depot: Depot, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        await depot.add(b"%d" % number, f"{number}")
    monkeypatch.delattr(Files, "open")
    with opened(await fetched(depot)) as archive:
        assert [archive.read(name) for name in archive.namelist()] == [
            b"%d" % number for number in range(30)
        ]
