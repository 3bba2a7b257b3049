"""Rows of the result: what was measured, beside what, and whether the goal was reached."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Row:
    """One comparison; every list holds one figure for each run."""

    work: str
    unit: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)

    def add(self, name: str, figure: float) -> None:
        """Note one run's figure."""
        self.figures.setdefault(name, []).append(figure)

    def median(self, name: str) -> float:
        """The median over the runs."""
        return statistics.median(self.figures[name])

    def judge(
        self, text: str, ratio: float, *, least: float | None = None, most: float | None = None
    ) -> None:
        """Compare a ratio with its goal, and say so either way."""
        met = (least is None or ratio >= least) and (most is None or ratio <= most)
        goal = f"at least {least}" if least is not None else f"at most {most}"
        self.verdicts.append(f"{'reached' if met else 'MISSED '}  {text} = {ratio:.2f} ({goal})")

    def show(self) -> str:
        """The row as text."""
        lines = [f"\n{self.work}"]
        for name, values in self.figures.items():
            spread = f"{min(values):,.1f} to {max(values):,.1f}"
            lines.append(f"  {name:<42} {self.median(name):>12,.1f} {self.unit}   ({spread})")
        return "\n".join([*lines, *(f"  {verdict}" for verdict in self.verdicts)])
