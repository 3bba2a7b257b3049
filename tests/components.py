"""The real components that some tests need: required in CI, skipped with a reason elsewhere."""

from __future__ import annotations

import os

import pytest

REQUIRED = os.environ.get("REQUIRE_TEST_COMPONENTS") == "1"


def require_component(name: str, *, present: bool, why: str) -> None:
    """Skip the test when `name` is absent; fail instead where every component must be there."""
    if present:
        return
    if REQUIRED:
        pytest.fail(f"{name} is required here but missing: {why}")
    pytest.skip(f"{name} is not here: {why}")
