"""Hosts and a running receiver: the SDK's own client, an upload callback built from what the
receiver advertises, and the operator's code in the receiver's process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from agenthooksprotocol import ContentSources, HookResult, Hooks, OwnedContentSource, capability
from agenthooksprotocol.event import Harness
from agenthooksprotocol.transports import HTTPTransport

from tests import backends
from tests.ahp.hook_examples import TEXT, attachment, event, interception, message, observation
from tests.e2e.processes import ROOT, RunningServer, running_server

pytestmark = pytest.mark.anyio

IMAGE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 5000
BACKEND = "org.example.receiver"
HOOKS_TOKEN, UPLOAD_TOKEN = "token-for-events", "token-for-uploads"

OPERATOR = """
import json
import os


async def handle(event):
    record = {"id": event.id, "type": event.type, "mode": event.mode, "scope": event.scope,
              "roles": [message.role for message in event.messages], "attachments": []}
    for attachment in event.attachments:
        async with attachment.open() as stream:
            data = b"".join([chunk async for chunk in stream])
        record["attachments"].append(
            [attachment.media_type, attachment.size, attachment.sha256, data.hex()])
    with open(os.environ["SEEN_FILE"], "a") as file:
        file.write(json.dumps(record) + "\\n")
    if event.mode == "intercept":
        return [{"type": "deny", "reason": "seen"}]
"""


def token_table(name: str, permission: str) -> str:
    token = {"hooks": HOOKS_TOKEN, "uploads": UPLOAD_TOKEN}[name]
    digest = hashlib.sha256(token.encode()).hexdigest()
    return (
        f'[[tokens]]\nname = "{name}"\ntoken_sha256 = "{digest}"\nscope = "tenant"\n'
        f'permissions = ["{permission}"]\n'
    )


@contextmanager
def receiver(
    folder: Path, handler: str, code_in: Path, configuration: str = "", **environment: str
) -> Iterator[RunningServer]:
    """A receiver with that handler, and two tokens of one scope: for events, and for uploads."""
    (folder / "consignee.toml").write_text(
        f'event_handler = "{handler}"\n{configuration}\n'
        + token_table("hooks", "ahp.hooks")
        + token_table("uploads", "ahp.upload")
    )
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(code_in)))
    with running_server(
        "--config", str(folder / "consignee.toml"), "--data-dir", str(folder / "data"),
        environment=environment,
    ) as server:  # fmt: skip
        yield server


class Stream:
    """What the SDK takes a source's bytes from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        return piece

    async def aclose(self) -> None:
        self._data = b""


class Host:
    """An agent's host that knows of the receiver its hooks URL and two credentials."""

    def __init__(self, server: RunningServer, **modes: Any) -> None:
        self._upload: Any = None
        transport = {"type": "http", "url": server.url + "/ahp/hooks"}
        binding = {"type": "bearer", "tokenRef": "events"}
        backend = {"id": BACKEND, "transport": transport, "authentication": binding}
        self.hooks = Hooks(
            {"protocolVersion": "draft", "hooks": [backend]},
            source="urn:example:host",
            harness=Harness(name="host", version="1"),
            capabilities=capability.HostCapabilities(
                turn_start=capability.TurnStartCapabilities(**modes)
            ),
            resolve_credential=lambda _: HOOKS_TOKEN,
            authorize_configuration=self._authorize,
        )

    def _authorize(self, _: Any, configuration: Any) -> bool:
        (self._upload, *_rest) = [one["upload"] for one in configuration["subscriptions"]]
        return True

    async def _transfer(self, body: bytes) -> Any:
        assert len(body) <= self._upload["maxBytes"]
        timeout = self._upload["timeoutMs"] / 1000
        async with httpx.AsyncClient(timeout=timeout) as client:
            transport = HTTPTransport(self._upload["endpoint"], client=client)
            headers = {"Authorization": f"Bearer {UPLOAD_TOKEN}"}
            return await transport.upload(self._upload["endpoint"], body, headers=headers)

    async def start_turn(self, data: bytes) -> HookResult[Any, Any, Any]:
        """Tell of a turn that begins with a text and an image."""
        picture = {"id": "p2", "kind": "attachment", "mediaType": "image/png",
                   "selection": "metadata"}  # fmt: skip
        turn = {"turn": {"id": "t"}, "trigger": "user", "items": [message(TEXT, picture)]}
        source = OwnedContentSource(Stream(data), max_bytes=1 << 24)
        sources = ContentSources({"turn.start.items_parts[0][1]": source})
        async with self.hooks:
            return await self.hooks.dispatch(
                "turn.start", turn, event_id="e", sources=sources,
                uploads={BACKEND: self._transfer},
            )  # fmt: skip


def seen(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(mode: str) -> dict[str, Any]:
    digest = hashlib.sha256(IMAGE).hexdigest()
    return {
        "id": "e", "type": "turn.start", "mode": mode, "scope": "tenant", "roles": ["user"],
        "attachments": [["image/png", len(IMAGE), digest, IMAGE.hex()]],
    }  # fmt: skip


@pytest.mark.requirement("AHP-R43", "AHP-R48", "AHP-C13")
async def test_the_handler_sees_the_bytes_that_the_sdks_host_sent(tmp_path: Path) -> None:
    (tmp_path / "operators_code.py").write_text(OPERATOR)
    log = tmp_path / "seen"
    with receiver(tmp_path, "operators_code:handle", tmp_path, SEEN_FILE=str(log)) as server:
        host = Host(server, observe=True)
        result = await host.start_turn(IMAGE)
        assert (result.diagnostics, host.hooks.configuration_diagnostics) == ([], [])
    assert seen(log) == [expected("observe")]


@pytest.mark.requirement("AHP-R41", "AHP-R43")
async def test_an_intercepting_receiver_decides_and_is_told_of_the_outcome(tmp_path: Path) -> None:
    """Both subscriptions: the event is handled once, and the observation of it is no fault."""
    (tmp_path / "operators_code.py").write_text(OPERATOR)
    log = tmp_path / "seen"
    subscriptions = "".join(
        f'[[event_subscriptions]]\nevents = ["turn.*"]\nmode = "{mode}"\n'
        for mode in ("intercept", "observe")
    )
    with receiver(
        tmp_path, "operators_code:handle", tmp_path, subscriptions, SEEN_FILE=str(log)
    ) as server:
        host = Host(server, observe=True, intercept=capability.TurnStartIntercept(deny=True))
        result = await host.start_turn(IMAGE)
        assert result.diagnostics == []
        assert result.permission.value == "deny"
    assert seen(log) == [expected("intercept")]


@contextmanager
def uploaded(server: RunningServer, *bodies: bytes) -> Iterator[tuple[httpx.Client, list[str]]]:
    """A client that may deliver events, and the references of `bodies`."""
    refs = []
    with httpx.Client() as client:
        for body in bodies:
            headers = {
                "Authorization": f"Bearer {UPLOAD_TOKEN}",
                "Content-Type": "application/octet-stream",
                "AHP-Content-SHA256": hashlib.sha256(body).hexdigest(),
            }
            answer = client.post(server.upload_endpoint, content=body, headers=headers)
            refs.append(answer.raise_for_status().json()["ref"])
        client.headers["Authorization"] = f"Bearer {HOOKS_TOKEN}"
        yield client, refs


def test_the_example_writes_every_attached_image_to_its_folder(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    handlers = ROOT / "deploy" / "handlers"
    with (
        receiver(tmp_path, "save_images:handle", handlers, IMAGES_DIR=str(images)) as server,
        uploaded(server, IMAGE, b"gif", b"sound", b"odd") as (client, refs),
    ):
        types = ["image/png", "IMAGE/GIF; a=b", "audio/ogg", "image/x-odd/../../x"]
        parts = [attachment(*one) for one in zip(refs, types[:3], strict=False)]
        parts.append(attachment(refs[3], "image/x-odd"))
        for ident in ("a", "b"):
            sent = observation(event(id=ident, items=[message(*parts)]))
            assert client.post(server.url + "/ahp/hooks", json=sent).status_code == 204
    digests = [hashlib.sha256(body).hexdigest() for body in (IMAGE, b"gif", b"odd")]
    names = [d + e for d, e in zip(digests, (".png", ".gif", ".image"), strict=True)]
    assert sorted(path.name for path in images.iterdir()) == sorted(names)
    assert (images / names[0]).read_bytes() == IMAGE


def test_the_example_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Without its folder it fails: the event is stored, and the fault is in the log."""
    missing = tmp_path / "missing"
    with (
        receiver(
            tmp_path, "save_images:handle", ROOT / "deploy" / "handlers", IMAGES_DIR=str(missing)
        ) as server,
        uploaded(server, IMAGE) as (client, refs),
    ):
        asked = interception(event(id="e", items=[message(attachment(refs[0]))]))
        answer = client.post(server.url + "/ahp/hooks", json=asked)
        assert answer.json()["error"] == {"code": -32004, "message": "Backend internal error"}
        assert "the handler failed" in server.stderr()
    assert not missing.exists()


@pytest.mark.requirement("AHP-R38")
def test_an_event_survives_its_process(tmp_path: Path) -> None:
    """Killed while the handler works: the event is there, and says that it has no outcome."""
    (tmp_path / "operators_code.py").write_text(
        "import os\nasync def handle(event):\n    os.kill(os.getpid(), 9)\n"
    )
    sent = observation(event(id="event-of-the-killed"))
    with receiver(tmp_path, "operators_code:handle", tmp_path) as server:
        headers = {"Authorization": f"Bearer {HOOKS_TOKEN}"}
        with pytest.raises(httpx.TransportError):
            httpx.post(server.url + "/ahp/hooks", json=sent, headers=headers)
        assert server.process.wait(60) == -9
    (tmp_path / "operators_code.py").write_text("async def handle(event):\n    raise SystemExit\n")
    with receiver(tmp_path, "operators_code:handle", tmp_path) as server:
        answer = httpx.post(server.url + "/ahp/hooks", json=sent, headers=headers)
        assert answer.status_code == 204
        assert "handler" not in server.log_with("POST  /ahp/hooks  204")
    data_dir = tmp_path / "data"
    listed = subprocess.run(
        [sys.executable, "-m", "app.cli", "events", "list", "--scope", "tenant", "--data-dir",
         str(data_dir), "--json"],
        cwd=ROOT, env=os.environ | backends.environment_of(data_dir), capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    (line,) = listed.splitlines()
    assert json.loads(line)["event_id"] == "event-of-the-killed"
    assert json.loads(line)["outcome"] is None


@pytest.mark.parametrize("name", ["operators_absence:handle", "operators_code:nothing"])
def test_a_handler_that_is_not_there_ends_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "operators_code.py").write_text("")
    with pytest.raises(AssertionError, match="event_handler"), receiver(tmp_path, name, tmp_path):
        pytest.fail("it has started")
