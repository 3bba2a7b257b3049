"""Previews: what a converter may do to us, and what is kept of what it does.

Most tests have a converter of their own, a small program that is called as LibreOffice is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from app.errors import Unavailable
from app.http.downloads import Representation
from app.settings import Settings
from app.uhp import converter, previews
from app.uhp.preview_formats import NotConvertible
from app.uhp.previews import FAILURE_SECONDS, FAILURES_KEPT, Interrupted, Kept, Previews
from tests.components import require_component
from tests.uhp.documents import PDF, docx, odt, png, zipped

pytestmark = pytest.mark.anyio

SESSION = "hsess_" + "1" * 32
OTHER = "hsess_" + "2" * 32

STUB = """
import json, os, pathlib, signal, subprocess, sys, time
source = pathlib.Path(sys.argv[-1])
out = pathlib.Path(sys.argv[sys.argv.index("--outdir") + 1]) / "input.pdf"
notes = pathlib.Path({notes!r})
with open(notes / "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
PDF = {pdf!r}
"""


class Bench:
    """Previews with a converter that runs `body` and keeps notes."""

    def __init__(self, folder: Path, body: str, **changes: Any) -> None:
        self.notes = folder / "notes"
        self.notes.mkdir(exist_ok=True)
        script = folder / "stub.py"
        script.write_text(
            STUB.format(notes=str(self.notes), pdf=PDF) + textwrap.dedent(body), encoding="utf-8"
        )
        command = (sys.executable, "-I", "-S", str(script))
        chosen: dict[str, Any] = {"preview_command": command, **changes}
        self.settings = Settings(data_dir=folder / "data", **chosen)
        self.living = {SESSION, OTHER}
        self.now = 1000.0
        self.previews = Previews(self.settings, self._exists, clock=lambda: self.now)

    async def _exists(self, session_id: str) -> bool:
        return session_id in self.living

    @property
    def calls(self) -> list[list[str]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.notes / "calls").read_text().splitlines()]
        return []

    def note(self, name: str) -> str:
        return (self.notes / name).read_text(encoding="utf-8")

    async def noted(self, name: str) -> None:
        while not (self.notes / name).exists():
            await asyncio.sleep(0.01)

    def jobs(self) -> list[Path]:
        jobs = self.settings.previews_dir / "jobs"
        return list(jobs.iterdir()) if jobs.exists() else []


MakeBench = Callable[..., Bench]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[MakeBench]:
    made: list[Bench] = []

    def make(body: str = "out.write_bytes(PDF)", **changes: Any) -> Bench:
        made.append(Bench(tmp_path, body, **changes))
        return made[-1]

    yield make
    for each in made:
        await each.previews.close()
        assert each.jobs() == []


def file(content: bytes, name: str = "a.txt", media_type: str = "text/plain") -> Representation:
    @asynccontextmanager
    async def opened(start: int, stop: int) -> AsyncIterator[AsyncIterator[bytes]]:
        async def chunks() -> AsyncIterator[bytes]:
            yield content[start:stop]

        yield chunks()

    digest = hashlib.sha256(content).hexdigest()
    return Representation(len(content), digest, media_type, name, opened)


async def refused(bench: Bench, source: Representation) -> NotConvertible:
    with pytest.raises(NotConvertible) as failure:
        await bench.previews.make(SESSION, source)
    return failure.value


async def test_a_document_becomes_a_pdf_once(bench: MakeBench) -> None:
    it = bench()
    kept = await it.previews.make(SESSION, file(b"hello"))
    assert kept.path.read_bytes() == PDF
    assert kept.size == len(PDF)
    assert kept.sha256 == hashlib.sha256(PDF).hexdigest()
    assert await it.previews.make(SESSION, file(b"hello", "other name.txt")) == kept
    assert await it.previews.kept(SESSION, file(b"hello")) == kept
    assert await it.previews.kept(SESSION, file(b"other")) is None
    assert len(it.calls) == 1
    assert kept.path.stat().st_mode & 0o077 == 0
    assert kept.path.parent.stat().st_mode & 0o077 == 0


async def test_another_session_never_gets_it_sooner(bench: MakeBench) -> None:
    it = bench()
    await it.previews.make(SESSION, file(b"hello"))
    assert await it.previews.kept(OTHER, file(b"hello")) is None
    await it.previews.make(OTHER, file(b"hello"))
    assert len(it.calls) == 2


async def test_the_same_bytes_as_another_format_are_another_preview(bench: MakeBench) -> None:
    it = bench()
    await it.previews.make(SESSION, file(b"1,2"))
    await it.previews.make(SESSION, file(b"1,2", "a.csv", "text/csv"))
    assert [Path(call[-1]).name for call in it.calls] == ["input.txt", "input.csv"]


@pytest.mark.requirement("B69")
@pytest.mark.parametrize(
    "name", ["Special_ß.txt", "Пример.TXT", "-o evil.txt", "a b;c.txt", "..txt", "--version.txt"]
)
async def test_the_converter_sees_no_name_of_ours(bench: MakeBench, name: str) -> None:
    it = bench()
    await it.previews.make(SESSION, file(b"hello", name))
    (call,) = it.calls
    assert Path(call[-1]).name == "input.txt"
    assert not any(name in argument for argument in call)
    assert "--infilter=Text (encoded):UTF8" in call
    assert call.count("--outdir") == 1


@pytest.mark.requirement("B69")
async def test_a_document_without_extension_is_recognized(bench: MakeBench) -> None:
    it = bench()
    await it.previews.make(SESSION, file(docx(), "docx", "application/octet-stream"))
    assert Path(it.calls[0][-1]).name == "input.docx"
    assert not any(argument.startswith("--infilter") for argument in it.calls[0])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (file(b"noise", "a", "application/octet-stream"), "unsupported_format"),
        (file(b"noise", "a.docx"), "content_mismatch"),
        (file(bytes(2000)), "too_large"),
    ],
)
async def test_what_is_not_convertible_never_gets_to_the_converter(
    bench: MakeBench, source: Representation, reason: str
) -> None:
    it = bench(max_preview_source_bytes=1999)
    assert (await refused(it, source)).reason == reason
    assert it.calls == []


@pytest.mark.requirement("B68")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("pass", "no_output"),
        ("out.write_bytes(b'')", "no_output"),
        ("out.write_bytes(b'<html>')", "no_output"),
        ("out.write_bytes(PDF[:-8])", "no_output"),
        ("out.with_name('other.pdf').write_bytes(PDF)", "no_output"),
        ("out.mkdir()", "no_output"),
        ("os.mkfifo(out)", "no_output"),
        ("os.symlink('/etc/passwd', out)", "no_output"),
        ("real = out.with_name('x'); real.write_bytes(PDF); os.symlink(real, out)", "no_output"),
        ("out.write_bytes(PDF + bytes(300_000) + PDF)", "no_output"),
        ("out.write_bytes(PDF); sys.exit(1)", "crashed"),
        ("out.write_bytes(PDF); os.kill(os.getpid(), signal.SIGKILL)", "crashed"),
    ],
)
async def test_only_a_whole_pdf_is_a_success(bench: MakeBench, body: str, reason: str) -> None:
    it = bench(body, max_preview_bytes=200_000)
    assert (await refused(it, file(b"hello"))).reason == reason
    assert await it.previews.kept(SESSION, file(b"hello")) is None


@pytest.mark.requirement("B68")
async def test_output_without_end_is_ended(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "PROFILE_BYTES", 2**20)
    it = bench(
        """
        with open(out, "wb") as file:
            file.write(PDF)
            while True:
                file.write(bytes(2**16))
        """,
        max_preview_bytes=2**20,
        max_preview_source_bytes=2**10,
    )
    assert (await refused(it, file(b"hello"))).reason in ("crashed", "over_limit")


@pytest.mark.requirement("B66")
async def test_memory_without_end_is_ended(bench: MakeBench) -> None:
    it = bench("hoard = [bytes(b'x' * 2**20) for _ in range(4096)]", preview_memory_bytes=2**27)
    assert (await refused(it, file(b"hello"))).reason in ("crashed", "over_limit")


@pytest.mark.requirement("B66")
async def test_processes_without_end_are_ended(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "PROCESSES", 4)
    it = bench(
        """
        for _ in range(12):
            subprocess.Popen(["sleep", "300"])
        time.sleep(300)
        """
    )
    assert (await refused(it, file(b"hello"))).reason == "over_limit"


@pytest.mark.requirement("B66")
async def test_a_conversion_that_never_ends_is_ended_with_all_its_processes(
    bench: MakeBench,
) -> None:
    it = bench(
        """
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (notes / "pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(300)
        """,
        preview_timeout_seconds=1.5,
    )
    assert (await refused(it, file(b"hello"))).reason == "timed_out"
    pids = [int(pid) for pid in it.note("pids").split()]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.requirement("B66")
async def test_the_converter_has_its_own_folder_and_environment_and_nothing_of_ours(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    it = bench(
        """
        descriptors = pathlib.Path("/proc/self/fd").iterdir()
        found = {
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "descriptors": [str(fd.readlink()) for fd in descriptors if fd.exists()],
            "stdin": sys.stdin.read(),
        }
        (notes / "found").write_text(json.dumps(found))
        out.write_bytes(PDF)
        """
    )
    with (it.notes / "open").open("w", encoding="utf-8") as inherited:
        os.set_inheritable(inherited.fileno(), True)
        await it.previews.make(SESSION, file(b"hello"))
        await it.previews.make(OTHER, file(b"hello"))
    found = json.loads(it.note("found"))
    environment = found["environment"]
    assert set(environment) <= {
        *("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "SAL_USE_VCLPLUGIN", "LC_CTYPE")
    }
    assert Path(environment["HOME"]).parent == Path(found["cwd"])
    assert not any(str(it.notes) in target for target in found["descriptors"])
    assert found["stdin"] == ""
    profiles = {argument for call in it.calls for argument in call if "UserInstall" in argument}
    assert len(profiles) == 2


@pytest.mark.requirement("B72")
async def test_a_broken_converter_breaks_nothing_after_it(bench: MakeBench) -> None:
    it = bench(
        """
        if not (notes / "broken").exists():
            (notes / "broken").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        out.write_bytes(PDF)
        """
    )
    assert (await refused(it, file(b"hello"))).reason == "crashed"
    kept = await it.previews.make(SESSION, file(b"hello"))
    assert kept.path.read_bytes() == PDF


async def test_a_file_that_does_not_convert_is_not_tried_again_at_once(bench: MakeBench) -> None:
    it = bench("pass")
    first = await refused(it, file(b"hello"))
    again = await refused(it, file(b"hello"))
    assert (first.reason, first.message) == (again.reason, again.message)
    assert len(it.calls) == 1
    it.now += FAILURE_SECONDS
    await refused(it, file(b"hello"))
    assert len(it.calls) == 2


async def test_only_so_many_failures_are_kept(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previews, "FAILURES_KEPT", 1)
    assert FAILURES_KEPT > 1
    it = bench("pass")
    for content in (b"a", b"b", b"b", b"a"):
        await refused(it, file(content))
    assert len(it.calls) == 3


@pytest.mark.requirement("B66")
async def test_so_many_at_once_and_no_more(bench: MakeBench) -> None:
    it = bench(
        """
        mine = notes / f"running-{os.getpid()}"
        mine.touch()
        time.sleep(0.2)
        with open(notes / "most", "a") as most:
            most.write(f"{len(list(notes.glob('running-*')))} ")
        mine.unlink()
        out.write_bytes(PDF)
        """,
        preview_jobs=2,
    )
    kept = await asyncio.gather(
        *(it.previews.make(SESSION, file(b"%d" % number)) for number in range(6))
    )
    assert len({one.path for one in kept}) == 6
    assert max(map(int, it.note("most").split())) <= 2


async def test_who_asks_for_the_same_shares_one_conversion(bench: MakeBench) -> None:
    it = bench("time.sleep(0.2); out.write_bytes(PDF)")
    kept = await asyncio.gather(*(it.previews.make(SESSION, file(b"hello")) for _ in range(5)))
    assert len(set(kept)) == 1
    assert len(it.calls) == 1


HANGING = """
(notes / "pid").write_text(str(os.getpid()))
(notes / "begun").touch()
time.sleep(300)
"""


async def test_a_turn_that_does_not_come_is_put_off(bench: MakeBench) -> None:
    it = bench(HANGING, preview_jobs=1, preview_wait_seconds=0.05)
    running = asyncio.create_task(it.previews.make(SESSION, file(b"first")))
    await it.noted("begun")
    with pytest.raises(Unavailable) as busy:
        await it.previews.make(SESSION, file(b"second"))
    assert busy.value.retry_after > 0
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(it.calls) == 1


async def test_a_conversion_ends_with_the_last_that_waits_for_it(bench: MakeBench) -> None:
    it = bench(HANGING)
    waiting = [asyncio.create_task(it.previews.make(SESSION, file(b"x"))) for _ in range(2)]
    await it.noted("begun")
    pid = int(it.note("pid"))
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert Path(f"/proc/{pid}").exists()
    waiting[1].cancel()
    await asyncio.wait([waiting[1]])
    while it.jobs():
        await asyncio.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.requirement("UHP-28")
async def test_a_session_takes_its_previews_along(bench: MakeBench) -> None:
    it = bench(
        """
        if source.read_text() != "quick":
            (notes / "begun").touch()
            time.sleep(300)
        out.write_bytes(PDF)
        """
    )
    kept = await it.previews.make(SESSION, file(b"quick"))
    running = asyncio.create_task(it.previews.make(SESSION, file(b"slow")))
    await refused(it, file(b"noise", "a.docx"))
    await it.noted("begun")
    await it.previews.forget(SESSION)
    with pytest.raises(Interrupted):
        await running
    assert not kept.path.parent.exists()
    assert it.jobs() == []
    await it.previews.forget(SESSION)


@pytest.mark.requirement("UHP-28")
async def test_a_sweep_takes_what_has_no_session_and_no_process(bench: MakeBench) -> None:
    it = bench()
    gone = await it.previews.make(SESSION, file(b"hello"))
    kept = await it.previews.make(OTHER, file(b"hello"))
    it.living.remove(SESSION)
    jobs = it.settings.previews_dir / "jobs"
    for name in ("old", "young"):
        (jobs / name).mkdir()
    os.utime(jobs / "old", (1, 1))
    await it.previews.sweep()
    assert not gone.path.parent.exists()
    assert kept.path.exists()
    assert [job.name for job in it.jobs()] == ["young"]
    (jobs / "young").rmdir()


async def test_a_job_that_goes_while_it_is_looked_at(bench: MakeBench) -> None:
    it = bench()
    jobs = it.settings.previews_dir / "jobs"
    jobs.mkdir(parents=True)
    gone = jobs / "gone"
    gone.symlink_to(jobs / "nowhere")
    await it.previews.sweep()
    assert it.jobs() == [gone]
    gone.unlink()


async def test_a_sweep_of_nothing(bench: MakeBench) -> None:
    it = bench()
    await it.previews.sweep()
    assert not it.settings.previews_dir.exists()


async def test_what_was_used_least_recently_makes_room(bench: MakeBench) -> None:
    it = bench(preview_cache_bytes=2 * len(PDF))
    kept: list[Kept] = []
    for index, content in enumerate((b"a", b"b", b"c")):
        kept.append(await it.previews.make(SESSION, file(content)))
        os.utime(kept[-1].path, (index + 1, index + 1))
        if index == 1:
            await it.previews.make(SESSION, file(b"a"))
    assert [one.path.exists() for one in kept] == [True, False, True]


async def test_one_preview_is_kept_however_small_the_room(bench: MakeBench) -> None:
    it = bench(preview_cache_bytes=1)
    first = await it.previews.make(SESSION, file(b"a"))
    assert first.path.exists()
    second = await it.previews.make(SESSION, file(b"b"))
    assert (first.path.exists(), second.path.exists()) == (False, True)


async def test_an_id_of_another_form_names_no_folder(bench: MakeBench) -> None:
    it = bench()
    for session_id in ("..", "", "hsess_../x", "jobs"):
        with pytest.raises(ValueError, match="not the id"):
            await it.previews.forget(session_id)


@pytest.mark.requirement("B72", "UHP-24")
@pytest.mark.parametrize("command", ["", (), "/nowhere/soffice", ("no-such-converter", "-x")])
async def test_a_converter_that_is_absent_is_told(bench: MakeBench, command: Any) -> None:
    assert not bench(preview_command=command).previews.available


async def test_a_converter_that_went_meanwhile_spoils_no_file(bench: MakeBench) -> None:
    it = bench(preview_command="/nowhere/soffice")
    assert not (await refused(it, file(b"hello"))).lasting


@pytest.mark.requirement("B72")
async def test_the_converter_is_looked_for_each_time(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    it = bench(preview_command=None)
    program = programs / "libreoffice"
    seen = [it.previews.available]
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    seen.append(it.previews.available)
    program.unlink()
    seen.append(it.previews.available)
    assert seen == [False, True, False]


async def test_a_machine_without_isolation_converts_all_the_same(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(converter, "_ISOLATIONS", (("no-such-program",), ("false",)))
    it = bench()
    kept = await it.previews.make(SESSION, file(b"hello"))
    assert kept.size == len(PDF)
    assert "can reach the network" in caplog.text


UNSHARE = shutil.which("unshare")


@pytest.mark.component("unshare")
async def test_the_converter_has_no_network(bench: MakeBench) -> None:
    require_component(
        "unshare", present=UNSHARE is not None and os.geteuid() == 0, why="util-linux, as root"
    )
    it = bench(
        """
        (notes / "network").write_text(pathlib.Path("/proc/net/dev").read_text())
        out.write_bytes(PDF)
        """
    )
    await it.previews.make(SESSION, file(b"hello"))
    interfaces = [line.split(":")[0].strip() for line in it.note("network").splitlines()[2:]]
    assert interfaces in ([], ["lo"])


@pytest.mark.requirement("B66")
async def test_a_converter_that_survives_its_launcher_is_ended(bench: MakeBench) -> None:
    it = bench(
        """
        if source.read_text() == "kill":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(300)
        out.write_bytes(PDF)
        """
    )
    assert (await refused(it, file(b"kill"))).reason == "crashed"
    assert (await it.previews.make(SESSION, file(b"hello"))).size == len(PDF)


# The real converter

OFFICE = shutil.which("soffice") or shutil.which("libreoffice")


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Previews]:
    require_component(
        "libreoffice", present=OFFICE is not None, why="Debian libreoffice-writer-nogui"
    )

    async def exists(_: str) -> bool:
        return True

    made = Previews(Settings(data_dir=tmp_path), exists)
    assert made.available
    yield made
    await made.close()


def sheet() -> bytes:
    return b"name,amount\r\nGr\xc3\xbc\xc3\x9fe,2\r\n"


@pytest.mark.component("libreoffice")
@pytest.mark.requirement("UHP-23", "B66", "B69")
async def test_libreoffice_converts_every_kind_in_parallel(office: Previews) -> None:
    sources = [
        file(docx("Пример"), "Пример.DOCX", "application/octet-stream"),
        file(odt(), "a.odt"),
        file("Grüße 你好\n".encode(), "a.txt"),
        file(b"# Title\n", "a.md"),
        file(sheet(), "Special_ß.csv"),
        file(png(), "a.png"),
        file(b"{\\rtf1 hello}", "a.rtf"),
        file(docx("no name"), "docx", "application/octet-stream"),
    ]
    kept = await asyncio.gather(*(office.make(SESSION, source) for source in sources))
    assert len({one.path for one in kept}) == len(sources)
    for one in kept:
        content = one.path.read_bytes()
        assert content.startswith(b"%PDF-")
        assert hashlib.sha256(content).hexdigest() == one.sha256


@pytest.mark.component("libreoffice")
@pytest.mark.requirement("UHP-25")
async def test_libreoffice_fails_on_a_document_of_noise(office: Previews) -> None:
    broken = zipped({"[Content_Types].xml": "noise", "word/document.xml": "noise"})
    with pytest.raises(NotConvertible) as failure:
        await office.make(SESSION, file(broken, "a.docx"))
    assert failure.value.reason == "no_output"


@pytest.mark.component("libreoffice")
async def test_libreoffice_reads_no_file_that_a_document_names(
    office: Previews, tmp_path: Path
) -> None:
    # An image cannot be taken for anything else in a PDF: it is there as one, or it is not.
    secret = tmp_path / "secret.png"
    secret.write_bytes(png())
    frame = (
        '<text:p><draw:frame svg:width="2cm" svg:height="2cm">'
        f'<draw:image xlink:href="{secret.as_uri()}" xlink:type="simple"/>'
        "</draw:frame></text:p>"
    )
    kept = await office.make(SESSION, file(odt(frame), "a.odt"))
    assert b"/Subtype/Image" not in kept.path.read_bytes()


@pytest.mark.component("libreoffice")
@pytest.mark.requirement("B72")
async def test_libreoffice_killed_at_work_is_back_at_the_next_file(office: Previews) -> None:
    killing = asyncio.create_task(_kill_office())
    with suppress(NotConvertible):
        await office.make(SESSION, file(docx("killed"), "a.docx"))
    await killing
    for number in range(2):
        kept = await office.make(SESSION, file(docx(f"next {number}"), "a.docx"))
        assert kept.size > 0


async def _kill_office() -> None:
    """Kill the program behind the converter's starter, as soon as it runs below this process."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "soffice.bin":
                    os.kill(pid, signal.SIGKILL)
                    return
        await asyncio.sleep(0.01)
    raise AssertionError("the converter never ran")


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found
