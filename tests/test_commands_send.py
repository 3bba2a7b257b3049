"""`consignee send`, in this process, to a receiver that does as it is told."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from rich.progress import Progress

from app import __version__
from app.cli import main
from app.commands.bars import Bars
from app.commands.send import AT_ONCE, Identity
from app.commands.sending import client_of
from app.sender.files import FileReading
from tests.sender.receivers import Exchange, Receiver, Script, answer, confirm, hang, scripted

TOKEN = "s3cret-token"
TOO_LARGE = "The receiver takes no body of this size; send less, or raise its limit."


@contextmanager
def receiving(*scripts: Script) -> Iterator[Receiver]:
    """A scripted receiver in a thread of its own: the command runs its own loop in this one."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(scripted(*scripts)) as receiver,
    ):
        yield receiver


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPLOAD_TOKEN", TOKEN)
    return tmp_path


def write(*bodies: bytes) -> list[str]:
    """Files in the current folder, by name."""
    names = [f"file-{number}.bin" for number in range(len(bodies))]
    for name, body in zip(names, bodies, strict=True):
        Path(name).write_bytes(body)
    return names


def send(receiver: Receiver, *arguments: str, token: bool = True) -> int:
    credential = ["--token-env", "UPLOAD_TOKEN"] if token else []
    endpoint = ["--endpoint", f"{receiver.url}/upload?x=%2F", "--allow-loopback-http"]
    return main(["send", *arguments, *endpoint, *credential])


def receipts(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, object]], list[str]]:
    """The lines of standard output as JSON, and those of standard error."""
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err.splitlines()


@pytest.mark.requirement("AHP-S03", "AHP-S17")
@pytest.mark.parametrize("switches", [[], ["--json"]])
def test_receipts_are_json_lines_in_the_order_of_the_files(
    switches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [b"first", b"", bytes(3_000_000), b"first"]
    with receiving(confirm) as receiver:
        assert send(receiver, *write(*bodies), *switches) == 0
        assert {each.target for each in receiver.exchanges} == {b"/upload?x=%2F"}
        assert all(each.header("authorization") == f"Bearer {TOKEN}" for each in receiver.exchanges)
    out, err = receipts(capsys)
    assert err == []
    assert out == [
        {
            "ref": "ref-of-the-receiver",
            "size": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        for body in bodies
    ]


def test_a_file_that_fails_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    async def by_size(exchange: Exchange) -> None:
        await (answer(413) if exchange.size == 3 else confirm)(exchange)

    with receiving(by_size) as receiver:
        assert send(receiver, *write(b"a", b"abc"), "missing\x1b.bin", ".") == 1
    out, err = receipts(capsys)
    assert [receipt["size"] for receipt in out] == [1]
    assert err == [
        f"consignee: file-1.bin: {TOO_LARGE}",
        r"consignee: missing\x1b.bin: The source cannot be read: No such file or directory.",
        "consignee: .: The source cannot be read: Is a directory.",
    ]


def test_a_token_may_lie_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("token").write_text(f"{TOKEN}\n")
    with receiving(confirm) as receiver:
        assert send(receiver, *write(b"a"), "--token-ref", "token", token=False) == 0
        assert receiver.exchanges[0].header("authorization") == f"Bearer {TOKEN}"
        assert send(receiver, *write(b"a"), "--token-ref", "nowhere", token=False) == 1
        assert len(receiver.exchanges) == 1
    assert "file-0.bin" in capsys.readouterr().err


@pytest.mark.requirement("AHP-S11")
def test_ahp_s11_without_a_credential_the_first_request_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with receiving(answer(401), confirm) as receiver:
        assert send(receiver, *write(b"a"), token=False) == 1
        assert len(receiver.exchanges) == 1
        assert send(receiver, *write(b"a"), token=False) == 0
        assert receiver.exchanges[1].header("authorization") is None
    assert "give a token" in capsys.readouterr().err


def test_a_client_identifies_itself_after_a_challenge(capsys: pytest.CaptureFixture[str]) -> None:
    """Discovery never leaves https: here it ends at once, and says why."""
    challenge = 'Bearer resource_metadata="http://127.0.0.1:1/metadata"'
    client = ["--client-id", "me", "--client-secret-env", "UPLOAD_TOKEN", "--scope", "a b"]
    with receiving(answer(401, headers={"WWW-Authenticate": challenge})) as receiver:
        assert send(receiver, *write(b"a"), *client, "--scope", "c", token=False) == 1
        assert len(receiver.exchanges) == 1
    captured = capsys.readouterr()
    assert "file-0.bin: " in captured.err
    assert TOKEN not in captured.err


def test_an_identity_names_its_scopes_and_where_its_secret_is() -> None:
    who = Identity(None, None, "me", "SECRET", ("a", "b"))
    client = client_of(who)
    assert who.auth == {}
    assert client is not None
    assert (client.client_id, client.secret_env, client.scopes) == ("me", "SECRET", ("a", "b"))


@pytest.mark.requirement("AHP-S08", "AHP-S12")
def test_time_and_size_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    with receiving(hang) as receiver:
        assert send(receiver, *write(b"abc"), "--max-bytes", "2") == 1
        assert receiver.exchanges == []
        assert send(receiver, *write(b"abc"), "--timeout-ms", "100") == 1
    err = capsys.readouterr().err.splitlines()
    assert "more than 2 bytes" in err[0]
    assert "within its time" in err[1]


def test_only_some_files_are_sent_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    running, most = 0, 0

    async def counted(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await exchange.read_body()
        running -= 1  # a sender begins its next file only after the answer
        await confirm(exchange)

    with receiving(counted) as receiver:
        assert send(receiver, *write(*[b"abc"] * 30)) == 0
    assert most <= AT_ONCE
    assert len(capsys.readouterr().out.splitlines()) == 30


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "FILE"),
        (["a"], "--endpoint"),
        (["a", "--endpoint", "http://127.0.0.1/"], "must be https"),
        (["a", "--endpoint", "http://r.example/", "--allow-loopback-http"], "must be https"),
        (["a", "--endpoint", "https://u:p@r.example/"], "user name"),
        (["a", "--endpoint", "https://r.example/", "--timeout-ms", "0"], "--timeout-ms"),
        (["a", "--endpoint", "https://r.example/", "--max-bytes", "x"], "--max-bytes"),
        (["a", "--endpoint", "https://r.example/", "--token-env", "not a name"], "tokenEnv"),
        (
            ["a", "--endpoint", "https://r.example/", "--token-env", "A", "--token-ref", "b"],
            "only one",
        ),
        (
            ["a", "--endpoint", "https://r.example/", "--token-env", "A", "--client-id", "b"],
            "only one",
        ),
        (["a", "--endpoint", "https://r.example/", "--client-secret-env", "A"], "--client-id"),
        (["a", "--endpoint", "https://r.example/", "--scope", "A"], "--client-id"),
    ],
)
def test_wrong_use_is_told_from_failure(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["send", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert what in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.requirement("AHP-S39")
def test_options_that_are_refused_leave_nothing_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hashing has begun by then: which options can be used is told by what is imported."""
    begun = threading.Event()
    steps: list[int] = []
    real = FileReading.step

    def step(reading: FileReading, max_bytes: int) -> bool:
        begun.set()
        steps.append(threading.get_ident())
        return real(reading, max_bytes)

    def load(name: str) -> object:
        assert begun.wait(60)
        return import_module(name)

    monkeypatch.setattr(FileReading, "step", step)
    monkeypatch.setattr("app.commands.send.import_module", load)
    names = write(bytes(3_000_000), b"abc")
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert main(["send", *names, "--endpoint", "http://r.example/"]) == 2
    assert "must be https" in capsys.readouterr().err
    assert threading.get_ident() not in steps
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_of_files_in_place_one_may_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """More than are begun early, the first of them missing, one over the limit."""
    bodies = [bytes([number]) * 2_000_000 for number in range(6)]
    too_large = bytes(2_000_001)

    with receiving(confirm) as receiver:
        names = write(too_large, *bodies)
        assert send(receiver, "missing", *names, "--max-bytes", "2000000") == 1
        assert len(receiver.exchanges) == len(bodies)
    out, err = receipts(capsys)
    assert [receipt["sha256"] for receipt in out] == [
        hashlib.sha256(body).hexdigest() for body in bodies
    ]
    assert [line.split(":")[1].strip() for line in err] == ["missing", "file-0.bin"]


def test_the_command_itself_imports_no_more_than_it_needs() -> None:
    """What is imported before the hashing begins is time that it waits."""
    heavy = {"httpx", "pydantic", "asyncio", "ssl", "rich", "anyio"}
    code = "import sys, app.cli, app.commands.send; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy.isdisjoint(ran.stdout.split())


def test_a_terminal_gets_bars_and_then_a_line_for_each_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with receiving(confirm) as receiver:
        names = write(b"abc", bytes(3_000_000))
        assert send(receiver, *names, "missing[red].bin") == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"ref-of-the-receiver  {name}" for name in names]
    assert "100%" in captured.err
    assert "missing[red].bin: The source cannot be read" in captured.err
    assert issubclass(Bars, Progress)


def test_no_secret_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with receiving(answer(403), answer(500), answer(302)) as receiver:
        for _ in range(3):
            assert send(receiver, *write(b"abc")) == 1
        assert f"consignee/{__version__}" in str(receiver.exchanges[0].header("user-agent"))
    captured = capsys.readouterr()
    assert TOKEN not in captured.err + captured.out
    assert "/upload" not in captured.err
