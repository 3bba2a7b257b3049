"""Whole deliveries into a real receiver: two scopes, two attachments, and what is kept of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.ahp.content import parse_messages, parse_selection
from app.sender.attachments import Attachments
from app.sender.authorization import Credentials
from app.sender.budget import Budget
from app.sender.config import UploadConfiguration
from app.sender.delivery import Delivery
from app.sender.hook_calls import Event, HookCalls, HookEndpoint
from app.sender.interception import intercept
from app.sender.observation import Observations, observe
from app.sender.publication import UploadState
from app.sender.receivers import Receiver
from app.sender.sources import Source
from app.sender.transfer import Sender
from tests import backends
from tests.e2e.processes import ROOT, RunningServer, running_server

pytestmark = pytest.mark.anyio

SECONDS = 60
PICTURE = b"\x89PNG" + bytes(range(256)) * 8192
SONG = bytes(reversed(range(256))) * 3
SECRETS = {
    f"{scope.upper()}_{purpose}": f"{purpose}-of-{scope}-0123456789abcdef0123456789abcdef"
    for scope in ("alice", "bob")
    for purpose in ("UPLOAD", "EVENT")
}
PERMISSIONS = {"UPLOAD": ["ahp.upload"], "EVENT": ["ahp.hooks", "refs.read"]}
MESSAGES = parse_messages(
    [
        {
            "id": "m1",
            "role": "user",
            "parts": [
                {
                    "id": "t1",
                    "kind": "text",
                    "mediaType": "text/plain",
                    "selection": "body",
                    "text": "Listen and look.",
                },
                {
                    "id": "picture",
                    "kind": "attachment",
                    "mediaType": "image/png",
                    "selection": "metadata",
                },
                {
                    "id": "song",
                    "kind": "attachment",
                    "mediaType": "audio/ogg",
                    "selection": "metadata",
                },
            ],
        }
    ]
)


@dataclass(frozen=True)
class Site:
    """A running receiver with an upload and an event credential for each of two scopes."""

    server: RunningServer
    data: Path

    def receiver(self, scope: str, **more: Any) -> Receiver:
        configuration = UploadConfiguration.parse(
            {
                "endpoint": self.server.upload_endpoint,
                "timeoutMs": SECONDS * 1000,
                "maxBytes": 1 << 24,
                "auth": {"type": "bearer", "tokenEnv": f"{scope.upper()}_UPLOAD"},
            },
            allow_loopback_http=True,
        )
        settings: dict[str, Any] = {
            "selection": parse_selection({"default": "body"}),
            "permission": True,
            "scope": scope,
            "upload": configuration,
        }
        return Receiver(name=scope, **(settings | more))

    def hooks(self, scope: str) -> HookEndpoint:
        url = f"{self.server.url}/ahp/hooks"
        return HookEndpoint(url, credential_of(scope), allow_loopback_http=True)

    def events(self, scope: str) -> list[list[str]]:
        """What `consignee events list` prints."""
        line = [sys.executable, "-m", "app.cli", "events", "list", "--scope", scope]
        listed = subprocess.run(
            [*line, "--data-dir", str(self.data)],
            cwd=ROOT,
            env=os.environ | backends.environment_of(self.data),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        return [row.split("\t") for row in listed.stdout.splitlines()]

    async def bytes_of(self, scope: str, ref: str, client: httpx.AsyncClient) -> httpx.Response:
        headers = {"Authorization": f"Bearer {SECRETS[f'{scope.upper()}_EVENT']}"}
        return await client.get(f"{self.server.url}/internal/refs/{ref}", headers=headers)


def credential_of(scope: str) -> Callable[[], Awaitable[str]]:
    async def credential() -> str:
        return f"Bearer {SECRETS[f'{scope.upper()}_EVENT']}"

    return credential


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("delivery")
    config = folder / "consignee.toml"
    tables = [
        f'[[tokens]]\nname = "{name.lower()}"\ntoken_env = "{name}"\n'
        f'scope = "{name.partition("_")[0].lower()}"\n'
        f"permissions = {json.dumps(PERMISSIONS[name.partition('_')[2]])}\n"
        for name in SECRETS
    ]
    config.write_text("internal_refs = true\n" + "\n".join(tables))
    data = folder / "data"
    arguments = ["--config", str(config), "--data-dir", str(data)]
    with running_server(*arguments, environment=SECRETS) as server:
        yield Site(server, data)


@pytest.fixture
def sources() -> dict[str, Source]:
    return {"picture": Source.memory(PICTURE), "song": Source.memory(SONG)}


def sender() -> Sender:
    return Sender(Credentials(environment=SECRETS))


def event(identity: str) -> Event:
    fields = {
        "id": identity,
        "source": "urn:example:host",
        "type": "turn.start",
        "time": "2026-01-01T00:00:00Z",
        "harness": {"name": "host", "version": "1"},
        "turn": {"id": "turn-1"},
        "trigger": "user",
        "native": {"raw": "Listen and look."},
    }
    may = {"effects": ["modify"], "modify": {"prompt": {"replace": True, "merge": True}}}
    return Event(fields, capabilities=may)


async def test_ahp_s21_s31_two_attachments_reach_two_scopes_each_by_its_own_references(
    site: Site, sources: dict[str, Source]
) -> None:
    alice, bob = site.receiver("alice"), site.receiver("bob")
    endpoints = {alice: site.hooks("alice"), bob: site.hooks("bob")}
    async with httpx.AsyncClient(trust_env=False) as client, sender() as uploads:
        calls = HookCalls(event("two-scopes"), endpoints, client)
        async with (
            Attachments(sources) as attachments,
            Delivery(
                MESSAGES, [alice, bob], attachments, uploads, budget=Budget(SECONDS)
            ) as delivery,
        ):
            turns = await observe(delivery, calls)
        assert [turn.error for turn in turns] == [None, None]
        hers, his = (turn.publication.references for turn in turns)
        assert len({*hers.values(), *his.values()}) == 4
        for scope, refs in (("alice", hers), ("bob", his)):
            bodies = [await site.bytes_of(scope, refs[each], client) for each in sources]
            assert [answer.content for answer in bodies] == [PICTURE, SONG]
        foreign = await site.bytes_of("bob", hers["picture"], client)
        assert foreign.status_code == 404
    for scope in ("alice", "bob"):
        kept = [row[:3] for row in site.events(scope)]
        assert ["two-scopes", "turn.start", "observe"] in kept


async def test_ahp_s30_an_observation_after_settlement_uses_the_confirmed_references(
    site: Site, sources: dict[str, Source]
) -> None:
    first = site.receiver("alice", mode="intercept", failure_policy="fail-closed")
    later = site.receiver("alice")
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        sender() as uploads,
        Attachments(sources) as attachments,
    ):
        hooks = site.hooks("alice")
        async with Delivery(
            MESSAGES, [first], attachments, uploads, budget=Budget(SECONDS)
        ) as delivery:
            asked = await intercept(delivery, HookCalls(event("asked"), {first: hooks}, client))
        assert (asked.ended_by, asked.messages) == (None, MESSAGES)
        reply = asked.turns[0].reply
        assert reply is not None
        assert reply.result == {"protocolVersion": "draft", "effects": []}
        calls = HookCalls(event("told"), {later: hooks}, client)
        async with Observations(calls) as observations:
            again = Delivery(asked.messages, [later], attachments, uploads, budget=Budget(SECONDS))
            assert observations.start(again)
    [told] = observations.turns
    assert told.error is None
    assert {upload.state for upload in told.publication.uploads} == {UploadState.REUSED}
    assert told.publication.references == asked.turns[0].publication.references


async def test_ahp_r36_a_reference_of_another_scope_refuses_the_event(
    site: Site, sources: dict[str, Source]
) -> None:
    """Uploaded with one scope's credential and told with the other's: nothing is stored."""
    mixed = site.receiver("alice")
    before = site.events("bob")
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        sender() as uploads,
        Attachments(sources) as attachments,
        Delivery(MESSAGES, [mixed], attachments, uploads, budget=Budget(SECONDS)) as delivery,
    ):
        calls = HookCalls(event("mixed"), {mixed: site.hooks("bob")}, client)
        [turn] = await observe(delivery, calls)
    assert turn.error is not None
    assert (turn.error.code, "404" in turn.error.message) == ("event_refused", True)
    assert site.events("bob") == before


async def test_ahp_s22_an_upload_that_the_receiver_refuses_becomes_a_gap_in_the_event(
    site: Site, sources: dict[str, Source]
) -> None:
    """The event credential does not open the upload endpoint."""
    unable = site.receiver("alice", on_failed="gap")
    secrets = {**SECRETS, "ALICE_UPLOAD": SECRETS["ALICE_EVENT"]}
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        Sender(Credentials(environment=secrets)) as uploads,
        Attachments(sources) as attachments,
        Delivery(MESSAGES, [unable], attachments, uploads, budget=Budget(SECONDS)) as delivery,
    ):
        calls = HookCalls(event("gaps"), {unable: site.hooks("alice")}, client)
        [turn] = await observe(delivery, calls)
    assert turn.error is None
    assert turn.publication.gaps == dict.fromkeys(sources, "transfer_failed")
    assert "gaps" in [row[0] for row in site.events("alice")]
