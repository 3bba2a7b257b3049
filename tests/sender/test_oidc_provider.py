"""The real authorization server and the real receiver: from a 401 to a receipt."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from app.sender.authorization import Credentials
from app.sender.config import UploadConfiguration
from app.sender.errors import AuthorizationError
from app.sender.oauth import Client, Interaction
from app.sender.sources import Source
from app.sender.transfer import Receipt, Sender
from tests.auth.authorization_server import oidc_modules
from tests.components import require_component
from tests.e2e.processes import ROOT, RunningServer, running_server
from tests.npm import NODE, is_installable
from tests.sender.authorities import Tls, budget

pytestmark = [pytest.mark.anyio, pytest.mark.component("oidc-provider")]

AUDIENCE = "https://consignee.test/ahp/uploads"
SECRET = "agent-secret/+"
AGENT = Client("agent", secret_env="AGENT_SECRET", scopes=("ahp.upload",))
DESK = Client("desk", flow="authorization_code_pkce", scopes=("ahp.upload",))
REDIRECT = "https://host.test/callback"
STEPS = 10
"""More redirects than login and consent take."""
BODY = bytes(range(256)) * 1000


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def issuer(tls: Tls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    require_component(
        "oidc-provider", present=is_installable(), why="it needs node 20 or newer and npm"
    )
    with running(tmp_path_factory.mktemp("oidc"), tls) as url:
        yield url


@pytest.fixture(scope="module")
def receiver(
    tls: Tls, issuer: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("receiver") / "consignee.toml"
    table = {"issuer": issuer, "audience": [AUDIENCE], "scope_claim": "tenant"}
    config.write_text(
        f"tls_cert_file = {json.dumps(str(tls.certificate))}\n"
        f"tls_key_file = {json.dumps(str(tls.key))}\n"
        "[[issuers]]\n" + "".join(f"{name} = {json.dumps(v)}\n" for name, v in table.items())
    )
    trust = {"SSL_CERT_FILE": str(tls.certificate)}
    with running_server("--config", str(config), environment=trust) as started:
        yield started


@contextmanager
def running(folder: Path, tls: Tls) -> Iterator[str]:
    """The authorization server in `folder`, as its issuer's name; it ends with the block."""
    shutil.copy(Path(__file__).parent / "oidc" / "server.mjs", folder)
    (folder / "node_modules").symlink_to(oidc_modules())
    command = [str(NODE / "bin" / "node"), "server.mjs", str(tls.certificate), str(tls.key)]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [*command, AUDIENCE],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield next(
                line.removeprefix("issuer ").strip()
                for line in process.stdout
                if line.startswith("issuer ")
            )
        finally:
            process.kill()


def configuration(receiver: RunningServer, **members: Any) -> UploadConfiguration:
    table = {"endpoint": receiver.upload_endpoint, "timeoutMs": 60_000, "maxBytes": 1 << 20}
    return UploadConfiguration.parse({**table, **members})


def credentials(tls: Tls, client: Client | None, **options: Any) -> Credentials:
    return Credentials(
        client=client, trust=tls.trust, environment={"AGENT_SECRET": SECRET}, **options
    )


async def upload(tls: Tls, own: Credentials, where: UploadConfiguration) -> Receipt:
    async with Sender(own, trust=tls.trust) as sender:
        return await sender.upload(Source.memory(BODY), where)


def user(tls: Tls) -> Interaction:
    """A user with a browser: it follows what the server says until the redirect is ours."""

    async def ask(url: str) -> Mapping[str, str]:
        async with httpx.AsyncClient(verify=tls.trust) as browser:
            for _ in range(STEPS):
                answer = await browser.get(url)
                url = str(httpx.URL(url).join(answer.headers["location"]))
                if url.startswith(REDIRECT):
                    break
        return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}

    return Interaction(REDIRECT, ask)


@pytest.mark.requirement("AHP-S11", "AHP-R08")
async def test_client_credentials_are_discovered_and_used(
    tls: Tls, receiver: RunningServer
) -> None:
    own = credentials(tls, AGENT)
    first = await upload(tls, own, configuration(receiver))
    second = await upload(tls, own, configuration(receiver))
    assert first.sha256 == second.sha256 == hashlib.sha256(BODY).hexdigest()
    assert first.ref != second.ref


@pytest.mark.requirement("AHP-S11")
async def test_concurrent_uploads_share_what_was_discovered(
    tls: Tls, receiver: RunningServer
) -> None:
    own, where = credentials(tls, AGENT), configuration(receiver)
    receipts = await asyncio.gather(*(upload(tls, own, where) for _ in range(8)))
    assert len({receipt.ref for receipt in receipts}) == 8
    assert len(own._tokens) == 1


@pytest.mark.requirement("AHP-S09")
async def test_a_configured_client_asks_before_the_first_upload(
    tls: Tls, receiver: RunningServer, issuer: str
) -> None:
    async def resolve(reference: str) -> str:
        return {"vault/agent": SECRET}[reference]

    auth = {
        "type": "oauth",
        "resource": receiver.upload_endpoint,
        "issuer": issuer,
        "clientId": "agent",
        "clientSecretRef": "vault/agent",
        "flow": "client_credentials",
        "scopes": ["ahp.upload"],
    }
    own = credentials(tls, None, resolve_secret=resolve)
    assert (await upload(tls, own, configuration(receiver, auth=auth))).size == len(BODY)


async def test_a_code_with_pkce_and_then_a_refresh(tls: Tls, receiver: RunningServer) -> None:
    now = 0.0
    own = credentials(tls, DESK, interaction=user(tls), clock=lambda: now)
    assert (await upload(tls, own, configuration(receiver))).size == len(BODY)
    (first,) = own._tokens.values()
    now = 3600.0
    own._requests._interaction = None  # nobody is asked again
    assert (await upload(tls, own, configuration(receiver))).size == len(BODY)
    (second,) = own._tokens.values()
    assert first.value != second.value


async def test_a_scope_that_does_not_upload_is_refused_by_the_receiver(
    tls: Tls, receiver: RunningServer
) -> None:
    reader = Client("agent", secret_env="AGENT_SECRET", scopes=("refs.read",))
    with pytest.raises(AuthorizationError) as caught:
        await upload(tls, credentials(tls, reader), configuration(receiver))
    assert caught.value.code == "forbidden"


async def test_the_server_gives_no_token_for_another_resource(
    tls: Tls, receiver: RunningServer, issuer: str
) -> None:
    auth = {
        "type": "oauth",
        "resource": "https://else.test/uploads",
        "issuer": issuer,
        "clientId": "agent",
        "clientSecretRef": "x",
        "flow": "client_credentials",
    }

    async def resolve(reference: str) -> str:
        return SECRET

    own = credentials(tls, None, resolve_secret=resolve)
    with pytest.raises(AuthorizationError, match="invalid_target"):
        await own.credential(configuration(receiver, auth=auth), None, budget())


async def test_a_wrong_secret_is_the_servers_to_refuse(tls: Tls, receiver: RunningServer) -> None:
    wrong = Credentials(client=AGENT, trust=tls.trust, environment={"AGENT_SECRET": "wrong"})
    with pytest.raises(AuthorizationError, match="invalid_client") as caught:
        await upload(tls, wrong, configuration(receiver))
    assert caught.value.code == "token_refused"


async def test_the_command_finds_its_way_to_a_receipt(
    tls: Tls, receiver: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "body.bin"
    file.write_bytes(BODY)
    command = [sys.executable, "-m", "app.cli", "send", str(file), "--json"]
    command += ["--endpoint", receiver.upload_endpoint, "--client-id", "agent"]
    command += ["--client-secret-env", "AGENT_SECRET", "--scope", "ahp.upload"]
    environment = {
        "AGENT_SECRET": SECRET,
        "SSL_CERT_FILE": str(tls.certificate),
        "PYTHONPATH": str(ROOT),
    }
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sha256"] == hashlib.sha256(BODY).hexdigest()
    assert SECRET.encode() not in done.stdout + done.stderr
