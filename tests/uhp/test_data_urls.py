"""Files inline: exactly the bytes that were meant, or a refusal that names the field."""

from __future__ import annotations

import base64
import re
import tracemalloc
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import TooLarge
from app.uhp import data_urls
from app.uhp.data_urls import DEFAULT_MEDIA_TYPE, DataUrl, parse_data_url
from app.uhp.errors import UhpError

PARAM = "input.0.content.1.file_data"
LIMIT = 10 * 1024 * 1024


def parsed(value: object, limit: int = LIMIT) -> DataUrl:
    return parse_data_url(value, limit=limit, param=PARAM)


def decoded(value: object) -> bytes:
    url = parsed(value)
    content = url.content()
    assert len(content) == url.size
    return content


def refusal(value: object) -> UhpError:
    with pytest.raises(UhpError) as caught:
        parsed(value).content()
    assert (caught.value.status, caught.value.code) == (400, "invalid_input")
    assert caught.value.param == PARAM
    return caught.value


@pytest.mark.requirement("UHP-02", "B90", "B91", "B92")
@pytest.mark.parametrize(
    ("url", "media_type", "content"),
    [
        ("data:text/plain;base64,SGk=", "text/plain", b"Hi"),
        ("data:text/plain;charset=utf-8;base64,SGk=", "text/plain;charset=utf-8", b"Hi"),
        ("DATA:Text/Plain;BASE64,SGk=", "text/plain", b"Hi"),
        ("data:;base64,SGk=", DEFAULT_MEDIA_TYPE, b"Hi"),
        ("data:,hi", DEFAULT_MEDIA_TYPE, b"hi"),
        ("data:,", DEFAULT_MEDIA_TYPE, b""),
        ("data:;base64,", DEFAULT_MEDIA_TYPE, b""),
        ("data:;charset=utf-8,%C3%A9", "text/plain;charset=utf-8", "é".encode()),
        ('data:a/b;x="c,d;base64";base64,SGk=', 'a/b;x="c,d;base64"', b"Hi"),
        (r'data:a/b;x="c\",d";base64,SGk=', r'a/b;x="c\",d"', b"Hi"),
        ("data:a/b;base64x=1,hi", "a/b;base64x=1", b"hi"),
        ("data:a/b;x=base64,hi", "a/b;x=base64", b"hi"),
        ("data:text/plain,a%20b+c%2f%00", "text/plain", b"a b+c/\x00"),
        ("data:a/b;base64,%2B/8=", "a/b", b"\xfb\xff"),
        ("data:a/b;base64,%2b%2F8%3D", "a/b", b"\xfb\xff"),
        ("data:a/b;base64,SGVs\r\nbG8h\r\n", "a/b", b"Hello!"),
        ("data:a/b;base64, S G\tk = ", "a/b", b"Hi"),
        ("data:a/b;base64,SGVs%0D%0AbG8h%20%09", "a/b", b"Hello!"),
        ("data:a/b;base64,SG%6B=", "a/b", b"Hi"),
    ],
)
def test_data_urls(url: str, media_type: str, content: bytes) -> None:
    assert parsed(url).media_type == media_type
    assert decoded(url) == content


@pytest.mark.requirement("B90", "B91", "B92")
@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        ["data:,hi"],
        "",
        "SGk=",
        "data",
        "data:",
        "data:text/plain;base64",
        "data:base64,SGk=",
        "data:text,hi",
        "data:text/plain;charset,hi",
        "data:text/html, image/png;base64,SGk=",
        "data:text/plain\r\nX: y;base64,SGk=",
        'data:text/plain;x="a,b',
        " data:,hi",
        f"data:text/plain;x={'y' * data_urls.MAX_HEAD},hi",
        f"data:text/{'y' * 300},hi",
        "data:;base64,SGVs____bG8=",
        "data:;base64,SGVs--",
        "data:;base64,SGk",
        "data:;base64,SGk=extra",
        "data:;base64,SGk=SGk=",
        "data:;base64,S=Gk",
        "data:;base64,S",
        "data:;base64,=",
        "data:;base64,====",
        "data:;base64,SGk==",
        "data:;base64,SGl=",
        "data:;base64,SGk=#fragment",
        "data:;base64,SGk%3",
        "data:;base64,SG\x0bk=",
        "data:;base64,SGk\u00a0=",
        "data:;base64,%FFGk=",
        "data:,%",
        "data:,%4",
        "data:,%zz",
        "data:,a b",
        "data:,é",
        "data:,a#b",
        "data:,\ud800",
    ],
)
def test_everything_else_is_refused_with_its_field(value: object) -> None:
    refusal(value)


@pytest.mark.requirement("B90")
@pytest.mark.parametrize("url", ["http://127.0.0.1/a", "https://example.org/a", "file:///etc/x"])
def test_no_url_is_fetched(url: str) -> None:
    assert "not fetched" in refusal(url).message
    assert url not in refusal(url).message


@given(st.binary(max_size=200), st.sampled_from(["", "\r\n", " ", "\t"]), st.integers(1, 80))
def test_base64_comes_back(content: bytes, space: str, width: int) -> None:
    text = base64.b64encode(content).decode()
    wrapped = space.join(text[start : start + width] for start in range(0, len(text), width))
    assert decoded(f"data:a/b;base64,{wrapped}") == content
    escaped = re.sub(r"[+/=\s]", lambda match: f"%{ord(match[0]):02x}", wrapped)
    assert decoded(f"data:a/b;base64,{escaped}") == content


@given(st.binary(max_size=200))
def test_percent_encoding_comes_back(content: bytes) -> None:
    assert decoded(f"data:a/b,{quote_from_bytes(content)}") == content


@given(st.text("ABab01+/=_-% \r\n", max_size=24))
def test_any_base64_is_exact_or_refused(text: str) -> None:
    try:
        content = decoded(f"data:;base64,{text}")
    except UhpError:
        return
    unescaped = re.sub(r"%([0-9A-Fa-f]{2})", lambda match: chr(int(match[1], 16)), text)
    assert base64.b64encode(content).decode() == re.sub(r"[\r\n \t]", "", unescaped)


@pytest.mark.requirement("UHP-09", "B92")
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 100])
def test_the_limit_is_on_the_decoded_bytes(size: int) -> None:
    text = base64.b64encode(bytes(size)).decode()
    wrapped = "%0d%0A".join(text)
    for data in (f";base64,{text}", f";base64,{wrapped}", f",{'%00' * size}"):
        assert parsed(f"data:{data}", limit=size).size == size
        if size:
            with pytest.raises(TooLarge) as caught:
                parsed(f"data:{data}", limit=size - 1)
            assert caught.value.limit == size - 1


@pytest.mark.requirement("UHP-07", "B92")
@pytest.mark.anyio
async def test_a_large_file_is_decoded_in_pieces() -> None:
    content = bytes(range(256)) * 16_000
    text = base64.encodebytes(content).decode().replace("\n", "%0d%0a")
    value = f"data:a/b;base64,{text}"
    tracemalloc.start()
    try:
        url = parsed(value)
        received = 0
        async for piece in url.pieces():
            assert piece == content[received : received + len(piece)]
            received += len(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert received == url.size == len(content)
    assert peak < len(content)


@pytest.mark.requirement("B91")
def test_padding_inside_a_large_file_is_refused() -> None:
    groups = data_urls.PIECE_CHARACTERS // 4 + 1
    refusal("data:;base64," + "QQ==" + "QUFB" * groups)
    refusal("data:;base64," + "QUFB" * groups + "QQ=")


def test_an_escape_is_not_cut_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_urls, "PIECE_CHARACTERS", 4)
    assert decoded("data:,ab%63%64e%66") == b"abcdef"
    assert decoded("data:;base64,QU%46BQUF%42%51%55%46%42") == b"A" * 9
    assert decoded("data:,%61%62%63%64") == b"abcd"
