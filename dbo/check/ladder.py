"""Steps that fall off the captured sizes, a part of no-overlap: right answers, and every launch paid for again."""

from __future__ import annotations

from typing import Any

from dbo.batch.coordinate import NUM_ROWS, ROW_QUERY_LEN, ROW_REAL, ROW_WANTS_FULL
from dbo.check.violation import Findings
from dbo.trace import Trace, kinds

READS = (kinds.DECIDE,)
"""Kinds of records that this module looks at, for the detectors that use it."""


def judge_ladder(trace: Trace, found: Findings) -> None:
    """A step that every busy rank wants as a graph of one query length runs as one."""
    told: set[int] = set()
    for record in trace.of_kind(kinds.DECIDE):
        table, decision = record.attrs.get("table", ()), record.attrs.get("decision", {})
        if len(table) != NUM_ROWS or record.step in told or not _wanted(table):
            continue
        found.checked += 1
        if decision.get("cudagraph_mode") != "FULL":
            told.add(record.step)
            found.violate(
                f"step {record.step} of {max(table[ROW_REAL])} tokens runs without a graph although every rank wants "
                f"one: no captured size is large enough",
                record,
                rank=table[ROW_REAL].index(max(table[ROW_REAL])),
            )


def _wanted(table: list[list[Any]]) -> bool:
    busy = [rank for rank, real in enumerate(table[ROW_REAL]) if real > 0]
    lengths = {table[ROW_QUERY_LEN][rank] for rank in busy}
    return bool(busy) and len(lengths) == 1 and 0 not in lengths and all(table[ROW_WANTS_FULL][r] for r in busy)
