"""The policy over discovered URLs, and the exchange that obeys it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest

from app.sender.destinations import (
    MAX_DOCUMENT_BYTES,
    Courier,
    Destinations,
    Resolve,
    named_host,
    resolve_host,
)
from app.sender.errors import AuthorizationError
from tests.auth.issuer import Reply, ScriptedIssuer
from tests.sender.authorities import Tls, scripted

pytestmark = pytest.mark.anyio

PUBLIC = Destinations(httpx.URL("https://receiver.test/up"))
LOOPBACK = Destinations(httpx.URL("http://127.0.0.1:8080/up"))


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(tmp_path)


@pytest.fixture
async def server(tls: Tls) -> AsyncIterator[ScriptedIssuer]:
    async with scripted(tls) as running:
        yield running


def answering(*addresses: str) -> Resolve:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return resolve


@pytest.mark.parametrize(
    "text",
    [
        "http://receiver.test/x",
        "http://127.0.0.1/x",
        "ftp://receiver.test/x",
        "//receiver.test/x",
        "/x",
        "",
        "https://",
        "https://[",
        "https://receiver.test\\else.test/x",
        "https://receiver.test;else.test/x",
        "https:///x",
        "https://receiver.test/x#fragment",
        "https://receiver.test/x#",
        "https://user@receiver.test/x",
        "https://receiver.test@else.test/x",
        "https://receiver.test/a b",
        "https://receiver.test/\r\nX: y",
        "https://receiver.test:65536/x",
        "https://receiver.test:0/x",
        "https://receiver.test:port/x",
        "https://receiver.tést/x",
    ],
)
def test_a_url_that_is_not_plain_https_is_refused(text: str) -> None:
    with pytest.raises(AuthorizationError) as caught:
        PUBLIC.admit(text, "receiver.test")
    assert caught.value.code == "destination_refused"


@pytest.mark.parametrize(
    "text",
    [
        "https://else.test/x",
        "https://sub.receiver.test/x",
        "https://receiver.test./x",
        "https://receiver.test.else.test/x",
        "https://xn--a/x",
        "https://[::1]/x",
    ],
)
def test_another_host_is_refused_unless_it_is_allowed(text: str) -> None:
    with pytest.raises(AuthorizationError) as caught:
        PUBLIC.admit(text, "receiver.test")
    assert caught.value.code == "destination_refused"
    allowing = Destinations(PUBLIC.endpoint, frozenset({named_host(text)}))
    assert str(allowing.admit(text, "receiver.test")) == text


def test_what_names_no_host() -> None:
    assert named_host("https://issuer.test:port") == named_host("issuer") == ""


def test_hosts_are_compared_without_case() -> None:
    assert PUBLIC.admit("https://RECEIVER.test:8443/x?y", "receiver.test").port == 8443


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.251",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
    ],
)
def test_a_private_address_is_refused_wherever_it_hides(address: str) -> None:
    url = httpx.URL("https://issuer.test/x")
    for addresses in ([address], ["93.184.216.34", address]):
        with pytest.raises(AuthorizationError) as caught:
            PUBLIC.judge(url, addresses)
        assert caught.value.code == "destination_refused"
    Destinations(PUBLIC.endpoint, frozenset({"issuer.test"})).judge(url, [address])


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_a_public_address_is_admitted(address: str) -> None:
    PUBLIC.judge(httpx.URL("https://issuer.test/x"), [address])


def test_a_host_without_address_is_refused() -> None:
    with pytest.raises(AuthorizationError):
        PUBLIC.judge(httpx.URL("https://issuer.test/x"), [])


def test_an_endpoint_on_loopback_opens_loopback_and_nothing_else() -> None:
    url = httpx.URL("https://localhost:9/x")
    LOOPBACK.judge(url, ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
    with pytest.raises(AuthorizationError):
        LOOPBACK.judge(url, ["127.0.0.1", "10.0.0.1"])


def test_the_endpoints_own_origin_may_be_private() -> None:
    PUBLIC.judge(httpx.URL("https://receiver.test:443/meta"), ["10.0.0.5"])
    with pytest.raises(AuthorizationError):
        PUBLIC.judge(httpx.URL("https://receiver.test:8443/meta"), ["10.0.0.5"])


async def test_the_checked_address_is_the_one_that_is_used(tls: Tls) -> None:
    """A name that resolves differently a moment later (DNS rebinding) changes nothing."""
    asked: list[tuple[str, int]] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return ["127.0.0.2"]

    async with scripted(tls, address="127.0.0.2", name="localhost") as pinned:
        pinned.routes["/x"] = Reply(body={})
        url = httpx.URL(pinned.url + "/x")
        answer = await Courier(trust=tls.trust, resolve=resolve).get(url, LOOPBACK)
        assert (answer.status, answer.body) == (200, b"{}")
        assert asked == [("localhost", url.port)]
        assert pinned.requests[0].headers["host"] == f"localhost:{url.port}"


async def test_an_address_that_cannot_be_reached_gives_way_to_the_next(
    tls: Tls, server: ScriptedIssuer
) -> None:
    server.routes["/x"] = Reply(body={})
    courier = Courier(trust=tls.trust, resolve=answering("127.0.0.9", "127.0.0.1"))
    answer = await courier.get(httpx.URL(server.url + "/x"), LOOPBACK)
    assert answer.status == 200
    with pytest.raises(AuthorizationError) as caught:
        await Courier(trust=tls.trust, resolve=answering("127.0.0.9", "127.0.0.8")).get(
            httpx.URL(server.url + "/x"), LOOPBACK
        )
    assert caught.value.code == "metadata_unavailable"


async def test_the_resolver_of_the_system_is_asked() -> None:
    assert "127.0.0.1" in await resolve_host("localhost", 443)
    assert list(await resolve_host("127.0.0.1", 443)) == ["127.0.0.1"]


@pytest.mark.parametrize("error", [socket.gaierror("no"), UnicodeError("label too long")])
async def test_a_name_that_does_not_resolve(tls: Tls, error: Exception) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise error

    with pytest.raises(AuthorizationError) as caught:
        await Courier(trust=tls.trust, resolve=resolve).get(httpx.URL("https://a.test/"), PUBLIC)
    assert caught.value.code == "metadata_unavailable"


async def test_a_refused_address_is_never_connected_to(tls: Tls, server: ScriptedIssuer) -> None:
    courier = Courier(trust=tls.trust, resolve=answering("127.0.0.1"))
    with pytest.raises(AuthorizationError) as caught:
        await courier.get(httpx.URL(server.url.replace("127.0.0.1", "a.test")), PUBLIC)
    assert caught.value.code == "destination_refused"
    assert server.requests == []


async def test_a_certificate_of_another_name_is_refused(tls: Tls, server: ScriptedIssuer) -> None:
    url = httpx.URL(server.url.replace("127.0.0.1", "a.test") + "/x")
    courier = Courier(trust=tls.trust, resolve=answering("127.0.0.1"))
    with pytest.raises(AuthorizationError) as caught:
        await courier.get(url, LOOPBACK)
    assert caught.value.code == "metadata_unavailable"
    assert server.requests == []


async def test_without_trust_only_public_authorities_count(server: ScriptedIssuer) -> None:
    with pytest.raises(AuthorizationError) as caught:
        await Courier().get(httpx.URL(server.url + "/x"), LOOPBACK)
    assert caught.value.code == "metadata_unavailable"
    assert server.requests == []


async def test_the_certificate_file_of_the_environment_is_honoured(
    tls: Tls, server: ScriptedIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
    answer = await Courier().get(httpx.URL(server.url + "/x"), LOOPBACK)
    assert answer.status == 404


@pytest.mark.requirement("AHP-S05")
async def test_no_redirect_is_followed_and_no_cookie_kept(tls: Tls, server: ScriptedIssuer) -> None:
    away = ("Location: /y", "Set-Cookie: a=b; Path=/")
    server.routes["/x"] = Reply(307, headers=away)
    courier = Courier(trust=tls.trust)
    for _ in range(2):
        answer = await courier.get(httpx.URL(server.url + "/x"), LOOPBACK)
        assert answer.status == 307
    assert [request.path for request in server.requests] == ["/x", "/x"]
    assert all("cookie" not in request.headers for request in server.requests)


async def test_a_proxy_of_the_environment_is_not_used(
    tls: Tls, server: ScriptedIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(None) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        assert (await Courier(trust=tls.trust).get(httpx.URL(server.url), LOOPBACK)).status == 404
        assert proxy.requests == []


async def test_a_document_is_read_up_to_its_bound(tls: Tls, server: ScriptedIssuer) -> None:
    courier, url = Courier(trust=tls.trust), httpx.URL(server.url + "/x")
    server.routes["/x"] = Reply(body=b"x" * MAX_DOCUMENT_BYTES)
    assert len((await courier.get(url, LOOPBACK)).body) == MAX_DOCUMENT_BYTES
    server.routes["/x"] = Reply(body=b"x" * (MAX_DOCUMENT_BYTES + 1))
    with pytest.raises(AuthorizationError) as caught:
        await courier.get(url, LOOPBACK)
    assert caught.value.code == "metadata_invalid"


async def test_a_compressed_document_is_refused(tls: Tls, server: ScriptedIssuer) -> None:
    server.routes["/x"] = Reply(body=b"\x1f\x8b", headers=("Content-Encoding: gzip",))
    with pytest.raises(AuthorizationError) as caught:
        await Courier(trust=tls.trust).get(httpx.URL(server.url + "/x"), LOOPBACK)
    assert caught.value.code == "metadata_invalid"
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_a_server_that_speaks_no_http(tls: Tls) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.test ready\r\n")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(babble, "127.0.0.1", 0, ssl=tls.identity)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(AuthorizationError) as caught:
            await Courier(trust=tls.trust).get(httpx.URL(f"https://127.0.0.1:{port}/"), LOOPBACK)
    assert caught.value.code == "metadata_unavailable"
