"""The command line, command by command, in this process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import threading
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click
import pytest

from app import __version__
from app.cli import cli, main
from app.commands.serving import Banner
from app.settings import ALL_PERMISSIONS, load_settings
from app.store.content import ContentStore
from app.store.records import Reference
from tests import backends
from tests.certificates import write_certificate

DIGEST = hashlib.sha256(b"token").hexdigest()


@pytest.fixture(autouse=True)
def empty_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No variables, no configuration file, and the process's loggers left as they were."""
    for name in [name for name in os.environ if name.startswith("CONSIGNEE_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield folder
    root.handlers[:] = handlers


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a migrated, empty store."""
    folder = tmp_path / "data"
    backends.name_in_environment(folder, monkeypatch)
    assert main(["migrate", "--data-dir", str(folder)]) == 0
    return folder


def commands(
    group: click.Group = cli, *above: str
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            yield (*above, name), command


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on standard error, which must be one line."""
    captured = capsys.readouterr()
    assert captured.err.startswith("consignee: ")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


# Every command


@pytest.mark.parametrize("arguments", [[], ["refs"], ["token"]])
def test_without_a_command_the_help_is_shown(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "Usage: consignee" in capsys.readouterr().err


def test_help_and_version_are_successes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    assert f"consignee {__version__}" in capsys.readouterr().out


@pytest.mark.parametrize("path", [pytest.param(path, id=" ".join(path)) for path, _ in commands()])
def test_every_command_takes_config_and_data_dir_and_explains_itself(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--config FILE" in shown
    assert "--data-dir DIR" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["serve", "--nonsense"],
        ["serve", "--port", "65536"],
        ["refs", "show", "ref_x"],
        ["refs", "show", "--scope", "a"],
        ["readyz", "--url", "nonsense"],
        ["readyz", "--url", "ftp://127.0.0.1"],
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint(capsys)


@pytest.mark.parametrize("command", ["dev", "serve", "migrate", "gc", "fsck", "check", "readyz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_upload_byte = 1", "max_upload_byte: unknown key"),
        ('max_upload_bytes = "much"', "max_upload_bytes: "),
        ("port =", "is not valid TOML"),
    ],
)
def test_wrong_configuration_is_one_line_and_status_2(
    command: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "wrong.toml"
    config.write_text(content)
    assert main([command, "--config", str(config)]) == 2
    assert message in complaint(capsys)


def test_an_unknown_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONSIGNEE_PROT", "1")
    assert main(["check"]) == 2
    assert "CONSIGNEE_PROT: unknown variable" in complaint(capsys)


def test_an_error_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent/folder")
    assert main(["dev", "--port", "0"]) == 1
    assert "No such file or directory" in complaint(capsys)


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.commands.upkeep.migrate_database", interrupt)
    assert main(["migrate"]) == 130
    assert capsys.readouterr().err.strip() == "consignee: interrupted"


# dev and serve: what they refuse


@pytest.mark.requirement("AHP-R05")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_dev_listens_on_loopback_only(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev", "--port", "0", "--host", host]) == 2
    assert "consignee serve" in complaint(capsys)


@pytest.mark.requirement("AHP-R05")
def test_serve_refuses_a_bind_where_credentials_would_travel_in_clear(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--port", "0", "--host", "0.0.0.0"]) == 2
    assert "tls_cert_file and tls_key_file, or set public_url" in complaint(capsys)


@pytest.mark.requirement("AHP-R14")
@pytest.mark.parametrize(
    "values",
    [
        ["s3cret"],
        ["=s3cret"],
        ["a b=s3cret"],
        ["alice="],
        ["alice=s3cret s3cret"],
        ["alice=s3cret\n"],
        ["alice=s3cretü"],
        ["alice=s3cret", "alice=s3cret2"],
    ],
)
def test_a_token_that_cannot_be_used_is_refused_and_not_repeated(
    values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for value in values for part in ("--token", value)]
    assert main(["dev", "--port", "0", *options]) == 2
    assert "s3cret" not in complaint(capsys)


def test_two_names_of_one_token_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev", "--port", "0", "--token", "a=same", "--token", "b=same"]) == 2
    assert "two tokens have the same token_sha256" in complaint(capsys)


def test_a_server_without_a_schema_is_told_to_migrate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--data-dir", str(tmp_path / "new")]) == 1
    assert "consignee migrate" in complaint(capsys)


def test_dev_reads_a_configuration_only_if_it_is_named(
    empty_surroundings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_surroundings / "consignee.toml").write_text('host = "192.0.2.1"\n')
    assert main(["dev", "--port", "65536"]) == 2
    assert "--port" in complaint(capsys)
    assert main(["dev", "--host", "192.0.2.2"]) == 2
    assert "192.0.2.2" in complaint(capsys)
    assert main(["dev", "--config", "consignee.toml"]) == 2
    assert "192.0.2.1" in complaint(capsys)


# The banner of dev


@pytest.fixture
def banner(tmp_path: Path) -> Banner:
    settings = load_settings(data_dir=tmp_path, port=8123, max_upload_bytes=1 << 30)
    return Banner(settings, "http://127.0.0.1:8123", {"dev": "cst_x"}, is_temporary=True)


def test_the_banner_tells_what_a_person_needs(
    banner: Banner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    banner.show()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    rows = dict(re.findall(r"^  (.{17}) (.*)$", shown, re.MULTILINE))
    assert {name.strip(): value for name, value in rows.items()} == {
        "URL": "http://127.0.0.1:8123",
        "Upload endpoint": "http://127.0.0.1:8123/ahp/uploads",
        "Event endpoint": "http://127.0.0.1:8123/ahp/hooks",
        "Token of dev": "cst_x",
        "Data folder": f"{tmp_path} (temporary, removed at exit)",
        "Size limit": "1.0GiB (1,073,741,824 bytes) an upload",
    }
    assert banner.curl() in shown.splitlines()


def test_the_banner_does_not_know_configured_tokens(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[[tokens]]\nname = "ci"\ntoken_sha256 = "{DIGEST}"\nscope = "ci"\n')
    settings = load_settings(config, public_url="https://x.example", data_dir=tmp_path)
    banner = Banner(settings, "http://127.0.0.1:1", {}, is_temporary=False)
    rows = dict(banner._rows())
    assert rows["Token of ci"] == "as configured"
    assert rows["Public URL"] == "https://x.example"
    assert rows["Data folder"] == str(tmp_path)
    assert "Bearer $TOKEN" in banner.curl()


def test_the_curl_line_trusts_the_configured_certificate(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    settings = load_settings(tls_cert_file=certificate, tls_key_file=key)
    banner = Banner(settings, "https://127.0.0.1:1", {"dev": "x"}, is_temporary=False)
    assert f"--cacert {certificate} " in banner.curl()


# check


def test_check_prints_what_is_in_force(
    empty_surroundings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_surroundings / "consignee.toml").write_text('port = 9000\ndata_dir = "d"\n')
    assert main(["check"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "port = 9000" in shown
    assert f'data_dir = "{empty_surroundings / "d"}"' in shown
    assert "public_url = not set" in shown


@pytest.mark.requirement("AHP-R14")
def test_check_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'database_url = "postgresql+asyncpg://u:s3cret@db/x?password=s3cret"\n'
        f'[[tokens]]\nname = "ci"\ntoken_sha256 = "{DIGEST}"\nscope = "ci"\n'
    )
    assert main(["check", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    assert 'database_url = "postgresql+asyncpg://u:***@db/x"' in shown
    assert "s3cret" not in shown
    assert DIGEST not in shown


@pytest.mark.parametrize(
    "content",
    [
        'host = "0.0.0.0"',
        '[[tokens]]\nname = "a"\ntoken_env = "NOT_SET_ANYWHERE"\nscope = "a"',
        'tls_cert_file = "missing.pem"\ntls_key_file = "missing.pem"',
    ],
)
def test_check_refuses_what_serve_would_refuse(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(content)
    assert main(["check", "--config", str(config)]) == 2
    assert complaint(capsys)


# token new


def test_a_new_token_comes_with_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = 'a "quoted" näme'
    assert main(["token", "new", "--name", name]) == 0
    shown = capsys.readouterr().out
    made = re.findall(r"^token: +(\S+)$", shown, re.MULTILINE)[0]
    digest = hashlib.sha256(made.encode()).hexdigest()
    assert f"SHA-256: {digest}\n" in shown
    block = shown[shown.index("[[tokens]]") :]
    assert tomllib.loads(block)["tokens"][0]["name"] == name
    config = tmp_path / "c.toml"
    config.write_text(block)
    (configured,) = load_settings(config).tokens
    assert (configured.token_sha256, configured.scope) == (digest, name)
    assert configured.permissions < ALL_PERMISSIONS


def test_no_two_tokens_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "new"]) == main(["token", "new"]) == 0
    first, second = re.findall(r"^token: +(\S{40,})$", capsys.readouterr().out, re.MULTILINE)
    assert first != second


# readyz


@contextmanager
def answering(*statuses: int) -> Iterator[str]:
    """A server that answers `/readyz` with each status in turn, the last one for ever."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/readyz"
            self.send_response((left.pop(0) if len(left) > 1 else left[0]) if found else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("end", ["", "/", "/readyz"])
def test_readyz_of_a_ready_server(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200) as url:
        assert main(["readyz", "--url", url + end]) == 0
    assert capsys.readouterr().out == "ready\n"


def test_readyz_asks_the_configured_server(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200) as url:
        port = url.rpartition(":")[2]
        config = Path("serve.toml")
        config.write_text(
            f'host = "0.0.0.0"\nport = {port}\npublic_url = "https://elsewhere.example"\n'
        )
        assert main(["readyz", "--config", str(config)]) == 0
    assert capsys.readouterr().out == "ready\n"


def test_readyz_needs_to_know_the_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONSIGNEE_PORT", "0")
    assert main(["readyz"]) == 2
    assert "--url" in complaint(capsys)


def test_readyz_without_wait_asks_once(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(503, 200) as url:
        assert main(["readyz", "--url", url]) == 1
        assert complaint(capsys).endswith(f"{url}/readyz is not ready: status 503")


def test_readyz_waits_until_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(503, 503, 200) as url:
        assert main(["readyz", "--wait", "--url", url]) == 0
    assert capsys.readouterr().out == "ready\n"


def test_readyz_does_not_wait_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(503) as url:
        assert main(["readyz", "--wait", "--timeout", "0", "--url", url]) == 1
    assert complaint(capsys)


def test_readyz_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200) as url:
        pass
    assert main(["readyz", "--url", url]) == 1
    assert "is not ready: " in complaint(capsys)


# References, gc, fsck


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


def upload(data_dir: Path, *bodies: bytes, scope: str = "alice", **given: Any) -> list[Reference]:
    async def receive_all() -> list[Reference]:
        store = await ContentStore.start(load_settings(data_dir=data_dir, **given))
        try:
            return [
                await store.receive(
                    _one(body),
                    scope=scope,
                    principal="p",
                    size=len(body),
                    sha256=hashlib.sha256(body).hexdigest(),
                )
                for body in bodies
            ]
        finally:
            await store.close()

    return asyncio.run(receive_all())


def refs(data_dir: Path, command: str, *arguments: str, scope: str = "alice") -> int:
    return main(["refs", command, "--data-dir", str(data_dir), "--scope", scope, *arguments])


def test_references_are_listed_one_a_line_in_their_scope(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.commands.options.PAGE", 2)
    confirmed = [reference.ref for reference in upload(data_dir, b"a", b"b", b"c", b"a", b"")]
    upload(data_dir, b"a", scope="bob")
    capsys.readouterr()
    assert refs(data_dir, "list") == 0
    assert capsys.readouterr().out.splitlines() == confirmed
    assert refs(data_dir, "list", scope="nobody") == 0
    assert capsys.readouterr().out == ""


def test_references_are_listed_as_json_lines(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kept,) = upload(data_dir, b"abc")
    capsys.readouterr()
    assert refs(data_dir, "list", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert datetime.fromisoformat(facts.pop("created_at")).timestamp() == kept.created_at
    assert facts == {
        "ref": kept.ref,
        "size": 3,
        "sha256": hashlib.sha256(b"abc").hexdigest(),
        "scope": "alice",
        "principal": "p",
        "expires_at": None,
    }


def test_one_reference_is_shown(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept,) = upload(data_dir, b"abc", retention="1d")
    capsys.readouterr()
    assert refs(data_dir, "show", kept.ref) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ref"] == kept.ref
    assert facts["expires_at"].endswith("Z")


@pytest.mark.requirement("AHP-R19", "AHP-R43")
@pytest.mark.parametrize("body", [b"", bytes(range(256)) * 4000], ids=["empty", "large"])
def test_the_bytes_come_out_as_they_went_in(
    body: bytes, data_dir: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (kept,) = upload(data_dir, body)
    capfdbinary.readouterr()
    assert refs(data_dir, "cat", kept.ref) == 0
    assert capfdbinary.readouterr().out == body


@pytest.mark.requirement("AHP-R36")
@pytest.mark.parametrize("command", ["show", "cat", "remove"])
def test_an_unknown_and_a_foreign_reference_look_the_same(
    command: str, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign,) = upload(data_dir, b"abc", scope="bob")
    capsys.readouterr()
    said = []
    for ref in (foreign.ref, "ref_unknown"):
        assert refs(data_dir, command, ref) == 1
        said.append(complaint(capsys))
    assert said[0] == said[1]


def test_a_removed_reference_is_gone_and_its_bytes_are_swept(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ended, kept) = upload(data_dir, b"ended", b"kept")
    capsys.readouterr()
    assert refs(data_dir, "remove", ended.ref) == 0
    assert capsys.readouterr().out == f"removed {ended.ref}\n"
    assert refs(data_dir, "show", ended.ref) == 1
    capsys.readouterr()
    gc = ["gc", "--data-dir", str(data_dir)]
    assert main([*gc, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(
        "would remove: 0 expired references, 1 bodies (5 bytes)"
    )
    assert main(gc) == 0
    assert capsys.readouterr().out.startswith("removed: 0 expired references, 1 bodies (5 bytes)")
    assert main(gc) == 0
    assert capsys.readouterr().out.startswith("removed: 0 expired references, 0 bodies (0 bytes)")
    assert refs(data_dir, "show", kept.ref) == 0


@pytest.mark.requirement("AHP-R40")
def test_fsck_finds_damage_and_only_that_fails(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = b"x" * 100_000
    upload(data_dir, body)
    capsys.readouterr()
    fsck = ["fsck", "--data-dir", str(data_dir)]
    assert main(fsck) == 0
    assert capsys.readouterr().out == "no damage\n"
    (stored,) = backends.bodies_of(data_dir)
    stored.write_bytes(b"y" * len(body))
    backends.new_body(data_dir, f"{'0' * 64}-{'0' * 16}").write_bytes(b"")
    backends.make_bodies_old(data_dir, timedelta(days=365).total_seconds())
    assert main(fsck) == 1
    shown = capsys.readouterr().out
    assert f"wrong_digest\t{hashlib.sha256(body).hexdigest()}\t" in shown
    assert "orphan\t" in shown
    assert shown.endswith("1 damaged\n")


def test_a_database_that_is_newer_is_refused(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with backends.rows_of(data_dir) as rows:
        rows.execute("UPDATE alembic_version SET version_num = 'from-the-future'")
    capsys.readouterr()
    for command in (["migrate"], ["gc"], ["serve", "--port", "0"]):
        assert main([*command, "--data-dir", str(data_dir)]) == 1
        assert complaint(capsys)
