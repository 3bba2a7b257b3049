"""One upload over real connections: what is sent, what confirms it, and what does not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
from collections.abc import AsyncGenerator, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sender import wire
from app.sender.budget import Budget
from app.sender.config import UploadConfiguration
from app.sender.errors import (
    AuthorizationError,
    BudgetExceeded,
    SendError,
    SourceError,
    TransferError,
)
from app.sender.receipts import MAX_RECEIPT_BYTES, parse_receipt
from app.sender.sources import Source
from app.sender.spool import Bytes
from app.sender.transfer import Receipt, Sender
from tests.certificates import write_certificate
from tests.sender.receivers import (
    JSON,
    Exchange,
    Receiver,
    Script,
    answer,
    answer_receipt,
    confirm,
    confirm_with,
    hang,
    reset_after,
    reset_before,
    scripted,
)
from tests.sender.watching import Leaks

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
ABC = hashlib.sha256(b"abc").hexdigest()
OCTETS = bytes(range(256)) + b"\xff\xfe\r\n\r\n0\r\n\r\n\x1f\x8b" + "é".encode("utf-16")
LARGE = os.urandom(64 * MIB)
FORBIDDEN_HEADERS = {
    "transfer-encoding", "content-encoding", "cookie", "referer", "origin", "x-event-token",
    "ahp-subscription", "ahp-content-ref", "ahp-event-id", "proxy-authorization",
}  # fmt: skip


class Given:
    """Credentials in the order in which they are given; None when there are no more."""

    def __init__(self, *credentials: str | None) -> None:
        self.credentials = list(credentials)
        self.challenges: list[str | None] = []
        self.budgets: list[Budget] = []

    async def credential(
        self, configuration: UploadConfiguration, challenge: str | None, budget: Budget
    ) -> str | None:
        del configuration
        self.challenges.append(challenge)
        self.budgets.append(budget)
        return self.credentials.pop(0) if self.credentials else None


def snapshot_of(data: bytes) -> Bytes:
    return Bytes(data, hashlib.sha256(data).hexdigest())


def sender(*credentials: str | None, **options: Any) -> Sender:
    return Sender(Given(*credentials), first_pause_seconds=0.001, **options)


async def send(
    receiver: Receiver,
    data: bytes = b"abc",
    credential: str | None = "Bearer upload",
    *,
    path: str = "/upload",
    retries: int = 2,
    **changed: Any,
) -> Receipt:
    async with sender(credential, retries=retries) as one:
        return await one.upload(snapshot_of(data), receiver.configuration(path, **changed))


async def failure(script: Script, data: bytes = b"abc", **options: Any) -> SendError:
    """How an upload to a receiver with this script fails, without a retry."""
    async with scripted(script) as receiver:
        with pytest.raises(SendError) as caught:
            await send(receiver, data, retries=0, **options)
        assert len(receiver.exchanges) == 1
    return caught.value


# What is sent


@pytest.mark.requirement("AHP-S03", "AHP-S04")
@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/a/../b/./c//d/",
        "/%2F%7e~%7E/%e4",
        "/u?",
        "/u?a=1&a=2&&b=%20+c",
        "?x=/../y?z",
        "/tenants/a;v=1/upload,b",
    ],
)
async def test_ahp_s03_path_and_query_arrive_byte_for_byte(path: str) -> None:
    async with scripted(confirm) as receiver:
        await send(receiver, path=path)
        target = path if path.startswith("/") else f"/{path}"
        assert receiver.exchanges[0].request_line == f"POST {target} HTTP/1.1".encode()


@pytest.mark.requirement("AHP-S14", "AHP-S15")
@pytest.mark.parametrize("data", [b"", b"abc", OCTETS, LARGE[: 3 * MIB + 1]])
async def test_ahp_s14_the_frame_is_exact_and_the_octets_are_raw(data: bytes) -> None:
    async with scripted(confirm) as receiver:
        receipt = await send(receiver, data)
        exchange = receiver.exchanges[0]
        assert bytes(exchange.body) == data
        assert exchange.header("content-type") == "application/octet-stream"
        assert exchange.header("content-length") == str(len(data))
        assert exchange.header("ahp-content-sha256") == hashlib.sha256(data).hexdigest()
        assert exchange.header("authorization") == "Bearer upload"
        assert exchange.header("host") == receiver.url.removeprefix("http://")
        assert receipt == Receipt(
            "ref-of-the-receiver", len(data), hashlib.sha256(data).hexdigest()
        )


@pytest.mark.requirement("AHP-S15")
async def test_ahp_s15_the_body_is_neither_chunked_nor_encoded() -> None:
    async with scripted(confirm) as receiver:
        await send(receiver, OCTETS)
        exchange = receiver.exchanges[0]
        assert bytes(exchange.body) == OCTETS
        assert exchange.header("transfer-encoding") is None
        assert exchange.header("content-encoding") is None


@pytest.mark.requirement("AHP-S04")
async def test_ahp_s04_no_route_comes_from_a_reference() -> None:
    """The next upload goes to the same place, whatever the receiver called the last one."""
    reference = "https://elsewhere.example/files/1"
    async with scripted(confirm_with(ref=reference)) as receiver:
        for _ in range(2):
            assert (await send(receiver)).ref == reference
        assert [each.target for each in receiver.exchanges] == [b"/upload"] * 2


@pytest.mark.requirement("AHP-S49")
async def test_ahp_s49_a_receipt_says_nothing_of_events_or_durability() -> None:
    async with scripted(confirm) as receiver:
        receipt = await send(receiver)
    assert [field.name for field in fields(receipt)] == ["ref", "size", "sha256"]
    assert "no event" in str(Receipt.__doc__)
    assert "no durable storage" in str(Receipt.__doc__)


@pytest.mark.requirement("AHP-S16", "AHP-S20")
async def test_ahp_s16_nothing_else_is_said_or_asked() -> None:
    async with scripted(confirm) as receiver:
        await send(receiver)
        names = [name for name, _ in receiver.exchanges[0].headers]
        assert len(names) == len(set(names))
        assert not set(names) & FORBIDDEN_HEADERS
        assert [each.request_line.split()[0] for each in receiver.exchanges] == [b"POST"]


@pytest.mark.requirement("AHP-S50", "AHP-R53")
async def test_ahp_s50_what_looks_encoded_is_sent_as_it_is() -> None:
    async with scripted(confirm) as receiver:
        await send(receiver, b"YWJj")
        assert bytes(receiver.exchanges[0].body) == b"YWJj"


@pytest.mark.requirement("AHP-S10", "AHP-S48")
async def test_ahp_s48_nothing_of_a_lent_client_reaches_an_upload() -> None:
    async with scripted(confirm) as receiver:
        lent = httpx.AsyncClient(
            headers={"X-Event-Token": "event", "Authorization": "Bearer event"},
            cookies={"session": "event"},
            auth=("event", "event"),
            params={"event": "event"},
            follow_redirects=True,
        )
        async with lent:
            async with sender("Bearer upload", client=lent) as one:
                await one.upload(snapshot_of(b"abc"), receiver.configuration())
            assert not lent.is_closed
        assert b"event" not in receiver.exchanges[0].head
        assert receiver.exchanges[0].header("authorization") == "Bearer upload"


@pytest.mark.requirement("AHP-S10")
async def test_ahp_s10_the_credential_is_asked_for_this_endpoint_alone() -> None:
    class Asked(Given):
        endpoints: ClassVar[list[str]] = []

        async def credential(
            self, configuration: UploadConfiguration, challenge: str | None, budget: Budget
        ) -> str | None:
            self.endpoints.append(configuration.endpoint)
            return f"Bearer for-{configuration.endpoint[-1]}"

    async with scripted(confirm) as receiver, Sender(Asked()) as one:
        for path in ("/1", "/2"):
            await one.upload(snapshot_of(b"abc"), receiver.configuration(path))
        assert [each.header("authorization") for each in receiver.exchanges] == [
            "Bearer for-1",
            "Bearer for-2",
        ]
    assert Asked.endpoints == [f"{receiver.url}/1", f"{receiver.url}/2"]


@pytest.mark.requirement("AHP-S10", "AHP-S48")
async def test_ahp_s48_uploads_share_neither_connections_nor_cookies() -> None:
    async with scripted(
        answer_receipt(lambda it: json.dumps(it).encode(), JSON | {"Set-Cookie": "a=b; Path=/"})
    ) as receiver:
        async with sender("Bearer one", "Bearer two") as one:
            for _ in range(2):
                await one.upload(snapshot_of(b"abc"), receiver.configuration())
        first, second = receiver.exchanges
        assert first.header("authorization") == "Bearer one"
        assert second.header("authorization") == "Bearer two"
        assert second.header("cookie") is None


async def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(answer(502)) as proxy, scripted(confirm) as receiver:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert (await send(receiver)).ref == "ref-of-the-receiver"
        assert proxy.exchanges == []


@pytest.mark.requirement("AHP-S33")
@pytest.mark.parametrize(
    "credential", ["Bearer a\r\nX: y", "Bearer a\n", "", " Bearer a", "Bearer é"]
)
async def test_ahp_s33_a_credential_that_breaks_a_header_is_never_sent(credential: str) -> None:
    async with scripted(confirm) as receiver:
        with pytest.raises(AuthorizationError) as caught:
            await send(receiver, credential=credential)
        assert caught.value.code == "credential_invalid"
        assert receiver.exchanges == []


# Certificates and hosts


@pytest.mark.requirement("AHP-S06")
async def test_ahp_s06_a_receiver_is_verified(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    async with scripted(confirm, tls=serving) as receiver:
        with pytest.raises(TransferError) as caught:
            await send(receiver)
        assert caught.value.code == "certificate"
        assert receiver.exchanges == []
        async with sender("Bearer upload", trust=trusting) as one:
            receipt = await one.upload(snapshot_of(LARGE), receiver.configuration())
        assert receipt.size == len(LARGE)
        assert bytes(receiver.exchanges[0].body) == LARGE


async def test_an_early_refusal_is_heard_over_tls(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    async with scripted(answer(413, early=True), tls=serving) as receiver:
        async with sender("Bearer upload", trust=trusting) as one:
            with pytest.raises(TransferError) as caught:
                await one.upload(snapshot_of(LARGE), receiver.configuration())
        assert caught.value.status == 413
        await receiver.exchanges[0].gone.wait()
        assert receiver.exchanges[0].received < len(LARGE)


async def test_a_receiver_that_is_not_there_is_unreachable() -> None:
    async with scripted(confirm) as receiver:
        configuration = receiver.configuration()
    async with sender("Bearer upload") as one:
        with pytest.raises(TransferError) as caught:
            await one.upload(snapshot_of(b"abc"), configuration)
    assert (caught.value.code, caught.value.transient) == ("unreachable", True)


# What confirms, and what does not


@pytest.mark.requirement("AHP-S05")
@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
async def test_ahp_s05_no_redirect_is_followed(status: int) -> None:
    async with scripted(confirm) as elsewhere:
        error = await failure(answer(status, headers={"Location": f"{elsewhere.url}/upload"}))
        assert isinstance(error, TransferError)
        assert (error.code, error.status) == ("redirected", status)
        assert elsewhere.exchanges == []


@pytest.mark.requirement("AHP-S19")
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (200, "not_confirmed"),
        (202, "not_confirmed"),
        (204, "not_confirmed"),
        (400, "framing"),
        (403, "forbidden"),
        (404, "not_found"),
        (405, "unexpected_status"),
        (408, "too_slow"),
        (413, "too_large"),
        (418, "unexpected_status"),
        (429, "rate_limited"),
        (500, "unexpected_status"),
        (503, "unexpected_status"),
        (507, "receiver_full"),
    ],
)
async def test_ahp_s19_only_201_confirms(status: int, code: str) -> None:
    body = b"" if status == 204 else json.dumps({"ref": "r", "size": 3, "sha256": ABC}).encode()
    error = await failure(answer(status, body, JSON if body else {}))
    assert error.code == code
    assert error.message.endswith(".")


@pytest.mark.requirement("AHP-S17", "AHP-S19")
@pytest.mark.parametrize(
    "changed",
    [
        {"size": 4},
        {"size": 2},
        {"size": -3},
        {"sha256": "0" * 64},
        {"sha256": ABC.upper()},
        {"sha256": ABC + " "},
    ],
)
async def test_ahp_s17_a_receipt_of_other_bytes_fails(changed: dict[str, Any]) -> None:
    error = await failure(confirm_with(**changed))
    assert error.code == "receipt_mismatch"


MALFORMED: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "missing ref": lambda it: json.dumps({k: it[k] for k in ("size", "sha256")}).encode(),
    "missing size": lambda it: json.dumps({k: it[k] for k in ("ref", "sha256")}).encode(),
    "missing sha256": lambda it: json.dumps({k: it[k] for k in ("ref", "size")}).encode(),
    "extra": lambda it: json.dumps(it | {"url": "https://r.example/x"}).encode(),
    "twice": lambda it: json.dumps(it).encode()[:-1] + b',"size":3}',
    "3.0": lambda it: json.dumps(it | {"size": 3.0}).encode(),
    "3e0": lambda it: json.dumps(it).encode().replace(b" 3,", b" 3e0,"),
    "true": lambda it: json.dumps(it | {"size": True}).encode(),
    "text": lambda it: json.dumps(it | {"size": "3"}).encode(),
    "no ref": lambda it: json.dumps(it | {"ref": ""}).encode(),
    "ref null": lambda it: json.dumps(it | {"ref": None}).encode(),
    "ref of half a character": lambda it: json.dumps(it | {"ref": "\ud800"}).encode(),
    "digest number": lambda it: json.dumps(it | {"sha256": 3}).encode(),
    "list": lambda it: json.dumps([it]).encode(),
    "trailing": lambda it: json.dumps(it).encode() + b"{}",
    "cut": lambda it: json.dumps(it).encode()[:-1],
    "BOM": lambda it: b"\xef\xbb\xbf" + json.dumps(it).encode(),
    "UTF-16": lambda it: json.dumps(it).encode("utf-16"),
    "not UTF-8": lambda it: json.dumps(it | {"ref": "é"}, ensure_ascii=False).encode("latin-1"),
    "empty": lambda it: b"",
    "HTML": lambda it: b"<html>Created</html>",
    "deep": lambda it: b"[" * 8000,
    "huge": lambda it: json.dumps(it | {"ref": "r" * MAX_RECEIPT_BYTES}).encode(),
}


@pytest.mark.requirement("AHP-S17", "AHP-S19")
@pytest.mark.parametrize("kind", MALFORMED)
async def test_ahp_s19_a_malformed_receipt_fails(kind: str) -> None:
    error = await failure(answer_receipt(MALFORMED[kind], JSON))
    assert error.code == "malformed_receipt"


@pytest.mark.requirement("AHP-S17")
@pytest.mark.parametrize(
    "media_type", [None, "text/html", "application/problem+json", "application/jsonx", ""]
)
async def test_ahp_s17_a_receipt_of_another_type_fails(media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    error = await failure(answer_receipt(lambda it: json.dumps(it).encode(), headers))
    assert error.code == "malformed_receipt"


@pytest.mark.requirement("AHP-S17", "AHP-S18")
@pytest.mark.parametrize("media_type", ["Application/JSON", "application/json; charset=utf-8"])
@pytest.mark.parametrize("ref", ["r", "urn:uuid:1", "ü/../ '\"", "r" * 4000])
async def test_ahp_s18_the_reference_is_the_one_that_was_given(media_type: str, ref: str) -> None:
    headers = {"Content-Type": media_type}
    script = answer_receipt(lambda it: json.dumps(it | {"ref": ref}).encode(), headers)
    async with scripted(script) as receiver:
        assert (await send(receiver)).ref == ref


@pytest.mark.requirement("AHP-S12", "AHP-S17")
async def test_a_receipt_that_trickles_ends_with_the_budget() -> None:
    async def trickle(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.write(
            b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        )
        while not exchange.writer.is_closing():
            await exchange.write(b" ")
            await asyncio.sleep(0.02)

    async with scripted(trickle) as receiver:
        with pytest.raises(BudgetExceeded):
            await send(receiver, timeoutMs=300)


@pytest.mark.requirement("AHP-S17")
async def test_an_endless_receipt_is_not_read_to_its_end() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.write(b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\n\r\n")
        while not exchange.writer.is_closing():
            await exchange.write(b" " * 4096)

    assert (await failure(endless)).code == "malformed_receipt"


async def test_what_is_no_http_is_a_lost_connection() -> None:
    async def other(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    assert (await failure(other)).code == "connection_lost"


@pytest.mark.requirement("AHP-S17")
async def test_a_receipt_before_the_end_of_the_body_confirms_nothing() -> None:
    async def early(exchange: Exchange) -> None:
        receipt = {"ref": "r", "size": len(LARGE), "sha256": exchange.header("ahp-content-sha256")}
        await exchange.say(201, json.dumps(receipt).encode(), JSON)
        await exchange.count_what_comes()

    error = await failure(early, LARGE)
    assert error.code == "early_receipt"


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["ref", "size", "sha256", "x"]), inner, max_size=4),
))  # fmt: skip
def test_no_other_json_is_a_receipt(document: object) -> None:
    try:
        receipt = parse_receipt(json.dumps(document).encode())
    except TransferError as error:
        code = error.code
        assert code == "malformed_receipt"
        return
    assert document == {"ref": receipt.ref, "size": receipt.size, "sha256": receipt.sha256}


# Answers while bytes still go out


@pytest.mark.requirement("AHP-S32")
@pytest.mark.parametrize("status", [401, 413])
@pytest.mark.parametrize("credential", [None, "Bearer upload"])
async def test_an_early_refusal_stops_the_bytes(status: int, credential: str | None) -> None:
    async with scripted(answer(status, early=True)) as receiver:
        with pytest.raises(SendError) as caught:
            await send(receiver, LARGE, credential)
        assert caught.value.code == {401: "unauthorized", 413: "too_large"}[status]
        await receiver.exchanges[0].gone.wait()
        assert receiver.exchanges[0].received < len(LARGE) // 2


@pytest.mark.requirement("AHP-S11")
async def test_a_large_anonymous_request_asks_before_it_sends() -> None:
    async def refuse(exchange: Exchange) -> None:
        assert exchange.header("expect") == "100-continue"
        await exchange.say(401, headers={"WWW-Authenticate": "Bearer"})
        await exchange.count_what_comes()

    async with scripted(refuse, confirm) as receiver:
        async with sender(None, "Bearer upload") as one:
            await one.upload(snapshot_of(LARGE), receiver.configuration())
        first, second = receiver.exchanges
        assert first.received == 0
        assert second.header("expect") is None
        assert bytes(second.body) == LARGE


@pytest.mark.parametrize(
    "interim",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 100 Continue\n\n",
    ],
)
async def test_leave_to_send_is_taken(interim: bytes) -> None:
    async def allow(exchange: Exchange) -> None:
        for piece in (interim[:5], interim[5:-3], interim[-3:]):
            await exchange.write(piece)
            await asyncio.sleep(0)
        await confirm(exchange)

    async with scripted(allow) as receiver:
        assert (await send(receiver, LARGE, None)).size == len(LARGE)
        assert len(receiver.exchanges) == 1


async def test_a_receiver_that_gives_no_leave_gets_the_bytes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "LEAVE_SECONDS", 0.01)
    async with scripted(confirm) as receiver:
        assert (await send(receiver, LARGE, None)).size == len(LARGE)


async def test_an_early_answer_to_a_reader_that_stopped_is_heard() -> None:
    """The receiver answers and reads no more: a sender that only sends would wait for ever."""

    async def refuse(exchange: Exchange) -> None:
        await exchange.say(413)
        await asyncio.wait_for(exchange.gone.wait(), 60)

    async with scripted(refuse) as receiver:
        with pytest.raises(TransferError) as caught:
            await send(receiver, LARGE)
        assert caught.value.status == 413
        receiver.exchanges[0].gone.set()


# Retries


@pytest.mark.requirement("AHP-S20")
@pytest.mark.parametrize("lost", [reset_before, reset_after, answer(503), answer(429)])
async def test_ahp_s20_a_retry_is_a_new_upload_with_a_new_reference(lost: Script) -> None:
    async with scripted(lost, lost, confirm_with(ref="the third")) as receiver:
        data = LARGE[: 5 * MIB]
        assert (await send(receiver, data)).ref == "the third"
        assert len(receiver.exchanges) == 3
        assert bytes(receiver.exchanges[2].body) == data
        heads = {each.head for each in receiver.exchanges}
        assert len(heads) == 1


async def test_retries_come_to_an_end() -> None:
    async with scripted(answer(503)) as receiver:
        with pytest.raises(TransferError) as caught:
            await send(receiver)
        assert (caught.value.status, len(receiver.exchanges)) == (503, 3)


@pytest.mark.parametrize("script", [answer(400), answer(500), answer(202), confirm_with(size=4)])
async def test_what_would_fail_again_is_not_tried_again(script: Script) -> None:
    async with scripted(script, confirm) as receiver:
        with pytest.raises(TransferError):
            await send(receiver)
        assert len(receiver.exchanges) == 1


@pytest.mark.requirement("AHP-S12")
@pytest.mark.parametrize("value", ["60", "999999"])
async def test_ahp_s12_a_pause_beyond_the_budget_is_not_begun(value: str) -> None:
    async with scripted(answer(503, headers={"Retry-After": value}), confirm) as receiver:
        with pytest.raises(TransferError) as caught:
            await send(receiver)
        assert caught.value.retry_after == float(value)
        assert len(receiver.exchanges) == 1


@pytest.mark.parametrize("value", ["0", "", "Wed, 21 Oct 2015 07:28:00 GMT", "-1", "1e9"])
async def test_a_pause_that_is_none_is_not_waited_for(value: str) -> None:
    async with scripted(answer(503, headers={"Retry-After": value}), confirm) as receiver:
        assert (await send(receiver)).size == 3


# Credentials


@pytest.mark.requirement("AHP-S11")
async def test_ahp_s11_a_challenge_gets_one_other_credential() -> None:
    challenge = 'Bearer resource_metadata="https://r.example/x", scope="a"'
    refuse = answer(401, headers={"WWW-Authenticate": challenge})
    authorization = Given(None, "Bearer discovered")
    async with scripted(refuse, confirm) as receiver, Sender(authorization) as one:
        await one.upload(snapshot_of(b"abc"), receiver.configuration())
        assert authorization.challenges == [None, challenge]
        first, second = receiver.exchanges
        assert first.header("authorization") is None
        assert second.header("authorization") == "Bearer discovered"
        assert authorization.budgets[0] is authorization.budgets[1]


@pytest.mark.requirement("AHP-S11")
async def test_ahp_s11_a_second_refusal_is_the_end() -> None:
    authorization = Given("Bearer one", "Bearer two", "Bearer three")
    async with scripted(answer(401)) as receiver, Sender(authorization) as one:
        with pytest.raises(AuthorizationError) as caught:
            await one.upload(snapshot_of(b"abc"), receiver.configuration())
        assert caught.value.code == "unauthorized"
        assert authorization.challenges == [None, ""]
        assert len(receiver.exchanges) == 2


async def test_a_challenge_without_another_credential_is_the_end() -> None:
    async with scripted(answer(401)) as receiver, sender("Bearer one") as one:
        with pytest.raises(AuthorizationError) as caught:
            await one.upload(snapshot_of(b"abc"), receiver.configuration())
        assert caught.value.code == "unauthorized"
        assert len(receiver.exchanges) == 1


async def test_no_error_holds_a_credential_or_an_endpoint() -> None:
    for script in (answer(401), answer(403), answer(500), answer(302), confirm_with(size=4)):
        error = await failure(script, credential="Bearer s3cret", path="/hidden?key=s3cret")
        shown = f"{error!r} {error} {error.__cause__!r}"
        assert "s3cret" not in shown
        assert "hidden" not in shown


# Bounds


@pytest.mark.requirement("AHP-S08")
@pytest.mark.parametrize("as_source", [True, False])
async def test_ahp_s08_more_than_max_bytes_is_not_sent(as_source: bool) -> None:
    async with scripted(confirm) as receiver, sender("Bearer upload") as one:
        async with Source.memory(b"abcd") as source:
            what = source if as_source else snapshot_of(b"abcd")
            with pytest.raises(SourceError) as caught:
                await one.upload(what, receiver.configuration(maxBytes=3))
        assert caught.value.code == "too_large"
        assert receiver.exchanges == []


@pytest.mark.requirement("AHP-S12")
async def test_ahp_s12_one_budget_is_for_all_of_it() -> None:
    """The authorization takes what the transfer would need."""

    class Slow(Given):
        async def credential(self, *arguments: Any) -> str | None:
            await asyncio.Event().wait()
            return await super().credential(*arguments)

    async with scripted(confirm) as receiver, Sender(Slow("Bearer x")) as one:
        with pytest.raises(BudgetExceeded):
            await one.upload(snapshot_of(b"abc"), receiver.configuration(timeoutMs=50))
        assert receiver.exchanges == []


@pytest.mark.requirement("AHP-S12", "AHP-S43")
async def test_ahp_s43_an_enclosing_budget_bounds_the_transfer() -> None:
    async with scripted(hang) as receiver, sender("Bearer upload") as one:
        with pytest.raises(BudgetExceeded):
            await one.upload(snapshot_of(b"abc"), receiver.configuration(), budget=Budget(0.2))
        configuration = receiver.configuration(timeoutMs=200)
        with pytest.raises(BudgetExceeded):
            await one.upload(snapshot_of(b"abc"), configuration, budget=Budget(60))


@pytest.mark.requirement("AHP-S32")
async def test_ahp_s32_a_cancelled_upload_sends_no_further_byte() -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.read_some(MIB)
        begun.set()
        await goes_on.wait()
        await exchange.count_what_comes()

    with Leaks() as leaks:
        async with scripted(slow) as receiver:
            sending = asyncio.create_task(send(receiver, LARGE))
            await begun.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            goes_on.set()
            await receiver.exchanges[0].gone.wait()
            assert receiver.exchanges[0].received < len(LARGE)
            assert len(receiver.exchanges) == 1
        assert not leaks.tasks()


@pytest.mark.requirement("AHP-S36")
async def test_ahp_s36_one_source_goes_to_many_receivers() -> None:
    opened = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        opened.append(1)
        for start in range(0, 8 * MIB, MIB):
            yield LARGE[start : start + MIB]

    async with scripted(confirm) as receiver, sender(*["Bearer upload"] * 8) as one:
        async with Source.stream(pieces) as source:
            receipts = await asyncio.gather(
                *[one.upload(source, receiver.configuration()) for _ in range(8)]
            )
        assert {receipt.size for receipt in receipts} == {8 * MIB}
        assert {bytes(each.body) for each in receiver.exchanges} == {LARGE[: 8 * MIB]}
    assert opened == [1]


@pytest.mark.parametrize("other", [b"abcd", b"ab", b""])
async def test_a_snapshot_that_gives_other_bytes_is_not_confirmed(other: bytes) -> None:
    class Lying(Bytes):
        async def read(self) -> AsyncGenerator[bytes, None]:
            yield other

    async with scripted(confirm) as receiver, sender("Bearer upload") as one:
        with pytest.raises(SourceError) as caught:
            await one.upload(Lying(b"abc", ABC), receiver.configuration())
    assert caught.value.code == "changed"


@pytest.mark.requirement("AHP-S41")
async def test_a_file_in_place_that_changes_is_never_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(LARGE[: 2 * MIB])
    async with scripted(confirm) as receiver, sender("Bearer upload") as one:
        async with Source.file(path, in_place=True) as source:
            snapshot = await source.snapshot(max_bytes=1 << 30, budget=Budget(60))
            path.write_bytes(LARGE[2 * MIB : 4 * MIB])
            with pytest.raises(SourceError) as caught:
                await one.upload(snapshot, receiver.configuration())
        assert caught.value.code == "changed"
        assert len(receiver.exchanges[0].body) == MIB


async def test_progress_counts_what_was_handed_on_and_begins_anew_with_a_retry() -> None:
    told: list[tuple[int, int]] = []
    data = LARGE[: 2 * MIB]
    async with scripted(answer(503), confirm) as receiver, sender("Bearer upload") as one:
        await one.upload(
            snapshot_of(data), receiver.configuration(), progress=lambda *at: told.append(at)
        )
    once = [(0, 2 * MIB), (MIB, 2 * MIB), (2 * MIB, 2 * MIB)]
    assert told == once * 2
