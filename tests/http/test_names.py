"""File names: what is accepted, and what it looks like in a header and in a zip."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Malformed
from app.http import names
from app.http.names import ZipNames, content_disposition, shortened

ANY_TEXT = st.text(st.characters(codec=None))
EXACT = re.compile(rb"filename\*=UTF-8''([A-Za-z0-9!#$&+.^_`|~%-]*)$")
HEADER = re.compile(rb'(attachment|inline); filename="[^"\\%/\x00-\x1f\x7f-\xff]*"; filename\*=\S+')


@pytest.mark.requirement("UHP-20", "B02", "B32", "B35")
@pytest.mark.parametrize(
    "name",
    [
        "报告.txt",
        "plan-🚀.txt",
        "café.txt",
        "cafe\u0301.txt",
        "👩\u200d💻.md",
        "100% done.txt",
        "a%41.txt",
        "a%2fb.txt",
        "50%25.txt",
        'a"b.txt',
        "a;b=c,d.txt",
        " leading and trailing ",
        ".hidden",
        "...",
        "no extension",
        "я" * 128 + ".txt",
        "a" * 255,
        "文" * 85,
        "a" * names.MAX_BYTES,
    ],
)
def test_a_name_is_kept_as_it_was_sent(name: str) -> None:
    assert names.accept(name, param="file") == name


@pytest.mark.requirement("B22", "B24")
@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (r"C:\dir\f.txt", "f.txt"),
        (r"..\..\f.txt", "f.txt"),
        (r"\\server\share\f.txt", "f.txt"),
        ("../../etc/x", "x"),
        ("/abs", "abs"),
        ("a/b\\c/d", "d"),
    ],
)
def test_of_a_path_the_last_component_is_kept(sent: str, kept: str) -> None:
    assert names.accept(sent, param="file") == kept


@pytest.mark.requirement("B22", "B29", "B30", "B32")
@pytest.mark.parametrize(
    "name",
    [
        "",
        "   ",
        "\u3000",
        ".",
        "..",
        "/",
        "a/",
        "a/..",
        "..\\",
        "a\x00b",
        "a\r\nSet-Cookie: x=1\r\n.txt",
        "a\tb",
        "\x7f.txt",
        "a\x85b",
        "a\u2028b",
        "a\u2029b",
        "photo\u202egpj.exe",
        "a\u2066b",
        "\ud800.txt",
        "\udfff",
        "a" * (names.MAX_BYTES + 1),
        "я" * 513,
        "a" * 100_000,
    ],
)
def test_a_name_that_cannot_be_shown_is_refused_with_its_field(name: str) -> None:
    with pytest.raises(Malformed) as refused:
        names.accept(name, param="input.0.content.1.filename")
    assert refused.value.param == "input.0.content.1.filename"
    assert name.strip() == "" or name in (".", "..", "/") or name not in refused.value.message


@given(ANY_TEXT)
def test_whatever_is_accepted_can_be_written_and_is_one_component(name: str) -> None:
    try:
        kept = names.accept(name, param="file")
    except Malformed:
        return
    assert name.endswith(kept)
    assert kept.encode("utf-8").decode("utf-8") == kept
    assert kept.isprintable() or not re.search(r"[\x00-\x1f\x7f/\\]", kept)
    assert names.accept(kept, param="file") == kept


@pytest.mark.requirement("UHP-20", "B02", "B29")
def test_a_disposition_has_a_plain_fallback_and_the_exact_name() -> None:
    assert content_disposition("café 100%.txt") == (
        b"attachment; filename=\"caf_ 100_.txt\"; filename*=UTF-8''caf%C3%A9%20100%25.txt"
    )
    assert content_disposition("a.png", inline=True).startswith(b'inline; filename="a.png"; ')


@pytest.mark.requirement("B29")
@pytest.mark.parametrize(
    "name", ["a\r\nSet-Cookie: x=1\r\n.txt", 'a"; filename="evil.exe', "a\tb", "\ud800.txt", "a/b"]
)
def test_no_name_breaks_the_header(name: str) -> None:
    value = content_disposition(name)
    assert HEADER.fullmatch(value)
    assert value.count(b"filename=") == 1


@given(ANY_TEXT)
def test_any_name_makes_one_header_from_which_it_is_read_back(name: str) -> None:
    value = content_disposition(name)
    assert HEADER.fullmatch(value)
    exact = EXACT.search(value)
    assert exact is not None
    assert unquote_to_bytes(exact[1]) == name.encode("utf-8", errors="replace")


@pytest.mark.requirement("UHP-27", "B58")
def test_entries_keep_their_paths_and_each_name_once() -> None:
    entries = ZipNames()
    assert [
        entries.add(path)
        for path in [
            "a/report.md",
            "b/report.md",
            "report.md",
            "report.md",
            "report.md",
            "x.tar.gz",
        ]
    ] == ["a/report.md", "b/report.md", "report.md", "report (2).md", "report (3).md", "x.tar.gz"]
    assert entries.add("report (2).md") == "report (2) (2).md"
    assert entries.add(".profile") == ".profile"
    assert entries.add(".profile") == ".profile (2)"


@pytest.mark.requirement("B58")
def test_a_file_and_a_folder_of_one_name_are_kept_apart() -> None:
    entries = ZipNames()
    assert entries.add("out") == "out"
    assert entries.add("out/a.txt") == "out (2)/a.txt"
    assert entries.add("out/b.txt") == "out (2)/b.txt"
    assert entries.add("deep/er/c.txt") == "deep/er/c.txt"
    assert entries.add("deep/er") == "deep/er (2)"
    assert entries.add("deep") == "deep (2)"


@pytest.mark.requirement("B58")
@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("/etc/passwd", "etc/passwd"),
        ("../../x", "x"),
        ("a/./b//c", "a/b/c"),
        (r"..\..\x", ".._.._x"),
        ("C:/x", "C_/x"),
        ("c:x", "c_x"),
        ("a/c:x", "a/c:x"),
        ("a\nb", "a_b"),
        ("\ud800", "_"),
        ("..", "_"),
        ("", "_"),
    ],
)
def test_an_entry_is_safe_to_unpack(path: str, entry: str) -> None:
    assert ZipNames().add(path) == entry


@given(st.lists(st.text("ab/.\\:é🚀 ", max_size=8), max_size=12))
def test_any_paths_give_distinct_safe_entries(paths: list[str]) -> None:
    entries = ZipNames()
    given = [entries.add(path) for path in paths]
    assert len(set(given)) == len(given)
    folders = {name[: match.start()] for name in given for match in re.finditer("/", name)}
    assert folders.isdisjoint(given)
    for name in given:
        assert not name.startswith("/")
        assert not {"", ".", ".."} & set(name.split("/"))


@pytest.mark.requirement("B32")
def test_a_long_component_is_cut_on_a_character_and_keeps_its_extension() -> None:
    entries = ZipNames()
    first = entries.add("я" * 128 + ".txt")
    second = entries.add("я" * 128 + ".txt")
    assert first == "я" * 125 + ".txt"
    assert second == "я" * 123 + " (2).txt"
    assert all(len(name.encode()) <= names.ZIP_COMPONENT_BYTES for name in (first, second))


@pytest.mark.parametrize(
    ("name", "limit", "short"),
    [
        ("🚀🚀.txt", 11, "🚀.txt"),
        ("🚀🚀", 7, "🚀"),
        ("a." + "b" * 20, 10, "a.bbbbbbbb"),
        ("short", 5, "short"),
    ],
)
def test_shortening(name: str, limit: int, short: str) -> None:
    assert shortened(name, limit) == short
