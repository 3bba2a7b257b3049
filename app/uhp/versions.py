"""`UHP-Version`: which version of the protocol a request is served in (Lifecycle section 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.uhp.errors import UhpError

if TYPE_CHECKING:
    from collections.abc import Iterable

HEADER = b"uhp-version"
VERSIONS = ("2026-08-11", "2026-09-12")
"""Served versions, oldest first; the newer one only adds to the older, so one code serves both."""

DEFAULT_VERSION = VERSIONS[-1]
"""What a request without the header gets, as its answer says: the server's choice is the newest."""


def negotiate(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The version that a request with these ASGI `headers` is served in.

    Raises UhpError (`unsupported_protocol_version`) for a version that is not served, and for
    several headers: a client that names two versions cannot be given both.
    """
    named = [value for name, value in headers if name == HEADER]
    if not named:
        return DEFAULT_VERSION
    version = named[0].decode("latin-1").strip(" \t")
    if len(named) > 1 or version not in VERSIONS:
        raise UhpError(
            "unsupported_protocol_version",
            f"Send one UHP-Version header with a served version: {', '.join(VERSIONS)}.",
            param="UHP-Version",
            detail={"supported": list(VERSIONS)},
        )
    return version
