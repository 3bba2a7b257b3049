#!/usr/bin/env python3
"""A small agent for Consignee's `command` harness: it reports on the files that it is given.

It reads every input file and writes `report.md` (name, size, SHA-256 and number of lines of each)
and `sizes.svg` (a bar chart), telling what it does as JSON lines. Nothing but the standard library
is needed. See README.md beside it for the configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

TASK_FILE_VARIABLE = "CONSIGNEE_TASK_FILE"
BAR_WIDTH = 400
BAR_HEIGHT = 24


def tell(kind: str, **fields: object) -> None:
    """Say one event; flushed, so that the client sees it now."""
    sys.stdout.write(json.dumps({"type": kind, **fields}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Do the task; the exit status says whether that worked."""
    task = json.loads(Path(os.environ[TASK_FILE_VARIABLE]).read_text(encoding="utf-8"))
    prompt = sys.stdin.read()
    if not task["inputs"]:
        tell("text", text="There is no file to report on: attach at least one.\n")
        return 0
    tell("reasoning", text=f"There are {len(task['inputs'])} files to look at. ")
    facts = [look_at(file, str(number)) for number, file in enumerate(task["inputs"], 1)]
    Path("report.md").write_text(report(prompt, facts), encoding="utf-8")
    Path("sizes.svg").write_text(chart(facts), encoding="utf-8")
    tell("text", text=f"I looked at {len(facts)} files, {sum(f['size'] for f in facts)} bytes. ")
    tell("text", text="The report is in report.md, a chart of the sizes in sizes.svg.\n")
    return 0


def look_at(file: dict[str, Any], call_id: str) -> dict[str, Any]:
    """Read one input, in pieces, and tell of it as a tool call."""
    tell("tool_call", call_id=call_id, name="look_at", arguments={"path": file["path"]})
    digest = hashlib.sha256()
    size = lines = 0
    with Path(file["path"]).open("rb") as content:
        while piece := content.read(1024 * 1024):
            digest.update(piece)
            size += len(piece)
            lines += piece.count(b"\n")
    tell("tool_result", call_id=call_id, output=f"{size} bytes, {lines} lines")
    return {
        "name": file["filename"],
        "media_type": file["media_type"],
        "size": size,
        "lines": lines,
        "sha256": digest.hexdigest(),
        "is_whole": digest.hexdigest() == file["sha256"],
    }


def report(prompt: str, facts: list[dict[str, Any]]) -> str:
    """The report, as Markdown."""
    rows = [
        f"| {cell(f['name'])} | {cell(f['media_type'])} | {f['size']} | {f['lines']} "
        f"| `{f['sha256']}` | {'yes' if f['is_whole'] else 'NO'} |"
        for f in facts
    ]
    return "\n".join(
        [
            "# Report",
            "",
            f"Asked: {cell(prompt.strip()) or '(nothing)'}",
            "",
            "| file | type | bytes | lines | SHA-256 | as sent |",
            "|---|---|---:|---:|---|---|",
            *rows,
            "",
            "![Sizes](sizes.svg)",
            "",
        ]
    )


def cell(text: str) -> str:
    """`text` as it may stand in a table of Markdown."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def chart(facts: list[dict[str, Any]]) -> str:
    """A bar for each file, as SVG."""
    largest = max(1, *(f["size"] for f in facts))
    bars = []
    for row, fact in enumerate(facts):
        top = row * BAR_HEIGHT
        width = max(1, BAR_WIDTH * fact["size"] // largest)
        bars.append(f'<rect x="0" y="{top + 2}" width="{width}" height="18" fill="#4a90d9"/>')
        label = escape(f"{fact['name']} ({fact['size']} bytes)")
        bars.append(f'<text x="4" y="{top + 16}" font-size="12">{label}</text>')
    size = f'width="{BAR_WIDTH}" height="{BAR_HEIGHT * len(facts)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(bars)}</svg>\n'


if __name__ == "__main__":
    sys.exit(main())
