"""Which files a preview can be made of, told by what is in them and not only by their name.

A converter makes a page of anything: random bytes called `x.docx` become a document of noise. So
the content must be what the name says, be open (not encrypted), and not unfold into very much
more than it is. Everything here blocks; it runs on a thread.
"""

from __future__ import annotations

import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from app.settings import KIB, MIB

MAX_EXPANDED_BYTES = 512 * MIB
"""What the members of an office document may unfold to; real ones stay far below."""

MAX_MEMBERS = 20_000
MAX_DIRECTORY_BYTES = 4 * MIB
"""The size of a document's zip directory, which is read whole."""

HEAD_BYTES = KIB

_ZIP_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)
"""What `zipfile` and the decompressors behind it raise for bytes that are no sound archive."""

Reason = Literal[
    "unsupported_format",
    "content_mismatch",
    "encrypted",
    "too_complex",
    "too_large",
    "timed_out",
    "over_limit",
    "crashed",
    "no_output",
]


class NotConvertible(Exception):
    """There is no preview of this file; `reason` is for programs, the message for people.

    With `lasting` the same bytes would fail again.
    """

    def __init__(self, reason: Reason, message: str, *, lasting: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Format:
    """One format: the extension that the converter sees, and the import filter to be used.

    Without a filter the converter finds it by the content, which has been checked by then.
    """

    extension: str
    check: Callable[[Path], None]
    input_filter: str | None = None


def format_of(filename: str, media_type: str) -> Format | None:
    """The format that a file claims to have; None when it claims none, or one without previews."""
    suffix = PurePosixPath(filename).suffix.lower()
    essence = media_type.partition(";")[0].strip().lower()
    return _BY_EXTENSION.get(suffix) or _BY_TYPE.get(essence)


def recognized(path: Path) -> Format | None:
    """The format of a file that claims none: only one that its content proves."""
    return next((f for f in _SELF_EVIDENT if _is(f, path)), None)


def _is(candidate: Format, path: Path) -> bool:
    try:
        candidate.check(path)
    except NotConvertible:
        return False
    return True


def looks_like_pdf(head: bytes) -> bool:
    """Whether bytes are the beginning of a PDF."""
    return head.startswith(b"%PDF-")


def _mismatch(expected: str) -> NotConvertible:
    return NotConvertible("content_mismatch", f"The content of this file is not {expected}.")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _begins(expected: str, *patterns: bytes) -> Callable[[Path], None]:
    magic = re.compile(b"|".join(patterns), re.DOTALL)

    def check(path: Path) -> None:
        if magic.match(_head(path)) is None:
            raise _mismatch(expected)

    return check


_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED_STREAM = "EncryptedPackage".encode("utf-16-le")


def _office_xml(folder: str, expected: str) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        if _head(path).startswith(_OLE_MAGIC):
            raise _encrypted_or_legacy(path, expected)
        names = {info.filename for info in _members(path, expected)}
        if "[Content_Types].xml" not in names or not any(n.startswith(folder) for n in names):
            raise _mismatch(expected)

    return check


def _encrypted_or_legacy(path: Path, expected: str) -> NotConvertible:
    if _ENCRYPTED_STREAM in path.read_bytes():
        return _encrypted()
    return _mismatch(expected)


def _encrypted() -> NotConvertible:
    return NotConvertible("encrypted", "This document is protected by a password.")


def _open_document(kind: str, expected: str) -> Callable[[Path], None]:
    media_type = f"application/vnd.oasis.opendocument.{kind}".encode("ascii")

    def check(path: Path) -> None:
        members = {info.filename: info for info in _members(path, expected)}
        if _content(path, members, "mimetype", expected).strip() not in (
            media_type,
            media_type + b"-template",
        ):
            raise _mismatch(expected)
        if b"encryption-data" in _content(path, members, "META-INF/manifest.xml", expected):
            raise _encrypted()

    return check


def _content(path: Path, members: Mapping[str, zipfile.ZipInfo], name: str, expected: str) -> bytes:
    """The first MiB of one member, nothing when it is not there."""
    if name not in members:
        return b""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(members[name]) as member:
            return member.read(MIB)
    except _ZIP_FAULTS:
        raise _mismatch(expected) from None


def _members(path: Path, expected: str) -> list[zipfile.ZipInfo]:
    if not _head(path).startswith(b"PK\x03\x04"):
        raise _mismatch(expected)
    if _directory_bytes(path) > MAX_DIRECTORY_BYTES:
        raise _too_complex()
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except _ZIP_FAULTS:
        raise _mismatch(expected) from None
    if len(members) > MAX_MEMBERS or sum(m.file_size for m in members) > MAX_EXPANDED_BYTES:
        raise _too_complex()
    return members


def _too_complex() -> NotConvertible:
    return NotConvertible("too_complex", "This document unfolds into more than is converted here.")


def _directory_bytes(path: Path) -> int:
    """The size of a zip's directory as its end record tells it; 0 where there is no such record.

    Looked at before `zipfile` is, which would read it whole into memory.
    """
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 64 * KIB - 22, 0))
        tail = file.read()
    end = tail.rfind(b"PK\x05\x06")
    return int.from_bytes(tail[end + 12 : end + 16], "little") if end >= 0 else 0


def _text(path: Path) -> None:
    """Bring a text into UTF-8, the one encoding that the converter is told of."""
    content = path.read_bytes()
    text = _decoded(content)
    if "\0" in text:
        raise _mismatch("text")
    path.write_text(text, encoding="utf-8", newline="")


def _decoded(content: bytes) -> str:
    encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        return content.decode("windows-1252", errors="replace")


_TEXT_FILTER = "Text (encoded):UTF8"
_CSV_FILTER = "CSV:44,34,76,1"

_PDF = Format(".pdf", _begins("a PDF", b"%PDF-"))
_DOCX = Format(".docx", _office_xml("word/", "a Word document"))
_XLSX = Format(".xlsx", _office_xml("xl/", "an Excel workbook"))
_PPTX = Format(".pptx", _office_xml("ppt/", "a PowerPoint presentation"))
_ODT = Format(".odt", _open_document("text", "an OpenDocument text"))
_ODS = Format(".ods", _open_document("spreadsheet", "an OpenDocument spreadsheet"))
_ODP = Format(".odp", _open_document("presentation", "an OpenDocument presentation"))
_RTF = Format(".rtf", _begins("rich text", rb"\{\\rtf"))
_PLAIN = Format(".txt", _text, _TEXT_FILTER)
_CSV = Format(".csv", _text, _CSV_FILTER)


def _legacy(extension: str, expected: str) -> Format:
    return Format(extension, _begins(expected, re.escape(_OLE_MAGIC)))


_FORMATS = (
    (_PDF, (".pdf",), ("application/pdf",)),
    (
        _DOCX,
        (".docx",),
        ("application/vnd.openxmlformats-officedocument.wordprocessingml.document",),
    ),
    (_XLSX, (".xlsx",), ("application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",)),
    (
        _PPTX,
        (".pptx",),
        ("application/vnd.openxmlformats-officedocument.presentationml.presentation",),
    ),
    (_ODT, (".odt", ".ott"), ("application/vnd.oasis.opendocument.text",)),
    (_ODS, (".ods", ".ots"), ("application/vnd.oasis.opendocument.spreadsheet",)),
    (_ODP, (".odp", ".otp"), ("application/vnd.oasis.opendocument.presentation",)),
    (_RTF, (".rtf",), ("application/rtf", "text/rtf")),
    (_legacy(".doc", "a Word document"), (".doc",), ("application/msword",)),
    (_legacy(".xls", "an Excel workbook"), (".xls",), ("application/vnd.ms-excel",)),
    (
        _legacy(".ppt", "a PowerPoint presentation"),
        (".ppt",),
        ("application/vnd.ms-powerpoint",),
    ),
    (_PLAIN, (".txt", ".text", ".log", ".md", ".markdown"), ("text/plain", "text/markdown")),
    (_CSV, (".csv",), ("text/csv",)),
    (Format(".png", _begins("a PNG image", rb"\x89PNG\r\n\x1a\n")), (".png",), ("image/png",)),
    (
        Format(".jpg", _begins("a JPEG image", rb"\xff\xd8\xff")),
        (".jpg", ".jpeg"),
        ("image/jpeg",),
    ),
    (Format(".gif", _begins("a GIF image", rb"GIF8[79]a")), (".gif",), ("image/gif",)),
    (Format(".webp", _begins("a WebP image", rb"RIFF....WEBP")), (".webp",), ("image/webp",)),
    (Format(".bmp", _begins("a BMP image", rb"BM")), (".bmp",), ("image/bmp",)),
    (
        Format(".tiff", _begins("a TIFF image", rb"II\*\0", rb"MM\0\*")),
        (".tif", ".tiff"),
        ("image/tiff",),
    ),
)
_BY_EXTENSION = {extension: f for f, extensions, _ in _FORMATS for extension in extensions}
_BY_TYPE = {media_type: f for f, _, types in _FORMATS for media_type in types}
_SELF_EVIDENT = (_DOCX, _XLSX, _PPTX, _ODT, _ODS, _ODP, _RTF)


def is_pdf(candidate: Format | None) -> bool:
    """Whether a format needs no conversion."""
    return candidate is _PDF
