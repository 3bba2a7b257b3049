"""The bounded memory of what was verified last."""

from __future__ import annotations

from app.auth.recent import Recent


def test_what_was_put_is_found() -> None:
    memory: Recent[int] = Recent()
    memory.put(b"a", 1)
    memory.put(b"a", 2)
    assert memory.get(b"a") == 2
    assert memory.get(b"b") is None
    assert len(memory) == 1


def test_the_one_that_was_not_used_for_longest_goes() -> None:
    memory: Recent[int] = Recent(size=2)
    memory.put(b"a", 1)
    memory.put(b"b", 2)
    memory.get(b"a")
    memory.put(b"c", 3)
    assert [memory.get(name) for name in (b"a", b"b", b"c")] == [1, None, 3]
