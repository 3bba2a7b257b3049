"""Which files a preview is made of: by their content, whatever they are called."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.uhp import preview_formats
from app.uhp.preview_formats import NotConvertible, format_of, is_pdf, recognized
from tests.uhp.documents import OLE_MAGIC, PDF, docx, encrypted_docx, odt, png, zipped

OFFICE = "application/vnd.openxmlformats-officedocument"


@pytest.mark.requirement("B69")
@pytest.mark.parametrize(
    ("filename", "media_type", "extension"),
    [
        ("a.docx", "application/octet-stream", ".docx"),
        ("Test.DOCX", "application/octet-stream", ".docx"),
        ("..docx", "application/octet-stream", ".docx"),
        ("-o evil.docx", "text/plain", ".docx"),
        ("Пример.xlsx", "application/octet-stream", ".xlsx"),
        ("report", f"{OFFICE}.presentationml.presentation", ".pptx"),
        ("report", "Text/Plain; charset=utf-8", ".txt"),
        ("a.md", "application/octet-stream", ".txt"),
        ("a.jpeg", "image/jpeg", ".jpg"),
        ("a.tar.csv", "text/csv", ".csv"),
        ("a.pdf", "application/pdf", ".pdf"),
    ],
)
def test_what_a_file_claims_to_be(filename: str, media_type: str, extension: str) -> None:
    claimed = format_of(filename, media_type)
    assert claimed is not None
    assert claimed.extension == extension
    assert is_pdf(claimed) == (extension == ".pdf")


@pytest.mark.parametrize(
    ("filename", "media_type"),
    [
        ("a.html", "text/html"),
        ("a.svg", "image/svg+xml"),
        ("docx", "application/octet-stream"),
        ("a.exe", "application/octet-stream"),
        ("a", "application/json"),
    ],
)
def test_what_claims_to_be_nothing_that_is_converted(filename: str, media_type: str) -> None:
    assert format_of(filename, media_type) is None


def checked(tmp_path: Path, name: str, content: bytes) -> bytes:
    """What is left of `content` when it is what `name` says."""
    path = tmp_path / "received"
    path.write_bytes(content)
    claimed = format_of(name, "application/octet-stream")
    assert claimed is not None
    claimed.check(path)
    return path.read_bytes()


GOOD = {
    "a.docx": docx(),
    "a.xlsx": zipped({"[Content_Types].xml": "", "xl/workbook.xml": ""}),
    "a.pptx": zipped({"[Content_Types].xml": "", "ppt/presentation.xml": ""}),
    "a.odt": odt(),
    "a.ott": zipped({"mimetype": "application/vnd.oasis.opendocument.text-template"}),
    "a.ods": zipped({"mimetype": "application/vnd.oasis.opendocument.spreadsheet"}),
    "a.odp": zipped({"mimetype": "application/vnd.oasis.opendocument.presentation\n"}),
    "a.rtf": b"{\\rtf1 hello}",
    "a.doc": OLE_MAGIC + bytes(512),
    "a.pdf": PDF,
    "a.txt": "Grüße\n".encode(),
    "empty.txt": b"",
    "a.csv": b"a,b\r\n1,2\r\n",
    "a.png": png(),
    "a.jpg": b"\xff\xd8\xff\xe0",
    "a.gif": b"GIF89a",
    "a.webp": b"RIFF\n\n\n\nWEBPVP8 ",
    "a.bmp": b"BM",
    "a.tif": b"II*\0",
}


@pytest.mark.parametrize("name", GOOD)
def test_content_that_is_what_the_name_says(tmp_path: Path, name: str) -> None:
    assert checked(tmp_path, name, GOOD[name]) == GOOD[name]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfmarked", "marked"),
        ("Grüße".encode("utf-16"), "Grüße"),
        (b"Gr\xfc\xdfe \x80", "Grüße €"),
    ],
)
def test_text_is_brought_into_utf8(tmp_path: Path, content: bytes, text: str) -> None:
    assert checked(tmp_path, "a.txt", content).decode("utf-8") == text


NOISE = b"\0\x01\x02" * 100
TEXTS = ("a.txt", "empty.txt", "a.csv")


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, NOISE) for name in GOOD]
    + [(n, c) for n in GOOD if n not in TEXTS for c in (b"", b"PK\x03\x04 and then noise")],
)
def test_content_that_is_something_else(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(NotConvertible) as refused:
        checked(tmp_path, name, content)
    assert refused.value.reason == "content_mismatch"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.docx", GOOD["a.xlsx"]),
        ("a.docx", zipped({"word/document.xml": ""})),
        ("a.docx", GOOD["a.doc"]),
        ("a.odt", GOOD["a.ods"]),
        ("a.odt", GOOD["a.docx"]),
        ("a.png", b"GIF89a"),
        ("a.docx", docx()[:200]),
        ("a.odt", docx()[:-30]),
    ],
)
def test_a_document_of_another_kind(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(NotConvertible) as refused:
        checked(tmp_path, name, content)
    assert refused.value.reason == "content_mismatch"


def test_a_member_that_cannot_be_read_is_a_mismatch(tmp_path: Path) -> None:
    broken = bytearray(GOOD["a.odt"])
    begin = broken.index(b"mimetype") + len("mimetype")
    broken[begin : begin + 8] = b"\xff" * 8
    with pytest.raises(NotConvertible) as refused:
        checked(tmp_path, "a.odt", bytes(broken))
    assert refused.value.reason == "content_mismatch"


@given(
    name=st.sampled_from(["a.docx", "a.odt"]),
    spots=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_a_damaged_document_is_refused_or_taken_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, name: str, spots: list[tuple[float, int]]
) -> None:
    content = bytearray(GOOD[name])
    for where, octet in spots:
        content[int(where * (len(content) - 1))] = octet
    outcome = "taken"
    try:
        checked(tmp_path_factory.mktemp("damaged"), name, bytes(content))
    except NotConvertible as refused:
        outcome = refused.reason
    assert outcome in ("taken", "content_mismatch", "encrypted", "too_complex")


@pytest.mark.requirement("B66")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.docx", encrypted_docx()),
        ("a.odt", odt(manifest="<manifest:encryption-data/>")),
    ],
)
def test_a_document_with_a_password(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(NotConvertible) as refused:
        checked(tmp_path, name, content)
    assert refused.value.reason == "encrypted"


@pytest.mark.requirement("B66")
def test_a_document_that_unfolds_into_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = zipped({"[Content_Types].xml": "", "word/document.xml": bytes(100_000)})
    assert len(bomb) < 1000
    assert checked(tmp_path, "a.docx", bomb) == bomb
    monkeypatch.setattr(preview_formats, "MAX_EXPANDED_BYTES", 99_999)
    with pytest.raises(NotConvertible) as refused:
        checked(tmp_path, "a.docx", bomb)
    assert refused.value.reason == "too_complex"


@pytest.mark.requirement("B66")
def test_a_document_of_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_formats, "MAX_MEMBERS", 2)
    with pytest.raises(NotConvertible) as refused:
        checked(tmp_path, "a.docx", docx())
    assert refused.value.reason == "too_complex"


@pytest.mark.requirement("B66")
def test_a_directory_that_is_too_large_is_never_read(tmp_path: Path) -> None:
    end = struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 9, 9, 2**31, 0, 0)
    with pytest.raises(NotConvertible) as refused:
        checked(tmp_path, "a.docx", b"PK\x03\x04" + bytes(100) + end)
    assert refused.value.reason == "too_complex"


@pytest.mark.requirement("B69")
@pytest.mark.parametrize(
    ("content", "extension"),
    [(docx(), ".docx"), (odt(), ".odt"), (b"{\\rtf1 x}", ".rtf")],
)
def test_a_document_without_a_name_is_recognized(
    tmp_path: Path, content: bytes, extension: str
) -> None:
    path = tmp_path / "received"
    path.write_bytes(content)
    found = recognized(path)
    assert found is not None
    assert found.extension == extension


@pytest.mark.parametrize("content", [b"", b"plain text", b"%PDF-1.4", png()])
def test_what_proves_nothing_is_not_guessed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "received"
    path.write_bytes(content)
    assert recognized(path) is None
