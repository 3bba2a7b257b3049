"""Small documents of many formats, made by hand: what a preview is made of."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping

OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"

_TYPES = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels"'
    ' ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/{part}" ContentType="{type}"/></Types>'
)
_RELATIONS = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="r1" Target="{part}" Type="http://schemas.openxmlformats.org'
    '/officeDocument/2006/relationships/officeDocument"/></Relationships>'
)
_WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"


def zipped(members: Mapping[str, str | bytes]) -> bytes:
    """A zip archive of `members`."""
    octets = io.BytesIO()
    with zipfile.ZipFile(octets, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return octets.getvalue()


def docx(text: str = "Hello") -> bytes:
    """A Word document with one paragraph."""
    part = "word/document.xml"
    body = (
        '<?xml version="1.0" encoding="UTF-8"?><w:document xmlns:w='
        '"http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
        f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:body></w:document>"
    )
    return zipped(
        {
            "[Content_Types].xml": _TYPES.format(part=part, type=_WORD),
            "_rels/.rels": _RELATIONS.format(part=part),
            part: body,
        }
    )


def odt(body: str = "<text:p>Hello</text:p>", *, manifest: str = "") -> bytes:
    """An OpenDocument text with `body`."""
    media_type = "application/vnd.oasis.opendocument.text"
    names = "urn:oasis:names:tc:opendocument:xmlns"
    content = (
        f'<?xml version="1.0" encoding="UTF-8"?><office:document-content'
        f' xmlns:office="{names}:office:1.0" xmlns:text="{names}:text:1.0"'
        f' xmlns:draw="{names}:drawing:1.0" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' xmlns:svg="{names}:svg-compatible:1.0" office:version="1.2">'
        f"<office:body><office:text>{body}</office:text></office:body>"
        f"</office:document-content>"
    )
    listed = (
        f'<?xml version="1.0" encoding="UTF-8"?><manifest:manifest'
        f' xmlns:manifest="{names}:manifest:1.0" manifest:version="1.2">'
        f'<manifest:file-entry manifest:full-path="/" manifest:media-type="{media_type}"/>'
        f'<manifest:file-entry manifest:full-path="content.xml" manifest:media-type="text/xml">'
        f"{manifest}</manifest:file-entry></manifest:manifest>"
    )
    return zipped({"mimetype": media_type, "content.xml": content, "META-INF/manifest.xml": listed})


def encrypted_docx() -> bytes:
    """What an office suite writes when a password is set: no zip, but a container of streams."""
    return OLE_MAGIC + bytes(504) + "EncryptedPackage".encode("utf-16-le") + bytes(1000)


def png() -> bytes:
    """A red square."""
    rows = b"".join(b"\0" + b"\xff\0\0" * 8 for _ in range(8))
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PDF = b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\ntrailer\n<<>>\n%%EOF\n"
"""As much of a PDF as is looked at."""
