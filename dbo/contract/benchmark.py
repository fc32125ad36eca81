"""What a world offers to `dbo bench`: a function that gives one number, its unit, and the bound that it should keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on the median.

    Attributes:
        bound: in the benchmark's unit.
        at_least: whether more is better; else the bound must not be passed.
    """

    bound: float
    at_least: bool = False

    def reached(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One row of the table.

    Attributes:
        name: what `--only` takes.
        what: a few words.
        unit: of the numbers.
        sample: measures once.
        target: None: told for its own sake.
        most: repeat it no more often than this, since one sample takes long.
        note: what a reader should know about the figure.
    """

    name: str
    what: str
    unit: str
    sample: Callable[[], float]
    target: Target | None = None
    most: int = 100
    note: str = ""
