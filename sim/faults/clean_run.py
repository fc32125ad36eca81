"""What a run without a fault offers to plant one in: the yields, hooks, slices and steps that its trace shows.

A run with a fault is the clean run up to the moment at which the fault comes into effect. So whether it comes into
effect at all is a question about the clean run, and its answer never depends on what a detector says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property

from dbo.trace import Record, Trace, kinds
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
        return [(r.rank, r) for r in self.trace.of_kind(kinds.DECIDE)]

    @cached_property
    def split_slices(self) -> list[Record]:
        """The `slices` record of every rank and split step; what is captured has them too, and nobody decided it."""
        return [r for r in self.trace.of_kind(kinds.SLICES) if len(r.attrs["ubatches"]) > 1 and r.step >= 0]

    @cached_property
    def steps(self) -> int:
        """Steps that every rank coordinated, the last, idle one included."""
        return 1 + max((record.step for _, record in self.decisions), default=-1)

    @cached_property
    def replayed(self) -> frozenset[tuple[int, int]]:
        """(rank, step) of the steps that ran from a graph: they launch what was captured, and no thread runs."""
        return frozenset((r.rank, r.step) for r in self.trace.of_kind(kinds.REPLAY))

    @cached_property
    def eager_lines(self) -> dict[tuple[int, int, int], list[Record]]:
        """As `lines`, of the steps whose ubatches ran themselves: neither from a graph nor for a capture."""
        return {key: line for key, line in self.lines.items() if key[1] >= 0 and key[:2] not in self.replayed}

    @cached_property
    def captures_ubatches(self) -> bool:
        """Some graph of a split step was captured; what a capture forbids ends the run there."""
        return any(record.step < 0 for record in self.trace.of_kind(kinds.UBATCH_ENTER))

    def yields(self, rank: int, ubatch: int) -> int:
        """How often a ubatch of a rank yielded, over all steps and captures."""
        return sum(int(r.attrs["yields"]) for r in self._exits(rank, ubatch))

    def yields_in_captures(self, rank: int, ubatch: int) -> int:
        """How many of them were in the capture phase, so before all others."""
        return sum(int(r.attrs["yields"]) for r in self._exits(rank, ubatch) if r.step < 0)

    def _exits(self, rank: int, ubatch: int) -> list[Record]:
        return [r for r in self.trace.of_kind(kinds.UBATCH_EXIT) if (r.rank, r.ubatch) == (rank, ubatch)]

    def carried_hooks(self, rank: int, holder: int) -> list[Record]:
        """The `hook.run` records of hooks that another ubatch left with `holder`, in order, in captures too."""
        runs = (r for r in self.trace.of_kind(kinds.HOOK_RUN) if r.rank == rank and r.attrs["runner"] == holder)
        return sorted((r for r in runs if r.attrs["owner"] != holder), key=lambda r: r.id)

    def exchanges(self, rank: int, group: str = "ep") -> list[Record]:
        """The device collectives that a rank itself launches in its group of this kind, in order; replays do not count."""
        found = (r for r in self.trace.of_kind(kinds.COLLECTIVE) if r.rank == rank and r.on_device)
        mine = (r for r in found if r.attrs["group"].startswith(group) and (rank, r.step) not in self.replayed)
        return sorted(mine, key=lambda r: r.id)

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
    """Any yield of any ubatch in a step."""
    for rank, ubatch in run.ubatches():
        places = range(run.yields_in_captures(rank, ubatch), run.yields(rank, ubatch))
        yield from (Site(rank=rank, ubatch=ubatch, at=at) for at in places)


def every_hook(run: CleanRun) -> Iterator[Site]:
    """Any hook that a ubatch runs for another one in a step."""
    for rank, ubatch in run.ubatches():
        hooks = enumerate(run.carried_hooks(rank, ubatch))
        yield from (Site(rank=rank, ubatch=ubatch, at=at) for at, hook in hooks if hook.step >= 0)


def outside_captures(sites: Callable[[CleanRun], Iterator[Site]]) -> Callable[[CleanRun], Iterator[Site]]:
    """The sites of runs that capture no split step: a capture refuses what these faults leave unjoined."""
    return lambda run: iter(()) if run.captures_ubatches else sites(run)
