"""The head of an upload: what is a declaration, and what is refused with which code."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.errors import Malformed, TooLarge
from app.http.framing import Declared, parse_framing

Header = tuple[bytes, bytes]

LIMIT = 1000
DIGEST = hashlib.sha256(b"abc").hexdigest()
TYPE: Header = (b"content-type", b"application/octet-stream")
LENGTH: Header = (b"content-length", b"3")
SHA256: Header = (b"ahp-content-sha256", DIGEST.encode())
HEAD: list[Header] = [TYPE, LENGTH, SHA256]


def head(**changes: bytes | None) -> list[Header]:
    """A valid head with some values changed; None leaves the header out."""
    values = {name.decode().replace("-", "_"): value for name, value in HEAD} | changes
    return [(k.replace("_", "-").encode(), v) for k, v in values.items() if v is not None]


def refusal(headers: list[Header]) -> str:
    with pytest.raises(Malformed) as caught:
        parse_framing(headers, limit=LIMIT)
    return caught.value.code


@pytest.mark.requirement("AHP-R16", "AHP-R17", "AHP-R18", "AHP-R22")
def test_three_headers_are_a_declaration() -> None:
    assert parse_framing(HEAD, limit=LIMIT) == Declared(3, DIGEST)


@pytest.mark.requirement("AHP-R17", "B10")
def test_an_empty_body_is_declared_like_any_other() -> None:
    assert parse_framing(head(content_length=b"0"), limit=LIMIT).size == 0


@pytest.mark.requirement("AHP-R16")
@pytest.mark.parametrize("value", [b"Application/Octet-Stream", b"APPLICATION/OCTET-STREAM"])
def test_the_media_type_has_no_case(value: bytes) -> None:
    assert parse_framing(head(content_type=value), limit=LIMIT) == Declared(3, DIGEST)


@pytest.mark.requirement("AHP-R01", "AHP-R02", "AHP-R16")
@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"text/plain",
        b"application/json",
        b"multipart/form-data; boundary=x",
        b"application/octet-stream; charset=binary",
        b"application/octet-stream;",
        b"application/octet-stream, application/octet-stream",
        b" application/octet-stream",
        b"application/octet-streams",
        b"application/octet-stre\xc3\xa4m",
    ],
)
def test_any_other_media_type_is_refused(value: bytes | None) -> None:
    assert refusal(head(content_type=value)) == "content_type"


@pytest.mark.requirement("AHP-R17", "B07")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"+3",
        b"-1",
        b"03",
        b"00",
        b"3.0",
        b"3e0",
        b"0x3",
        b"3,3",
        b"3, 3",
        b"3 3",
        b" 3",
        b"3 ",
        b"\t3",
        b"three",
        b"1_000",
        b"\xd9\xa3",
        b"\xb3",
        b"9" * 20,
        b"9" * 4000,
    ],
)
def test_a_length_has_one_spelling(value: bytes) -> None:
    assert refusal(head(content_length=value)) == "malformed_length"


@pytest.mark.requirement("AHP-R17", "AHP-R21", "B06")
def test_a_length_must_be_there() -> None:
    assert refusal(head(content_length=None)) == "length_required"


@pytest.mark.requirement("AHP-R18", "B05")
@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        DIGEST.upper().encode(),
        DIGEST[:-1].encode(),
        f"{DIGEST}0".encode(),
        f" {DIGEST}".encode(),
        f"{DIGEST} ".encode(),
        f"sha256:{DIGEST}".encode(),
        f"{DIGEST},{DIGEST}".encode(),
        b"g" * 64,
        b"\xd9\xa3" * 32,
    ],
)
def test_a_digest_has_one_spelling(value: bytes | None) -> None:
    """Told apart from a digest that is well formed and does not match."""
    assert refusal(head(ahp_content_sha256=value)) == "malformed_digest"


@pytest.mark.requirement("AHP-R16", "AHP-R17", "AHP-R18", "B05", "B07")
@pytest.mark.parametrize("header", HEAD)
@pytest.mark.parametrize("other", [b"same", b"different"])
def test_each_of_the_three_appears_once(header: Header, other: bytes) -> None:
    again = header if other == b"same" else (header[0], b"0")
    assert refusal([*HEAD, again]) == "duplicate_header"


@pytest.mark.requirement("AHP-R12", "AHP-R20", "AHP-R21", "AHP-R22", "B06", "B15")
@pytest.mark.parametrize(
    ("header", "code"),
    [
        ((b"content-encoding", b"gzip"), "content_encoding"),
        ((b"content-encoding", b"identity"), "content_encoding"),
        ((b"content-encoding", b""), "content_encoding"),
        ((b"transfer-encoding", b"chunked"), "transfer_encoding"),
        ((b"transfer-encoding", b"identity"), "transfer_encoding"),
        ((b"ahp-subscription", b"x"), "caller_identity"),
        ((b"ahp-content-ref", b""), "caller_identity"),
        ((b"expect", b"nonsense"), "expectation"),
        ((b"expect", b"100-continue, nonsense"), "expectation"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_headers_that_no_upload_has(header: Header, code: str, place: int) -> None:
    assert refusal([*HEAD[:place], header, *HEAD[place:]]) == code


@pytest.mark.requirement("B15")
@pytest.mark.parametrize("value", [b"100-continue", b"100-Continue"])
def test_an_upload_may_wait_for_100_continue(value: bytes) -> None:
    assert parse_framing([*HEAD, (b"expect", value)], limit=LIMIT).size == 3


@pytest.mark.requirement("AHP-R50")
@pytest.mark.parametrize("control", [*range(0x09), *range(0x0A, 0x20), 0x7F])
def test_no_header_value_holds_control_characters(control: int) -> None:
    value = b"a%cb" % control
    assert refusal([*HEAD, (b"x-anything", value)]) == "malformed_header"


@pytest.mark.requirement("AHP-R50")
@pytest.mark.parametrize("value", [b"a\tb", b"\xff\x80", b"", "é".encode()])
def test_other_octets_are_legal_in_headers_that_mean_nothing_here(value: bytes) -> None:
    assert parse_framing([*HEAD, (b"x-anything", value)], limit=LIMIT).size == 3


@pytest.mark.requirement("AHP-R07", "AHP-R32")
@pytest.mark.parametrize(("size", "is_taken"), [(LIMIT, True), (LIMIT + 1, False)])
def test_the_limit_is_the_last_size_that_is_taken(size: int, is_taken: bool) -> None:
    headers = head(content_length=str(size).encode())
    if is_taken:
        assert parse_framing(headers, limit=LIMIT).size == size
        return
    with pytest.raises(TooLarge) as caught:
        parse_framing(headers, limit=LIMIT)
    assert caught.value.limit == LIMIT


@pytest.mark.requirement("AHP-R28", "AHP-R32")
def test_malformed_comes_before_too_large() -> None:
    headers = head(content_length=b"999999", ahp_content_sha256=b"x")
    assert refusal(headers) == "malformed_digest"


@pytest.mark.requirement("AHP-R50")
def test_a_refusal_never_repeats_a_value() -> None:
    for headers in (
        head(content_type=b"SECRET"),
        head(content_length=b"SECRET"),
        head(ahp_content_sha256=b"SECRET"),
        [*HEAD, (b"content-encoding", b"SECRET")],
        [*HEAD, (b"x", b"SECRET\x00")],
    ):
        with pytest.raises(Malformed) as caught:
            parse_framing(headers, limit=LIMIT)
        assert "SECRET" not in caught.value.message


NAMES = st.sampled_from(
    [
        b"content-type",
        b"content-length",
        b"ahp-content-sha256",
        b"content-encoding",
        b"transfer-encoding",
        b"expect",
        b"authorization",
        b"x-other",
    ]
)
VALUES = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([value for _, value in HEAD]),
    st.integers(0, 10**20).map(lambda number: str(number).encode()),
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=8), st.integers(0, 10**19))
def test_any_head_is_declared_or_refused(headers: list[Header], limit: int) -> None:
    try:
        declared = parse_framing(headers, limit=limit)
    except (Malformed, TooLarge):
        return
    assert 0 <= declared.size <= limit
    assert sorted(n for n, _ in headers if n in dict(HEAD)) == sorted(dict(HEAD))


FOREIGN = st.lists(
    st.tuples(
        st.sampled_from([b"host", b"accept", b"authorization", b"x-trace", b"accept-encoding"]),
        st.binary(max_size=30).filter(lambda value: not any(b < 0x20 or b == 0x7F for b in value)),
    ),
    max_size=6,
)


@pytest.mark.requirement("AHP-R03", "AHP-R22")
@given(st.binary(max_size=64), FOREIGN, st.randoms())
def test_order_and_foreign_headers_mean_nothing(
    body: bytes, foreign: list[Header], order: random.Random
) -> None:
    digest = hashlib.sha256(body).hexdigest()
    headers = [
        *head(content_length=b"%d" % len(body), ahp_content_sha256=digest.encode()),
        *foreign,
    ]
    order.shuffle(headers)
    assert parse_framing(headers, limit=LIMIT) == Declared(len(body), digest)


def _replaced(value: bytes, place: int, octet: int) -> bytes:
    return value[:place] + bytes([octet]) + value[place + 1 :]


def _inserted(value: bytes, place: int, octet: int) -> bytes:
    return value[:place] + bytes([octet]) + value[place:]


def _removed(value: bytes, place: int, _: int) -> bytes:
    return value[:place] + value[place + 1 :]


def _is_another_declaration(name: bytes, value: bytes) -> bool:
    """Whether a changed value is well formed, and so declares something else."""
    if name == b"content-type":
        return value.lower() == TYPE[1]
    if name == b"content-length":
        return value.isdigit() and str(int(value)).encode() == value
    return len(value) == 64 and all(octet in b"0123456789abcdef" for octet in value)


@pytest.mark.requirement("AHP-R16", "AHP-R17", "AHP-R18", "B05", "B07")
@given(
    st.sampled_from(HEAD),
    st.sampled_from([_replaced, _inserted, _removed]),
    st.integers(0, 63),
    st.integers(0, 255),
)
def test_one_changed_octet_is_refused_or_declares_something_else(
    header: Header, change: Callable[[bytes, int, int], bytes], place: int, octet: int
) -> None:
    name, value = header
    changed = change(value, place % len(value), octet)
    assume(changed != value)
    headers = [(n, changed if n == name else v) for n, v in HEAD]
    if _is_another_declaration(name, changed):
        assert parse_framing(headers, limit=10**19).size >= 0
        return
    assert refusal(headers)
