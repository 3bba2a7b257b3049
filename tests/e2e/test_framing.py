"""Every framing rule on the wire, for the parser that ships: exactly one definite answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.wire import (
    MIB,
    OTHER_PATH,
    READER,
    UPLOADER,
    Receiver,
    digest,
    head,
    running_receiver,
    upload,
    upload_headers,
)

BODY = b"abc"
LIMIT = 4 * MIB


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    settings = f"max_upload_bytes = {LIMIT}\n"
    with running_receiver(tmp_path_factory.mktemp("receiver"), settings) as running:
        yield running


def changed(**changes: str | None) -> bytes:
    """The head of a valid upload of BODY with some headers changed; None leaves one out."""
    headers: dict[str, str | None] = dict(upload_headers(BODY))
    return head(headers | {name.replace("_", "-"): value for name, value in changes.items()})


def refused(receiver: Receiver, *data: bytes, fin: bool = False) -> str:
    """Send something that must get one 400 and leave nothing behind; the code of the refusal."""
    with receiver.keeps_nothing():
        (response,) = receiver.talk(*data, fin=fin)
    assert response.status == 400
    assert response.headers["connection"] == "close"
    return response.code


def test_a_valid_upload_is_confirmed(receiver: Receiver) -> None:
    (response,) = receiver.talk(upload(BODY, b"Connection: close"))
    assert response.status == 201
    assert receiver.content(response.json["ref"]) == BODY


# --- lengths ------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R17", "AHP-R28", "B07")
@pytest.mark.parametrize(
    "length",
    ["-1", "+3", "3,3", "3, 3", "3 3", "0x3", "3.0", "03", "9" * 20, "9" * 400, "three", "\xb3"],
)
def test_a_malformed_length_is_refused(receiver: Receiver, length: str) -> None:
    data = changed(Content_Length=length) + BODY
    assert refused(receiver, data) in ("malformed_request", "malformed_length")


@pytest.mark.requirement("AHP-R17", "AHP-R21", "B06")
def test_no_length_is_refused(receiver: Receiver) -> None:
    assert refused(receiver, changed(Content_Length=None) + BODY) == "length_required"


@pytest.mark.requirement("AHP-R17", "B07")
@pytest.mark.parametrize("second", [b"3", b"5", b"0"])
def test_two_lengths_are_refused(receiver: Receiver, second: bytes) -> None:
    assert refused(receiver, upload(BODY, b"Content-Length: " + second)) == "malformed_request"


@pytest.mark.requirement("AHP-R20", "AHP-R21", "B06")
@pytest.mark.parametrize("coding", [b"chunked", b"gzip, chunked", b"identity", b"Chunked", b""])
def test_a_transfer_coding_beside_a_length_is_refused(receiver: Receiver, coding: bytes) -> None:
    framing = head(upload_headers(BODY), b"Transfer-Encoding: " + coding)
    code = refused(receiver, framing + b"3\r\nabc\r\n0\r\n\r\n")
    assert code in ("malformed_request", "transfer_encoding")


@pytest.mark.requirement("AHP-R21", "B06")
@pytest.mark.parametrize("coding", ["chunked", "gzip, chunked"])
def test_a_chunked_body_is_refused(receiver: Receiver, coding: str) -> None:
    data = changed(Content_Length=None, Transfer_Encoding=coding) + b"3\r\nabc\r\n0\r\n\r\n"
    assert refused(receiver, data) == "transfer_encoding"


@pytest.mark.requirement("AHP-R20")
@pytest.mark.parametrize("coding", ["gzip", "identity", "br"])
def test_a_content_coding_is_refused(receiver: Receiver, coding: str) -> None:
    assert refused(receiver, changed(Content_Encoding=coding) + BODY) == "content_encoding"


# --- bodies -------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R17", "AHP-R46", "B09")
@pytest.mark.parametrize("size", [3, 3 * MIB])
def test_a_body_that_ends_early_is_refused(receiver: Receiver, size: int) -> None:
    body = bytes(size)
    assert refused(receiver, upload(body)[:-1], fin=True) == "malformed_body"


@pytest.mark.requirement("AHP-R46", "B09")
def test_a_client_that_dies_leaves_nothing(receiver: Receiver) -> None:
    with receiver.keeps_nothing():
        for _ in range(20):
            with receiver.connect() as wire:
                wire.send(upload(bytes(3 * MIB))[:-MIB])
                wire.reset()


@pytest.mark.requirement("AHP-R17")
@pytest.mark.parametrize("size", [0, 3, 3 * MIB])
def test_a_client_that_half_closes_behind_its_request_is_answered(
    receiver: Receiver, size: int
) -> None:
    (response,) = receiver.talk(upload(bytes(size)), fin=True)
    assert (response.status, response.json["size"]) == (201, size)


@pytest.mark.requirement("AHP-R17", "B07")
@pytest.mark.parametrize("excess", [b"d", b"def\r\n\r\n", bytes(64 * MIB)], ids=len)
@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_bytes_behind_the_body_do_not_cost_the_upload_its_answer(
    receiver: Receiver, excess: bytes, connection: bytes
) -> None:
    """A network may bring them after the answer; then they are a malformed next request."""
    response, *others = receiver.talk(upload(BODY, b"Connection: " + connection), excess)
    assert response.status == 201
    assert [other.status for other in others] in ([], [400])
    assert [response, *others][-1].headers["connection"] == "close"
    assert receiver.content(response.json["ref"]) == BODY


@pytest.mark.requirement("AHP-R18", "AHP-R28", "B05", "B08")
@pytest.mark.parametrize("declared", ["0" * 64, digest(b"abd")])
def test_another_digest_is_refused(receiver: Receiver, declared: str) -> None:
    data = changed(AHP_Content_SHA256=declared, Connection="close") + BODY
    assert refused(receiver, data) == "digest_mismatch"


@pytest.mark.requirement("B08")
def test_a_refused_digest_does_not_spoil_the_next_upload(receiver: Receiver) -> None:
    """The body that the false digest named can still be stored, and is itself."""
    (response,) = receiver.talk(upload(b"abd", b"Connection: close"))
    assert receiver.content(response.json["ref"]) == b"abd"


@pytest.mark.requirement("AHP-R18", "B05")
@pytest.mark.parametrize(
    "declared",
    [None, digest(BODY).upper(), digest(BODY)[:-1], digest(BODY) + "0", f"sha256:{digest(BODY)}"],
)
def test_a_malformed_digest_is_refused(receiver: Receiver, declared: str | None) -> None:
    assert refused(receiver, changed(AHP_Content_SHA256=declared) + BODY) == "malformed_digest"


@pytest.mark.requirement("AHP-R16", "AHP-R18")
@pytest.mark.parametrize(
    "line", [b"Content-Type: application/octet-stream", b"AHP-Content-SHA256: " + b"0" * 64]
)
def test_a_repeated_header_is_refused(receiver: Receiver, line: bytes) -> None:
    assert refused(receiver, upload(BODY, line)) == "duplicate_header"


@pytest.mark.requirement("AHP-R01", "AHP-R02", "AHP-R16")
@pytest.mark.parametrize("media_type", [None, "text/plain", "application/json", "multipart/x"])
def test_another_media_type_is_refused(receiver: Receiver, media_type: str | None) -> None:
    assert refused(receiver, changed(Content_Type=media_type) + BODY) == "content_type"


@pytest.mark.requirement("AHP-R12", "AHP-R22")
@pytest.mark.parametrize("name", ["AHP-Subscription", "AHP-Content-Ref"])
def test_a_sender_names_nothing(receiver: Receiver, name: str) -> None:
    assert refused(receiver, head(upload_headers(BODY) | {name: "x"}) + BODY) == "caller_identity"


# --- octets of the head -------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R50", "B07")
@pytest.mark.parametrize(
    "line",
    [
        b"X-A: 1\r\n 2",
        b"X-A: 1\r\n\t2",
        b"X-A: 1\r2",
        b"X-A: 1\rX-B: 2",
        b"X-A: 1\n2",
        b"X-A: 1\nX-B: 2",
        b"X-A: 1\x002",
        b"X-A: 1\x012",
        b"X-A: 1\x7f2",
        b"X-A : 1",
        b"X A: 1",
        b"X-A",
        b": 1",
        b"Host: other.example",
        b"Transfer-Encoding : chunked",
        b"Content-Length : 3",
    ],
)
def test_a_malformed_header_line_is_refused(receiver: Receiver, line: bytes) -> None:
    assert refused(receiver, upload(BODY, line)) == "malformed_request"


@pytest.mark.requirement("AHP-R50")
@pytest.mark.parametrize("line", [b"X-A: \t v \t ", b"X-A: \xff\xfe", b"X-A:", b"X-A: a\tb"])
def test_an_unusual_header_line_is_no_fault(receiver: Receiver, line: bytes) -> None:
    (response,) = receiver.talk(upload(BODY, line, b"Connection: close"))
    assert response.status == 201


@pytest.mark.requirement("AHP-R17", "AHP-R18")
def test_white_space_around_a_value_is_no_part_of_it(receiver: Receiver) -> None:
    framing = {name: f"  {value}\t " for name, value in upload_headers(BODY).items()}
    (response,) = receiver.talk(head(framing, b"Connection: close") + BODY)
    assert response.status == 201


@pytest.mark.requirement("B07")
def test_lines_that_end_in_bare_lf_are_refused(receiver: Receiver) -> None:
    assert refused(receiver, upload(BODY).replace(b"\r\n", b"\n")) == "malformed_request"


# --- pipelining ---------------------------------------------------------------------------------


@pytest.mark.requirement("B07", "AHP-R29", "AHP-R30")
@pytest.mark.parametrize(("token", "status"), [(None, 401), ("wrong", 401), (READER, 403)])
def test_a_pipelined_request_has_its_own_credential(
    receiver: Receiver, token: str | None, status: int
) -> None:
    before = receiver.usage().references
    responses = receiver.talk(upload(BODY), upload(BODY, token=token))
    assert [each.status for each in responses] == [201, status]
    assert receiver.usage().references == before + 1


@pytest.mark.requirement("B07", "B13")
def test_the_body_of_a_refused_upload_is_never_a_request(receiver: Receiver) -> None:
    """Not what is inside its declared length, and not what follows it."""
    inner = upload(BODY)
    with receiver.keeps_nothing():
        (response,) = receiver.talk(upload(inner, token="wrong"), upload(BODY))
    assert response.status == 401


# --- routes, methods, statuses ------------------------------------------------------------------


@pytest.mark.requirement("AHP-R03", "AHP-R04", "B12")
@pytest.mark.parametrize("path", ["/ahp/uploads", OTHER_PATH])
@pytest.mark.parametrize("query", ["", "?", "?x=1&y=%2F", "?a=b?c=/d", "?%00", "?" + "q" * 4000])
def test_the_path_is_the_route_and_the_query_is_not(
    receiver: Receiver, path: str, query: str
) -> None:
    line = f"POST {path}{query} HTTP/1.1"
    (response,) = receiver.talk(head(upload_headers(BODY), b"Connection: close", line=line) + BODY)
    assert response.status == 201


@pytest.mark.requirement("AHP-R04", "AHP-R31", "B12", "B19")
@pytest.mark.parametrize(
    "target",
    [
        "/nope",
        "/",
        "/ahp/uploads/",
        "/ahp/uploads/ref_x",
        "//ahp/uploads",
        "/ahp//uploads",
        "/AHP/uploads",
        "/ahp/uploads%2F",
        "/ahp/uploads;x",
        "/ahp/uploads/../uploads",
        "*",
    ],
)
def test_every_other_path_is_404_and_never_a_redirect(receiver: Receiver, target: str) -> None:
    line = f"POST {target} HTTP/1.1"
    with receiver.keeps_nothing():
        (response,) = receiver.talk(head(upload_headers(BODY), line=line) + BODY)
    assert (response.status, response.code) == (404, "route_not_found")
    assert "location" not in response.headers


@pytest.mark.requirement("AHP-R15", "AHP-R27", "B19")
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_another_method_is_405_with_allow(receiver: Receiver, method: str) -> None:
    line = f"{method} /ahp/uploads HTTP/1.1"
    (response,) = receiver.talk(head({"Connection": "close"}, line=line))
    assert (response.status, response.code) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.requirement("AHP-R15")
def test_head_is_405_without_a_body(receiver: Receiver) -> None:
    with receiver.connect() as wire:
        wire.send(head({"Connection": "close"}, line="HEAD /ahp/uploads HTTP/1.1"))
        assert wire.interim().startswith(b"HTTP/1.1 405 ")
        assert wire.socket.recv(1) == b""


@pytest.mark.requirement("AHP-R28", "AHP-R29", "AHP-R30", "AHP-R32", "AHP-R52")
@pytest.mark.parametrize(
    ("token", "faults", "status"),
    [
        (None, {"Content-Type": "text/plain", "Content-Length": "9999999999"}, 401),
        (READER, {"Content-Type": "text/plain", "Content-Length": "9999999999"}, 403),
        (UPLOADER, {"Content-Type": "text/plain", "Content-Length": "9999999999"}, 400),
        (UPLOADER, {"Content-Length": str(LIMIT + 1)}, 413),
        (UPLOADER, {"Content-Length": "9" * 19}, 413),
    ],
)
def test_statuses_come_in_their_order_and_from_the_head_alone(
    receiver: Receiver, token: str | None, faults: dict[str, str], status: int
) -> None:
    """Not an octet of the body is sent."""
    with receiver.keeps_nothing():
        (response,) = receiver.talk(head(upload_headers(BODY, token) | faults))
    assert response.status == status


@pytest.mark.requirement("AHP-R07", "AHP-R32")
def test_the_limit_is_the_last_size_that_is_taken(receiver: Receiver) -> None:
    (response,) = receiver.talk(upload(bytes(LIMIT), b"Connection: close"))
    assert response.status == 201
    (response,) = receiver.talk(upload(bytes(LIMIT + 1)))
    assert (response.status, response.json["max_bytes"]) == (413, LIMIT)


# --- expectations -------------------------------------------------------------------------------


@pytest.mark.requirement("B15", "AHP-R09")
@pytest.mark.parametrize(
    ("token", "size", "status"), [("wrong", 1000, 401), (READER, 1000, 403), (UPLOADER, LIMIT, 413)]
)
def test_who_waits_for_100_gets_the_refusal_instead(
    receiver: Receiver, token: str, size: int, status: int
) -> None:
    with receiver.keeps_nothing():
        (response,) = receiver.talk(
            head(upload_headers(bytes(size + 1), token), b"Expect: 100-continue")
        )
    assert response.status == status


@pytest.mark.requirement("B15")
@pytest.mark.parametrize("size", [1000, MIB])
def test_who_waits_for_100_is_told_to_go_on(receiver: Receiver, size: int) -> None:
    body = bytes(size)
    with receiver.connect() as wire:
        wire.send(head(upload_headers(body), b"Expect: 100-continue"))
        assert wire.interim() == b"HTTP/1.1 100 Continue"
        wire.send(body)
        assert wire.response().json["size"] == size


@pytest.mark.requirement("B15")
def test_another_expectation_is_refused(receiver: Receiver) -> None:
    assert refused(receiver, head(upload_headers(BODY), b"Expect: nonsense")) == "expectation"
