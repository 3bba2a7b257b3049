"""Forms with one file: what arrives is exact and whole, or refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import pairwise

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Disconnected, Malformed, Refusal, TooLarge
from app.http import multipart
from app.http.multipart import FileForm, boundary_of

LIMIT = 1024 * 1024
FORM_HEAD = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n'
WHOLE = FORM_HEAD + b"Content-Type: text/plain\r\n\r\nabc\r\n--B--\r\n"


@dataclass(frozen=True)
class Read:
    """What a form gave."""

    filename: str
    media_type: str | None
    content: bytes
    fields: dict[str, str]


def part(disposition: str, content: bytes = b"abc", *headers: str, boundary: str = "B") -> bytes:
    lines = [f"--{boundary}", f"Content-Disposition: form-data; {disposition}", *headers, "", ""]
    return "\r\n".join(lines).encode("utf-8") + content + b"\r\n"


def form(*parts: bytes, boundary: str = "B") -> bytes:
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def file_named(disposition: str) -> bytes:
    return form(part(f'name="file"; {disposition}'))


async def arriving(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def read(chunks: Iterable[bytes], *, boundary: bytes = b"B", limit: int = LIMIT) -> Read:
    reading = FileForm(arriving(chunks), boundary, field="file", file_bytes=limit)
    head = await reading.file()
    content = b"".join([piece async for piece in reading.content()])
    return Read(head.filename, head.media_type, content, reading.fields)


def read_now(*chunks: bytes, boundary: bytes = b"B", limit: int = LIMIT) -> Read:
    async def run() -> Read:
        return await read(chunks, boundary=boundary, limit=limit)

    return anyio.run(run)


def refused(*chunks: bytes, boundary: bytes = b"B") -> Malformed:
    with pytest.raises(Malformed) as caught:
        read_now(*chunks, boundary=boundary)
    return caught.value


def cut(body: bytes, places: Iterable[int]) -> list[bytes]:
    bounds = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[start:stop] for start, stop in pairwise(bounds)]


@pytest.mark.requirement("UHP-03")
def test_a_file_and_its_fields() -> None:
    body = form(
        part('name="purpose"', b"user_data"),
        part('name="file"; filename="q3.pdf"', b"\x00\xff\r\n", "Content-Type: application/pdf"),
        part('name="later"', "dépôt".encode(), "Content-Type: text/plain; charset=UTF-8"),
    )
    assert read_now(body) == Read(
        "q3.pdf",
        "application/pdf",
        b"\x00\xff\r\n",
        {"purpose": "user_data", "later": "dépôt"},
    )


def test_an_empty_file_is_a_file() -> None:
    assert read_now(form(part('name="file"; filename="e"', b""))).content == b""


@pytest.mark.parametrize(
    "content",
    [
        b"\r\n",
        b"\r\n--",
        b"\r\n--B-",
        b"\r\n--Bx\r\n--B-\r\n--C--",
        b"--B--\r\n",
        b"\n--B--\n",
        b"\r--B--\r",
        bytes(range(256)) * 3,
        b"\r\n-" * 5_000,
    ],
)
def test_content_like_a_boundary_is_content(content: bytes) -> None:
    body = form(part('name="file"; filename="f"', content))
    assert read_now(*cut(body, range(len(body)))).content == content
    assert read_now(body).content == content


@given(
    content=st.lists(
        st.sampled_from([b"\r", b"\n", b"-", b"B", b"\r\n--B", b"\r\n--B-", b"x", b"\xff" * 300])
    ).map(b"".join),
    places=st.lists(st.integers(0, 10_000)),
    before=st.booleans(),
)
def test_any_split_of_a_form_gives_the_same(
    content: bytes, places: list[int], before: bool
) -> None:
    fields = [part('name="purpose"', b"user_data")]
    file = part('name="file"; filename="f\\"%22.txt"', content, "Content-Type: a/b")
    body = form(*([*fields, file] if before else [file, *fields]))
    try:
        whole: Read | type[Refusal] = read_now(body)
    except Malformed as refusal:
        whole = type(refusal)
    try:
        split: Read | type[Refusal] = read_now(*cut(body, places))
    except Malformed as refusal:
        split = type(refusal)
    assert split == whole
    if b"\r\n--B" not in content:
        assert whole == Read('f"".txt', "a/b", content, {"purpose": "user_data"})


@pytest.mark.requirement("UHP-10", "B21")
@given(st.integers(0, len(WHOLE) - len("--\r\n") - 1), st.lists(st.integers(0, 200), max_size=5))
def test_a_form_that_is_cut_anywhere_is_refused(end: int, places: list[int]) -> None:
    assert refused(*cut(WHOLE[:end], places)).code == "malformed_form"


@pytest.mark.requirement("B21")
def test_after_the_closing_boundary_nothing_is_needed() -> None:
    for end in (len(WHOLE), len(WHOLE) - 1, len(WHOLE) - 2):
        assert read_now(WHOLE[:end]).content == b"abc"
    assert read_now(WHOLE + b"an epilogue\r\n" + b"--B--\r\n").content == b"abc"


@pytest.mark.requirement("B20", "B22")
@pytest.mark.parametrize(
    "body",
    [
        b"--B--\r\n",
        form(part('name="purpose"', b"x")),
        form(part('name="upload"; filename="a.txt"')),
        form(part('name="file"')),
        form(part('name="file"; filename="a"'), part('name="file"; filename="b"')),
        form(part('name="file"; filename="a"'), part('name="other"; filename="b"')),
        form(part('name="other"; filename="b"'), part('name="file"; filename="a"')),
        form(part('name="file"; filename="a"'), part('name="file"')),
    ],
)
def test_exactly_one_file_in_its_field(body: bytes) -> None:
    refusal = refused(body)
    assert refusal.param == "file"


@pytest.mark.requirement("B20", "B21")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"abc",
        b"preamble\r\n" + WHOLE,
        WHOLE.replace(b"--B", b"--C"),
        b"--B\r\n\r\nabc\r\n--B--\r\n",
        WHOLE.replace(b"form-data", b"attachment"),
        b'--B\r\nContent-Disposition: form-data; filename="a"\r\n\r\nabc\r\n--B--\r\n',
        b'--B\r\nContent-Disposition: form-data; name="file; filename=a\r\n\r\nabc\r\n--B--\r\n',
        FORM_HEAD + b'Content-Disposition: form-data; name="x"\r\n\r\nabc\r\n--B--\r\n',
        FORM_HEAD + b": x\r\n\r\nabc\r\n--B--\r\n",
        FORM_HEAD + b"X: a\rb\r\n\r\nabc\r\n--B--\r\n",
        FORM_HEAD + b"X: \xff\r\n\r\nabc\r\n--B--\r\n",
        WHOLE.replace(b"\r\n", b"\n"),
        form(part('name="x"', b"\xff"), part('name="file"; filename="a"')),
        form(part('name="x"', b"", "Content-Type: text/plain; charset=nope")),
        form(part('name="x"', b"", "Content-Type: text/plain; charset")),
        form(*[part('name="x"')] * multipart.MAX_PARTS, part('name="file"; filename="a"')),
        form(part('name="file"; filename="a"', b"", *[f"X-{n}: y" for n in range(20)])),
        form(part('name="file"; filename="a"', b"", f"X: {'y' * multipart.MAX_HEADER_BYTES}")),
    ],
)
def test_broken_forms_are_refused(body: bytes) -> None:
    assert refused(body).code == "malformed_form"
    assert refused(*cut(body, range(0, len(body), 7))).code == "malformed_form"


@pytest.mark.requirement("B02", "B24", "B35")
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('filename="报告 🚀.txt"', "报告 🚀.txt"),
        (r'filename="C:\dir\f.txt"', r"C:\dir\f.txt"),
        (r'filename="a\"b.txt"', 'a"b.txt'),
        ('filename="a%22b.txt"', 'a"b.txt'),
        ('filename="a%41%2fb 100%.txt"', "a%41%2fb 100%.txt"),
        ("filename=plain.txt", "plain.txt"),
        ("filename*=UTF-8''na%C3%AFve%20%22.txt", 'naïve ".txt'),
        ("filename=\"x\"; filename*=utf-8'en'y", "y"),
        ('filename=""', ""),
    ],
)
def test_names_as_senders_write_them(written: str, meant: str) -> None:
    assert read_now(file_named(written)).filename == meant


@pytest.mark.parametrize(
    "written",
    [
        "filename*=ISO-8859-1''a",
        "filename*=UTF-8''%ff",
        "filename*=UTF-8''%4",
        "filename*=UTF-8'a",
        "filename*=UTF-8''a/b",
    ],
)
def test_an_extended_name_is_exact_or_refused(written: str) -> None:
    assert refused(file_named(written)).param == "file"


@pytest.mark.requirement("UHP-09", "B18")
def test_the_file_is_bounded_while_it_arrives() -> None:
    assert read_now(WHOLE, limit=3).content == b"abc"
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        yield FORM_HEAD + b"\r\n"
        while True:
            taken += 1000
            yield bytes(1000)

    async def run() -> None:
        reading = FileForm(endless(), b"B", field="file", file_bytes=5_000)
        await reading.file()
        async for _ in reading.content():
            pass

    with pytest.raises(TooLarge) as caught:
        anyio.run(run)
    assert caught.value.limit == 5_000
    assert taken == 6_000


@pytest.mark.requirement("B18")
@pytest.mark.parametrize(
    "endless",
    [
        part('name="text"', bytes(multipart.MAX_FIELD_BYTES + 1)),
        FORM_HEAD + b"\r\nabc\r\n--B--\r\n" + bytes(multipart.FRAMING_BYTES),
        b"\r\n" * multipart.FRAMING_BYTES,
    ],
    ids=["text field", "epilogue", "empty lines"],
)
def test_what_is_no_file_is_bounded(endless: bytes) -> None:
    with pytest.raises(TooLarge):
        read_now(*cut(endless, range(0, len(endless), 10_000)))


@pytest.mark.requirement("UHP-07", "B18")
def test_memory_does_not_grow_with_the_file() -> None:
    chunk = bytes(range(256)) * 256

    async def run() -> int:
        parts = (FORM_HEAD + b"\r\n", *[chunk] * 400, b"\r\n--B--\r\n")
        reading = FileForm(arriving(parts), b"B", field="file", file_bytes=len(chunk) * 400)
        await reading.file()
        size = 0
        async for piece in reading.content():
            size += len(piece)
        return size

    tracemalloc.start()
    try:
        assert anyio.run(run) == len(chunk) * 400
        assert tracemalloc.get_traced_memory()[1] < 40 * len(chunk)
    finally:
        tracemalloc.stop()


def test_a_client_that_goes_is_no_end_of_a_form() -> None:
    async def going() -> AsyncIterator[bytes]:
        yield FORM_HEAD + b"\r\nabc"
        raise Disconnected

    async def run() -> None:
        reading = FileForm(going(), b"B", field="file", file_bytes=LIMIT)
        await reading.file()
        async for _ in reading.content():
            pass

    with pytest.raises(Disconnected):
        anyio.run(run)


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=B", b"B"),
        ('Multipart/Form-Data; charset=utf-8; BOUNDARY="a b"', b"a b"),
        ("multipart/form-data; boundary=----=_Part_1'()+,./:=?", b"----=_Part_1'()+,./:=?"),
        (f"multipart/form-data; boundary={'b' * 70}", b"b" * 70),
    ],
)
def test_a_boundary(content_type: str, boundary: bytes) -> None:
    assert boundary_of(content_type) == boundary
    text = boundary.decode()
    body = form(part('name="file"; filename="f"', b"abc", boundary=text), boundary=text)
    assert read_now(body, boundary=boundary).content == b"abc"


@pytest.mark.requirement("B28")
@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        f"multipart/form-data; boundary={'b' * 300}",
        "multipart/form-data; boundary=a\rb",
        'multipart/form-data; boundary=a"b',
        "multipart/form-data; boundary=a; boundary=b",
        'multipart/form-data; boundary="a "',
        "multipart/form-data; boundary=é",
    ],
)
def test_a_boundary_that_is_none_is_named(content_type: str) -> None:
    with pytest.raises(Malformed, match="boundary"):
        boundary_of(content_type)


@pytest.mark.requirement("B20")
@pytest.mark.parametrize(
    "content_type", [None, "", "application/json", "multipart/mixed; boundary=B"]
)
def test_another_type_is_no_form(content_type: str | None) -> None:
    with pytest.raises(Malformed) as caught:
        boundary_of(content_type)
    assert caught.value.param == "file"


@pytest.mark.requirement("B21")
def test_a_form_in_another_charset_is_refused() -> None:
    with pytest.raises(Malformed, match="charset"):
        boundary_of("multipart/form-data; charset=nope; boundary=B")
