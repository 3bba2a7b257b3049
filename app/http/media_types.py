"""Media types: which ones are accepted, and which one a file's name stands for.

The table is our own beside Python's: a type must not depend on the machine's mime.types. A name
that says "compressed" gives the type of the compressed bytes, `x.csv.gz` is never text/csv: no
encoding is ever taken apart from the type, since files are served as they are (B50).
"""

from __future__ import annotations

import mimetypes
import re

from app.errors import Malformed
from app.http.parameters import TCHARS

MAX_BYTES = 255
"""Longest media type that is kept, in bytes; RFC 6838 section 4.2 bounds type and subtype by 127
each."""

OCTET_STREAM = "application/octet-stream"

_QUOTED = r'"(?:[^"\\\x00-\x08\x0a-\x1f\x7f-\U0010ffff]|\\[\x20-\x7e])*"'
_MEDIA_TYPE = re.compile(
    rf"(?P<type>{TCHARS}/{TCHARS})"
    rf"(?P<parameters>(?:[ \t]*;[ \t]*{TCHARS}=(?:{TCHARS}|{_QUOTED}))*)"
    r"[ \t]*;?[ \t]*"
)

_OWN = {
    ".7z": "application/x-7z-compressed",
    ".avif": "image/avif",
    ".br": OCTET_STREAM,
    ".bz2": "application/x-bzip2",
    ".c": "text/plain",
    ".csv": "text/csv",
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".epub": "application/epub+zip",
    ".flac": "audio/flac",
    ".go": "text/plain",
    ".gz": "application/gzip",
    ".h": "text/plain",
    ".htm": "text/html",
    ".html": "text/html",
    ".ipynb": "application/x-ipynb+json",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".js": "text/javascript",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".log": "text/plain",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".odp": "application/vnd.oasis.opendocument.presentation",
    ".ods": "application/vnd.oasis.opendocument.spreadsheet",
    ".odt": "application/vnd.oasis.opendocument.text",
    ".parquet": "application/vnd.apache.parquet",
    ".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ".py": "text/x-python",
    ".rar": "application/vnd.rar",
    ".rs": "text/plain",
    ".rtf": "application/rtf",
    ".sh": "application/x-sh",
    ".sql": "application/sql",
    ".svgz": "application/gzip",
    ".tar": "application/x-tar",
    ".tgz": "application/gzip",
    ".toml": "application/toml",
    ".ts": "text/plain",
    ".tsx": "text/plain",
    ".txt": "text/plain",
    ".wasm": "application/wasm",
    ".webm": "video/webm",
    ".webp": "image/webp",
    ".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    ".xml": "application/xml",
    ".xz": "application/x-xz",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".z": "application/x-compress",
    ".zip": "application/zip",
    ".zst": "application/zstd",
}
_TYPES = {**mimetypes.MimeTypes().types_map[1], **_OWN}


def accept(value: str, *, param: str) -> str:
    """A declared media type as it is kept: type and subtype in lower case, parameters as given.

    Raises Malformed, which names `param`, for anything that is not one media type by the grammar
    of RFC 9110 section 8.3.1 within MAX_BYTES: what is kept goes into a header later (B56).
    """
    match = _MEDIA_TYPE.fullmatch(value) if len(value) <= MAX_BYTES else None
    if match is None:
        raise Malformed(
            "malformed_media_type",
            f"A media type is like text/plain, of at most {MAX_BYTES} bytes.",
            param=param,
        )
    return match["type"].lower() + match["parameters"]


def guess(name: str) -> str:
    """The media type of a file called `name`, by its extension alone."""
    stem, dot, extension = name.rpartition(".")
    if not dot or not stem.rpartition("/")[2]:
        return OCTET_STREAM
    return _TYPES.get("." + extension.lower(), OCTET_STREAM)
