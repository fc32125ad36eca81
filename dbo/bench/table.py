"""Results of benchmarks as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dbo.bench.timing import BenchResult

_HEADER = ("benchmark", "median", "spread", "target", "", "what")
_WORDS = {True: "reached", False: "MISSED", None: ""}


def table(results: Sequence[BenchResult]) -> str:
    """One line a benchmark: median, least and largest sample, target, whether it is reached; then the notes."""
    rows = [_HEADER, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"{result.benchmark.name}: {result.benchmark.note}" for result in results if result.benchmark.note]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def to_json(results: Sequence[BenchResult]) -> list[dict[str, Any]]:
    """One object a benchmark."""
    return [
        {
            "name": result.benchmark.name,
            "what": result.benchmark.what,
            "unit": result.benchmark.unit,
            "median": result.median,
            "min": result.spread[0],
            "max": result.spread[1],
            "samples": list(result.samples),
            "target": None if result.benchmark.target is None else str(result.benchmark.target),
            "reached": result.reached,
            "note": result.benchmark.note,
        }
        for result in results
    ]


def _row(result: BenchResult) -> tuple[str, ...]:
    benchmark = result.benchmark
    low, high = result.spread
    target = "" if benchmark.target is None else f"{benchmark.target} {benchmark.unit}"
    spread = f"{_figure(low)} … {_figure(high)}"
    median = f"{_figure(result.median)} {benchmark.unit}"
    return benchmark.name, median, spread, target, _WORDS[result.reached], benchmark.what


def _figure(value: float) -> str:
    """Three significant digits, and never an exponent."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    digits = 2 if value >= 1 else 4
    return f"{value:.{digits}f}" if value < 10 else f"{value:.1f}"
