"""What a run without a fault offers to plant one in: the yields, hooks, slices and steps that its trace shows.

A run with a fault is the clean run up to the moment at which the fault comes into effect. So whether it comes into
effect at all is a question about the clean run, and its answer never depends on what a detector says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from dbo.trace import Record, Trace
from sim.faults.fault import Site


class CleanRun:
    """One clean run, by its trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ranks = range(int(trace.meta["ranks"]))

    @cached_property
    def lines(self) -> dict[tuple[int, int, int], list[Record]]:
        """By (rank, step, ubatch), in order of issue: what a ubatch did and launched in a split step."""
        found: dict[tuple[int, int, int], list[Record]] = defaultdict(list)
        for record in sorted(self.trace.records, key=lambda r: r.id):
            if record.ubatch >= 0:
                found[record.rank, record.step, record.ubatch].append(record)
        return dict(found)

    @cached_property
    def decisions(self) -> list[tuple[int, Record]]:
        """(rank, its `decide` record) of every step."""
        return [(r.rank, r) for r in self.trace.of_kind("decide")]

    @cached_property
    def split_slices(self) -> list[Record]:
        """The `slices` record of every rank and split step."""
        return [r for r in self.trace.of_kind("slices") if len(r.attrs["ubatches"]) > 1]

    @cached_property
    def steps(self) -> int:
        """Steps that every rank coordinated, the last, idle one included."""
        return 1 + max((record.step for _, record in self.decisions), default=-1)

    def yields(self, rank: int, ubatch: int) -> int:
        """How often a ubatch of a rank yielded, over all steps."""
        exits = (r for r in self.trace.of_kind("ubatch.exit") if (r.rank, r.ubatch) == (rank, ubatch))
        return sum(int(r.attrs["yields"]) for r in exits)

    def carried_hooks(self, rank: int, holder: int) -> list[Record]:
        """The `hook.run` records of hooks that another ubatch left with `holder`, in order."""
        runs = (r for r in self.trace.of_kind("hook.run") if r.rank == rank and r.attrs["runner"] == holder)
        return sorted((r for r in runs if r.attrs["owner"] != holder), key=lambda r: r.id)

    def exchanges(self, rank: int) -> list[Record]:
        """The device collectives of a rank, in order of issue."""
        found = (r for r in self.trace.of_kind("collective") if r.rank == rank and r.on_device)
        return sorted(found, key=lambda r: r.id)

    def ubatches(self) -> Iterator[tuple[int, int]]:
        """(rank, ubatch) of every ubatch that ran in some split step."""
        yield from sorted({(rank, ubatch) for rank, _, ubatch in self.lines})


def every_rank(run: CleanRun) -> Iterator[Site]:
    """Any rank."""
    yield from (Site(rank=rank) for rank in run.ranks)


def every_split_rank(run: CleanRun) -> Iterator[Site]:
    """Any rank of a run in which some step is split."""
    yield from (Site(rank=rank) for rank in run.ranks if run.split_slices)


def every_ubatch(run: CleanRun) -> Iterator[Site]:
    """Any ubatch of a split step."""
    yield from (Site(rank=rank, ubatch=ubatch) for rank, ubatch in run.ubatches())


def every_yield(run: CleanRun) -> Iterator[Site]:
    """Any yield of any ubatch."""
    for rank, ubatch in run.ubatches():
        yield from (Site(rank=rank, ubatch=ubatch, at=at) for at in range(run.yields(rank, ubatch)))


def every_hook(run: CleanRun) -> Iterator[Site]:
    """Any hook that a ubatch runs for another one."""
    for rank, ubatch in run.ubatches():
        yield from (Site(rank=rank, ubatch=ubatch, at=at) for at in range(len(run.carried_hooks(rank, ubatch))))
