"""Which waits a program needs: a wait is essential where, without it, conflicting accesses have no order at all.

Another wait, or the host waiting for counts, often orders the same things. Dropping a wait is then no fault: the mutant is
equivalent to the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from dbo.check.happens import HappensBefore
from dbo.trace import Access, Record, Trace, kinds
from dbo.trace.accesses import any_overlap
from sim.faults.clean_run import CleanRun
from sim.faults.fault import Site


def essential_waits(*points: str) -> Callable[[CleanRun], Iterator[Site]]:
    """Ubatches that need their own waits at `points` ("" is the end of a layer)."""

    def sites(run: CleanRun) -> Iterator[Site]:
        for rank, ubatch in run.ubatches():
            if _is_needed(run.trace, rank, ubatch, points):
                yield Site(rank=rank, ubatch=ubatch)

    return sites


def _is_needed(trace: Trace, rank: int, ubatch: int, points: tuple[str, ...]) -> bool:
    on_device = {record.id for record in trace.records if record.on_device}
    stripped = [
        replace(record, after=tuple(id for id in record.after if id not in on_device))
        if _is_own_wait(record, rank, ubatch) and record.point in points
        else record
        for record in trace.records
    ]
    happens = HappensBefore(Trace(records=stripped))
    uses: dict[int, list[tuple[Record, Access, bool]]] = defaultdict(list)
    for record in stripped:
        if (record.rank, record.ubatch) == (rank, ubatch) and record.on_device:
            for writes, accesses in ((False, record.reads), (True, record.writes)):
                for access in accesses:
                    uses[access.buffer].append((record, access, writes))
    return any(
        a.line != b.line and (a_writes or b_writes) and happens.concurrent(a.id, b.id) and any_overlap([at], [bt])
        for found in uses.values()
        for (a, at, a_writes), (b, bt, b_writes) in combinations(found, 2)
    )


def _is_own_wait(record: Record, rank: int, ubatch: int) -> bool:
    """A wait for one of the ubatch's own two events."""
    mine = record.kind == kinds.WAIT and (record.rank, record.ubatch) == (rank, ubatch)
    return mine and str(record.attrs.get("event", "")).startswith(f"u{ubatch}.")
