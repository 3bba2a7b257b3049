from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.store import ContentStore
from tests.store.stores import new_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ContentStore]:
    opened = await new_store(tmp_path)
    yield opened
    await opened.close()
