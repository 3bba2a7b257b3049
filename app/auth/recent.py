"""A bounded memory of what was verified last."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MAX_ENTRIES = 4096
"""Entries of one memory: a few hundred bytes each, so about a megabyte when it is full."""

V = TypeVar("V")


class Recent(Generic[V]):
    """Values by the SHA-256 of a token; the one that was not used for longest goes first.

    What is kept here is no proof of anything: whoever takes a value checks that it still holds.
    """

    def __init__(self, size: int = MAX_ENTRIES) -> None:
        self._size = size
        self._values: OrderedDict[bytes, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, digest: bytes) -> V | None:
        """The value that was put for `digest`, or None."""
        value = self._values.get(digest)
        if value is not None:
            self._values.move_to_end(digest)
        return value

    def put(self, digest: bytes, value: V) -> None:
        """Keep `value`, in the place of an older one."""
        self._values[digest] = value
        self._values.move_to_end(digest)
        if len(self._values) > self._size:
            self._values.popitem(last=False)
