"""Authorization servers and protected endpoints on loopback, over TLS, every answer scripted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from app.sender.authorization import Credentials
from app.sender.budget import Budget
from app.sender.config import UploadConfiguration
from app.sender.oauth import Client
from tests.auth.issuer import Clock, Reply, Request, ScriptedIssuer
from tests.certificates import write_certificate

UPLOADS = "/ahp/uploads"
RESOURCE_PLACE = "/.well-known/oauth-protected-resource"
SERVER_PLACE = "/.well-known/oauth-authorization-server"
OPENID_PLACE = "/.well-known/openid-configuration"
SECRET = "s3cret/+ value"
AGENT = Client("agent", secret_env="AGENT_SECRET", scopes=("ahp.upload", "refs.read"))


class Tls:
    """One certificate of localhost and 127.0.0.1: served with, and trusted."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = write_certificate(folder)
        self.trust = ssl.create_default_context(cafile=str(self.certificate))
        self.identity = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.identity.load_cert_chain(self.certificate, self.key)


@asynccontextmanager
async def scripted(
    tls: Tls | None, *, address: str = "127.0.0.1", name: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[ScriptedIssuer]:
    """A server at `address` that calls itself `name`; without `tls` it speaks plain HTTP."""
    server = ScriptedIssuer()
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(server._serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    identity = tls.identity if tls else None
    listening = await asyncio.start_server(accept, address, port, ssl=identity)
    scheme = "https" if tls else "http"
    server.url = f"{scheme}://{name}:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.wait_closed()


@dataclass(slots=True)
class World:
    """A protected endpoint at 127.0.0.1, its issuer at localhost, and who asks there."""

    tls: Tls
    receiver: ScriptedIssuer
    issuer: ScriptedIssuer
    clock: Clock
    issued: int = 0

    def __post_init__(self) -> None:
        self.receiver.routes[RESOURCE_PLACE + UPLOADS] = Reply(body=self.resource())
        self.issuer.routes[SERVER_PLACE] = Reply(body=self.server())
        self.issuer.routes["/token"] = self.issue

    @property
    def endpoint(self) -> str:
        return self.receiver.url + UPLOADS

    @property
    def challenge(self) -> str:
        return f'Bearer resource_metadata="{self.receiver.url}{RESOURCE_PLACE}{UPLOADS}"'

    def resource(self, **changes: Any) -> dict[str, Any]:
        """The metadata of the endpoint; a change to None takes a member away."""
        return _merged(
            {"resource": self.endpoint, "authorization_servers": [self.issuer.url]}, changes
        )

    def server(self, **changes: Any) -> dict[str, Any]:
        """The metadata of the issuer; a change to None takes a member away."""
        own: dict[str, Any] = {
            "issuer": self.issuer.url,
            "token_endpoint": self.issuer.url + "/token",
            "authorization_endpoint": self.issuer.url + "/authorize?tenant=acme",
            "grant_types_supported": ["client_credentials", "authorization_code"],
            "code_challenge_methods_supported": ["S256"],
        }
        return _merged(own, changes)

    def publish_server(self, **changes: Any) -> None:
        self.issuer.routes[SERVER_PLACE] = Reply(body=self.server(**changes))

    def publish_resource(self, **changes: Any) -> None:
        self.receiver.routes[RESOURCE_PLACE + UPLOADS] = Reply(body=self.resource(**changes))

    def issue(self, request: Request, **changes: Any) -> Reply:
        """The next token, `token-1` being the first, for an hour."""
        self.issued += 1
        own: dict[str, Any] = {
            "access_token": f"token-{self.issued}",
            "token_type": "Bearer",
            "expires_in": 3600,
        }
        return Reply(body=_merged(own, changes))

    def answer_tokens(self, **changes: Any) -> None:
        """Change what every further token response says."""
        self.issuer.routes["/token"] = lambda request: self.issue(request, **changes)

    def token_requests(self) -> list[dict[str, str]]:
        """The form of every request to the token endpoint, in order."""
        return [form_of(r) for r in self.issuer.requests if r.path == "/token"]

    def configuration(self, **members: Any) -> UploadConfiguration:
        table = {"endpoint": self.endpoint, "timeoutMs": 30_000, "maxBytes": 1 << 20, **members}
        return UploadConfiguration.parse(table, allow_loopback_http=True)

    def credentials(self, **options: Any) -> Credentials:
        given: dict[str, Any] = {
            "client": AGENT,
            "trust": self.tls.trust,
            "environment": {"AGENT_SECRET": SECRET},
            "clock": self.clock,
            **options,
        }
        return Credentials(**given)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Endpoint and issuer, running."""
    tls = Tls(folder)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(scripted(tls))
        issuer = await stack.enter_async_context(scripted(tls, name="localhost"))
        yield World(tls, receiver, issuer, Clock())


def budget() -> Budget:
    """As much time as a test needs, also on a busy machine."""
    return Budget(60)


def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; none of them may be there twice."""
    fields = parse_qs(request.body.decode(), strict_parsing=True)
    assert all(len(values) == 1 for values in fields.values())
    return {name: values[0] for name, values in fields.items()}


def _merged(own: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**own, **changes}.items() if value is not None}
