"""A scripted issuer on loopback, tokens of every kind, and a clock that stands still."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, NamedTuple

from joserfc import jwk, jws

AUDIENCE = "https://consignee.test/ahp/uploads"
NOW = 1_800_000_000


class Clock:
    """A clock that only tests move."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Reply(NamedTuple):
    """One answer: a status, a body (JSON unless it is bytes) and further header lines."""

    status: int = 200
    body: Any = b""
    headers: tuple[str, ...] = ()

    def encode(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        lines = [f"HTTP/1.1 {self.status} X", f"Content-Length: {len(body)}", "Connection: close"]
        return "\r\n".join([*lines, *self.headers, "", ""]).encode() + body


class Request(NamedTuple):
    """What a request to the issuer held."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Route = Reply | Callable[[Request], Awaitable[Reply] | Reply]


class ScriptedIssuer:
    """A real HTTP server whose every answer a test chooses; unknown paths are 404."""

    def __init__(self) -> None:
        self.url = ""
        self.routes: dict[str, Route] = {}
        self.requests: list[Request] = []

    def publish(self, *keys: dict[str, Any], path: str = "/jwks") -> None:
        """Serve `keys` as the key set, and metadata that names it (RFC 8414)."""
        self.routes[path] = Reply(body={"keys": list(keys)})
        self.routes["/.well-known/oauth-authorization-server"] = Reply(
            body={"issuer": self.url, "jwks_uri": self.url + path}
        )

    def fetches(self, path: str = "/jwks") -> int:
        """How many requests came for `path`."""
        return sum(request.path == path for request in self.requests)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read_request(reader)
            self.requests.append(request)
            reply = self.routes.get(request.path, Reply(404))
            if not isinstance(reply, Reply):
                answer = reply(request)
                reply = answer if isinstance(answer, Reply) else await answer
            writer.write(reply.encode())
            await writer.drain()
        except (ConnectionError, EOFError):
            pass  # the client is gone, as some tests want it
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ")
    return Request(method, path, headers, body)


@asynccontextmanager
async def scripted_issuer() -> AsyncIterator[ScriptedIssuer]:
    """A running issuer on a free loopback port."""
    issuer = ScriptedIssuer()
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(issuer._serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield issuer
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@cache
def signing_key(name: str, kind: str = "EC", size: Any = "P-256") -> jwk.Key:
    """The private key `name`, made once for the whole run."""
    key = jwk.generate_key(kind, size, {"kid": name})  # type: ignore[call-overload]  # one of many
    assert isinstance(key, jwk.RSAKey | jwk.ECKey | jwk.OKPKey)
    return key


def rsa_key(name: str) -> jwk.Key:
    """An RSA key of 2,048 bits."""
    return signing_key(name, "RSA", 2048)


def public(key: jwk.Key, **members: Any) -> dict[str, Any]:
    """The public half of `key` as a JWK; a member that is None is left out."""
    merged = {**key.as_dict(private=False), **members}
    return {name: value for name, value in merged.items() if value is not None}


def encode(data: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def sign(header: dict[str, Any], claims: Any, key: jwk.Key, *, using: str | None = None) -> str:
    """A JWT that says `header` and is signed with `key`, whatever the header says of it."""
    payload = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    signed = encode(json.dumps(header).encode()) + "." + encode(payload)
    algorithm = jws.JWSRegistry.algorithms[using or header["alg"]]
    return signed + "." + encode(algorithm.sign(signed.encode(), key))


def claims_of(issuer: str, **changes: Any) -> dict[str, Any]:
    """The claims of a good token for `AUDIENCE`; a change to None takes the claim away."""
    claims = {
        "iss": issuer,
        "sub": "agent-7",
        "aud": AUDIENCE,
        "exp": NOW + 300,
        "iat": NOW,
        "scope": "ahp.upload openid",
        **changes,
    }
    return {name: value for name, value in claims.items() if value is not None}


def header_of(key: jwk.Key, **changes: Any) -> dict[str, Any]:
    """The header of a good token of `key`; a change to None takes the member away."""
    header = {"alg": _ALGORITHM[key.key_type], "typ": "at+jwt", "kid": key.kid, **changes}
    return {name: value for name, value in header.items() if value is not None}


_ALGORITHM = {"EC": "ES256", "RSA": "RS256", "OKP": "Ed25519"}


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    """ASGI headers with `token` as credential."""
    return [(b"authorization", b"Bearer " + token.encode("utf-8"))]
