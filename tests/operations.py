"""The tables of the README's operation part that stand between two marks."""

from __future__ import annotations

import re

from tests.reference import README


def table(name: str) -> set[str]:
    """The names in the first column of a table."""
    text = README.read_text(encoding="utf-8")
    block = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert block is not None, f"the README has no table {name}"
    rows = re.findall(r"^\| (`[^|]*) \|", block[1], re.MULTILINE)
    return set(re.findall(r"`([A-Za-z0-9_.]+)[`{]", " ".join(rows)))
