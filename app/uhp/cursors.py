"""Cursors of paged listings: opaque, and worth nothing to any other scope.

A cursor is a position in one listing, sealed with a keyed hash over the scope, the listing and
the position. Whatever does not verify, a foreign cursor included, is the same 400.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path

from app.settings import SettingsError
from app.uhp.errors import invalid_input

KEY_BYTES = 32
_SEAL_BYTES = 16
_NUMBER = struct.Struct(">q")
_CURSOR = re.compile(r"[A-Za-z0-9_-]{1,200}")


class Cursors:
    """Seals positions, tuples of 64-bit whole numbers, and opens what it has sealed."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, scope: str, listing: str, position: tuple[int, ...]) -> str:
        """The cursor of `position` in the `listing` (its name and filters) of `scope`."""
        packed = b"".join(_NUMBER.pack(number) for number in position)
        octets = self._mac(scope, listing, packed) + packed
        return urlsafe_b64encode(octets).rstrip(b"=").decode("ascii")

    def open(self, scope: str, listing: str, cursor: str | None) -> tuple[int, ...] | None:
        """The position, None without a cursor. Raises UhpError (`invalid_input`, `cursor`)."""
        if cursor is None:
            return None
        octets = _decoded(cursor)
        seal, packed = octets[:_SEAL_BYTES], octets[_SEAL_BYTES:]
        if not packed or not hmac.compare_digest(seal, self._mac(scope, listing, packed)):
            raise invalid_input("Use the cursor exactly as the listing gave it.", param="cursor")
        return tuple(number for (number,) in _NUMBER.iter_unpack(packed))

    def _mac(self, scope: str, listing: str, packed: bytes) -> bytes:
        parts = (scope.encode("utf-8"), listing.encode("utf-8"), packed)
        sealed = b"".join(_NUMBER.pack(len(part)) + part for part in parts)
        return hmac.new(self._key, sealed, hashlib.sha256).digest()[:_SEAL_BYTES]


def _decoded(cursor: str) -> bytes:
    if _CURSOR.fullmatch(cursor) is None or len(cursor) % 4 == 1:
        return b""
    octets = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    return octets if len(octets) % _NUMBER.size == 0 else b""


def load_key(path: Path) -> bytes:
    """The key of this deployment at `path`, made there on the first start. Blocks.

    Processes that start at once agree on one key: the file appears whole, or not at all. Raises
    SettingsError when it cannot be read or made, or is not a key.
    """
    try:
        if not path.exists():
            _make_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"secret_key_file: cannot be used: {error.strerror}") from None
    if len(key) != KEY_BYTES:
        raise SettingsError(f"secret_key_file: must hold exactly {KEY_BYTES} random bytes")
    return key


def _make_key(path: Path) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(KEY_BYTES))
        os.fsync(descriptor)
        os.link(draft, path)
    except FileExistsError:
        return  # another process was first: its key is the one
    finally:
        os.close(descriptor)
        draft.unlink()
