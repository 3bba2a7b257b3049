"""`UHP-Version`: what is served, what is refused, what is said."""

from __future__ import annotations

import pytest

from app.uhp.errors import UhpError
from app.uhp.versions import DEFAULT_VERSION, HEADER, VERSIONS, negotiate


def test_a_served_version_is_honoured() -> None:
    assert VERSIONS == ("2026-08-11", "2026-09-12")
    for version in VERSIONS:
        assert negotiate([(b"host", b"x"), (HEADER, version.encode())]) == version
    assert negotiate([(HEADER, b" 2026-08-11 ")]) == "2026-08-11"


def test_without_the_header_the_server_chooses() -> None:
    assert negotiate([]) == DEFAULT_VERSION == "2026-09-12"


@pytest.mark.requirement("B19")
@pytest.mark.parametrize(
    "values",
    [
        [b"1999-01-01"],
        [b"x"],
        [b""],
        [b"2026-08-11, 2026-09-12"],
        [b"2026-08-11", b"2026-08-11"],
        [b"2026-08-11", b"1999-01-01"],
        [b"\xff"],
    ],
)
def test_anything_else_is_refused_with_what_is_served(values: list[bytes]) -> None:
    with pytest.raises(UhpError) as caught:
        negotiate([(HEADER, value) for value in values])
    assert (caught.value.status, caught.value.code) == (400, "unsupported_protocol_version")
    assert caught.value.detail == {"supported": list(VERSIONS)}
