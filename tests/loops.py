"""The event loops under which a server runs: the one that comes with Python, and uvloop."""

from __future__ import annotations

from typing import Final

import pytest

ON_BOTH_LOOPS: Final = pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})],
    ids=["asyncio", "uvloop"],
)
"""For modules all of whose tests are asynchronous."""
