"""Work in the background that must go on, whatever goes wrong in one round of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import Refusal

log = logging.getLogger("consignee.tasks")


@contextmanager
def reported(trouble: str) -> Iterator[None]:
    """Report what goes wrong in the block, which is done again later."""
    try:
        yield
    except Refusal as refusal:
        log.warning("%s: %s", trouble, refusal.code)
    except Exception:
        log.exception(trouble)
