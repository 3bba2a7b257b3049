"""`consignee dev` and `consignee serve` as a person runs them: real processes, real clients."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import write_certificate
from tests.e2e.processes import (
    EXIT_SECONDS,
    ROOT,
    RunningServer,
    backend_environment,
    running_server,
)

BODY = bytes(range(256)) * 400
EXIT_STATUS_OF_A_FAILURE, EXIT_STATUS_OF_WRONG_USE = 1, 2


def upload(server: RunningServer, body: bytes, token: str, **options: Any) -> httpx.Response:
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(body).hexdigest(),
    }
    query = options.pop("query", "")
    url = server.upload_endpoint + query
    return httpx.post(url, content=body, headers=headers, trust_env=False, **options)


def surroundings(folder: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """How to start a process with `folder` as its working and its temporary folder."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CONSIGNEE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "TMPDIR": str(folder)}
    return {
        "cwd": folder,
        "env": inherited | own | (environment or {}),
        "stdin": subprocess.DEVNULL,
    }


def consignee(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run one command to its end, with `folder` as working and as temporary folder."""
    chosen = {**backend_environment(arguments, folder), **(environment or {})}
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        **surroundings(folder, chosen),
        capture_output=True,
        timeout=EXIT_SECONDS,
        check=False,
    )


def complaint(finished: subprocess.CompletedProcess[bytes], status: int) -> str:
    """The one line that a command which ended with `status` has said."""
    text = finished.stderr.decode()
    assert finished.returncode == status, text
    assert text.startswith("consignee: ")
    assert text.count("\n") == 1
    return text.strip()


def output(finished: subprocess.CompletedProcess[bytes]) -> bytes:
    """What a command that succeeded has printed."""
    assert finished.returncode == 0, finished.stderr.decode()
    return finished.stdout


# A person's first minute


@pytest.mark.requirement("AHP-R25")
def test_the_printed_curl_line_uploads() -> None:
    with running_server() as server:
        line = re.findall(r"^curl .*$", server.stdout(), re.MULTILINE)[0]
        pasted = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    receipt = json.loads(pasted.stdout)
    body = Path("/etc/hosts").read_bytes()
    assert receipt["size"] == len(body)
    assert receipt["sha256"] == hashlib.sha256(body).hexdigest()
    assert list(receipt) == ["ref", "size", "sha256"]


def test_the_ready_file_and_the_banner_say_the_same() -> None:
    with running_server() as server:
        shown = server.stdout()
        assert list(server.tokens) == ["dev"]
        for value in (server.url, server.upload_endpoint, server.token, "temporary", "1.0GiB"):
            assert value in shown
        ready = server.scratch / "ready.json"
        assert ready.stat().st_mode & 0o777 == 0o600
        assert json.loads(ready.read_bytes())["pid"] == server.process.pid
        assert server.uhp_base_url == server.url


@pytest.mark.requirement("AHP-R10", "AHP-R13")
def test_each_token_is_a_principal_with_a_scope_of_its_own(tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path)]
    with running_server(*data, "--token", "alice=a1", "--token", "bob=b1==") as server:
        assert server.tokens == {"alice": "a1", "bob": "b1=="}
        assert upload(server, BODY, "wrong").status_code == 401
        refs = {
            name: upload(server, BODY, token).json()["ref"] for name, token in server.tokens.items()
        }
        for name, ref in refs.items():
            listed = consignee(tmp_path, "refs", "list", "--scope", name, *data)
            assert listed.stdout.decode().split() == [ref]


def log_of(server: RunningServer) -> str:
    """Everything that the server has logged until it ended: a line may follow its answer."""
    server.process.terminate()
    assert server.process.wait(EXIT_SECONDS) == 0
    return server.stderr()


@pytest.mark.requirement("AHP-R14", "AHP-R50")
def test_every_request_is_a_line_without_its_secrets() -> None:
    with running_server() as server:
        assert upload(server, b"abc", server.token, query="?key=s3cret").status_code == 201
        assert upload(server, b"abc", "wr0ng-token").status_code == 401
        httpx.get(f"{server.url}/a%0d%0aforged%1b[2J", trust_env=False)
        log = log_of(server)
    for line in (
        r"POST  /ahp/uploads  201  3 bytes  \S+ ms  dev",
        r"POST  /ahp/uploads  401  .*  invalid_credential",
        r"GET  /a\\x0d\\x0aforged\\x1b\[2J  404  .*",
    ):
        assert re.search(rf"^\d\d:\d\d:\d\d  {line}$", log, re.MULTILINE), log
    for secret in ("s3cret", server.token, "wr0ng-token", "\x1b"):
        assert secret not in log


# How it ends


def test_ctrl_c_ends_what_a_person_started(tmp_path: Path) -> None:
    """No ready file: what is printed into a pipe is there as soon as the port listens."""
    line = [sys.executable, "-m", "app.cli", "dev", "--port", "0"]
    with subprocess.Popen(
        line, **surroundings(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        shown = [next(process.stdout) for _ in range(14)]
        url = re.findall(r"URL +(\S+)", "".join(shown))[0]
        assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 0
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(number: signal.Signals) -> None:
    with running_server() as server:
        assert upload(server, BODY, server.token).status_code == 201
        folders = os.listdir(server.scratch / "tmp")
        server.process.send_signal(number)
        assert server.process.wait(EXIT_SECONDS) == 0
        assert len(folders) == 1
        assert os.listdir(server.scratch / "tmp") == []
        assert not (server.scratch / "ready.json").exists()
        assert "Traceback" not in server.stderr()


def test_a_named_data_folder_stays(tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path / "data"), "--token", "alice=a1"]
    with running_server(*data) as server:
        ref = upload(server, BODY, "a1").json()["ref"]
        assert "temporary" not in server.stdout()
    read = ["refs", "cat", "--scope", "alice", ref, *data[:2]]
    assert output(consignee(tmp_path, *read)) == BODY
    with running_server(*data):
        assert output(consignee(tmp_path, *read)) == BODY


def test_a_data_folder_of_the_environment_is_one_that_was_named(tmp_path: Path) -> None:
    environment = {"CONSIGNEE_DATA_DIR": str(tmp_path / "data")}
    with running_server(environment=environment) as server:
        assert str(tmp_path / "data") in server.stdout()
        assert os.listdir(server.scratch / "tmp") == []
    assert (tmp_path / "data").is_dir()


# How it does not start


def test_a_port_in_use_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ready = ["--ready-file", str(tmp_path / "ready.json")]
        finished = consignee(tmp_path, "dev", "--port", port, *ready)
    assert f"127.0.0.1 port {port}" in complaint(finished, EXIT_STATUS_OF_A_FAILURE)
    assert finished.stdout == b""
    assert os.listdir(tmp_path) == []


def test_a_ready_file_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    ready = str(tmp_path / "missing" / "ready.json")
    finished = consignee(tmp_path, "dev", "--port", "0", "--ready-file", ready)
    assert "ready file" in complaint(finished, EXIT_STATUS_OF_A_FAILURE)
    assert os.listdir(tmp_path) == []


def test_wrong_configuration_opens_no_port(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("max_upload_byte = 1\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        finished = consignee(tmp_path, "serve", "--config", "c.toml", "--port", port)
    assert complaint(finished, EXIT_STATUS_OF_WRONG_USE) == (
        "consignee: max_upload_byte: unknown key"
    )


def test_a_secret_that_is_missing_is_one_line(tmp_path: Path) -> None:
    block = '[[tokens]]\nname = "a"\ntoken_env = "NOT_SET_ANYWHERE"\nscope = "a"\n'
    (tmp_path / "c.toml").write_text(block)
    finished = consignee(tmp_path, "dev", "--config", "c.toml", "--port", "0")
    assert "NOT_SET_ANYWHERE" in complaint(finished, EXIT_STATUS_OF_WRONG_USE)
    assert os.listdir(tmp_path) == ["c.toml"]


# With a configuration


def test_a_new_token_works_once_it_is_configured(tmp_path: Path) -> None:
    shown = consignee(tmp_path, "token", "new", "--name", "ci").stdout.decode()
    made = re.findall(r"^token: +(\S+)$", shown, re.MULTILINE)[0]
    config = tmp_path / "c.toml"
    public_url = 'public_url = "https://uploads.example/base"\n'
    config.write_text(public_url + shown[shown.index("[[tokens]]") :])
    with running_server("--config", str(config)) as server:
        assert server.tokens == {}
        assert upload(server, BODY, made).status_code == 201
        refused = upload(server, BODY, "wrong")
        assert "https://uploads.example/" in refused.headers["WWW-Authenticate"]
        assert "https://uploads.example/base" in server.stdout()
        assert server.upload_endpoint.startswith("http://127.0.0.1:")
    with running_server("--config", str(config), "--token", "alice=a1") as server:
        assert server.tokens == {"alice": "a1"}
        assert upload(server, BODY, made).status_code == 201
        assert upload(server, BODY, "a1").status_code == 201


@pytest.mark.requirement("AHP-R05")
def test_serve_over_tls(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    shown = consignee(tmp_path, "token", "new").stdout.decode()
    made = re.findall(r"^token: +(\S+)$", shown, re.MULTILINE)[0]
    config = tmp_path / "c.toml"
    files = f'tls_cert_file = "{certificate.name}"\ntls_key_file = "{key.name}"\n'
    config.write_text(files + 'data_dir = "data"\n' + shown[shown.index("[[tokens]]") :])
    trust = ssl.create_default_context(cafile=certificate)
    arguments = ["--config", str(config), "--host", "0.0.0.0", "--migrate"]
    with running_server(*arguments, command="serve") as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.tokens == {}
        assert server.stdout() == ""
        assert upload(server, BODY, made, verify=trust).status_code == 201
        port = server.url.rpartition(":")[2]
        asked = ["readyz", "--wait", "--config", str(config)]
        environment = {"CONSIGNEE_PORT": port}
        assert consignee(tmp_path, *asked, environment=environment).returncode == 0
        assert "public_url is not set" in log_of(server)


def test_serve_needs_a_schema_in_sqlite_and_logs_json(tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path / "data")]
    file = {"CONSIGNEE_DATABASE_URL": f"sqlite:///{tmp_path / 'data' / 'consignee.db'}"}
    finished = consignee(tmp_path, "serve", "--port", "0", *data, environment=file)
    assert "consignee migrate" in complaint(finished, EXIT_STATUS_OF_A_FAILURE)
    assert consignee(tmp_path, "migrate", *data, environment=file).returncode == 0
    with running_server(*data, command="serve", environment=file) as server:
        assert upload(server, BODY, "wrong", query="?key=s3cret").status_code == 401
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0)) as raw:
            raw.sendall(b"nonsense\r\n\r\n")
            assert raw.recv(1)
        lines = [json.loads(line) for line in log_of(server).splitlines()]
    said = {line["message"]: line for line in lines}
    assert said["listening"]["url"] == server.url
    refused, nonsense = (line for line in lines if line["message"] == "request")
    assert (refused["status"], refused["path"]) == (401, "/ahp/uploads")
    assert (nonsense["status"], nonsense["code"]) == (400, "malformed_request")
    assert said["Invalid HTTP request received."]["level"] == "warning"
    assert "s3cret" not in json.dumps(lines)


# Beside a running server


def test_looking_after_a_running_server(tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path / "data")]
    with running_server(*data, "--token", "alice=a1") as server:
        assert consignee(tmp_path, "readyz", "--wait", "--url", server.url).returncode == 0
        kept, ended = (upload(server, body, "a1").json()["ref"] for body in (BODY, b"ended"))
        scope = ["--scope", "alice", *data]
        shown = json.loads(output(consignee(tmp_path, "refs", "show", kept, *scope)))
        assert (shown["ref"], shown["size"]) == (kept, len(BODY))
        assert consignee(tmp_path, "refs", "remove", ended, *scope).returncode == 0
        unknown = consignee(tmp_path, "refs", "cat", ended, *scope)
        assert complaint(unknown, EXIT_STATUS_OF_A_FAILURE)
        assert unknown.stdout == b""
        assert b"1 bodies (5 bytes)" in output(consignee(tmp_path, "gc", *data))
        assert output(consignee(tmp_path, "fsck", *data)) == b"no damage\n"
        assert output(consignee(tmp_path, "refs", "cat", kept, *scope)) == BODY


def test_two_servers_share_one_data_folder(tmp_path: Path) -> None:
    arguments = ["--data-dir", str(tmp_path), "--token", "alice=a1"]
    with running_server(*arguments) as first, running_server(*arguments) as second:
        refs = [upload(server, BODY, "a1").json()["ref"] for server in (first, second)]
    listed = consignee(tmp_path, "refs", "list", "--scope", "alice", *arguments[:2])
    assert listed.stdout.decode().split() == refs
