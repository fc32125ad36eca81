"""The compiled form of a schedule: the device program of one rank, recorded once, replayed for any number of ranks.

    program = compile_schedule(load_schedule("mlp_shared_overlap"), backend="deepep_low_latency", layers=58)
    run = program.replay(ranks=1024)
    run.races, run.makespan_us, run.trace()

In a run without a fault all ranks issue the same operations in the same order, so one rank's program says everything. It is
what the real wrapper, ring, player, kernel and backend issue in a run of two ranks: `sim.compiled.recording` reads it from
that run's trace. Nothing here knows what a point launches or waits for. That more ranks do what the program says of them is
tests/sim/test_compiled.py, for every preset and backend.

Edges lead from an operation to later ones in order of issue, and every meeting has all ranks at the same call: so a
compiled schedule cannot deadlock. Whether it races is `sim.compiled.race`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dbo.schedule import Schedule, validate
from dbo.trace import Access
from sim.cost import CostTable

if TYPE_CHECKING:
    from sim.compiled.cells import Cell
    from sim.compiled.run import CompiledRun

RECORDED_RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOp:
    """One operation of one rank; or its host's wait for one, on line "main".

    Attributes:
        line, kind, name, point, ubatch, layer, dur_us: as in a trace record.
        after: operations of the same rank that it waits for, by their place in the program; the one before it on its
            line is not listed.
        joins, follows: the meeting that it is a member of, or starts after; -1: none.
        reads, writes: what it touches; the buffer of each access is a place in the program's arrays.
        to_peers: it stands for one operation to each other rank, one after the other.
        attrs: of its record, as far as they do not depend on the number of ranks.
    """

    line: str
    kind: str
    name: str
    point: str = ""
    ubatch: int
    layer: int
    dur_us: float = 0.0
    after: tuple[int, ...] = ()
    joins: int = -1
    follows: int = -1
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    to_peers: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """What an operation touches.

    Attributes:
        window: ranks write it on each other, each rank its own region: on every rank ("all") or on every other ("peers").
            Its owner reads the regions that are written. "": it is the rank's own.
    """

    name: str
    nbytes: int
    window: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """All ranks' same call.

    Attributes:
        of_others: what follows it waits for the members of all other ranks, and not for its own rank's.
    """

    group: str
    index: int
    of_others: bool = False


@dataclass(frozen=True, kw_only=True)
class CompiledSchedule:
    """One rank's device program; its operations are in order of issue."""

    schedule: str
    backend: str
    num_ubatches: int
    layers: int
    ops: tuple[DeviceOp, ...]
    arrays: tuple[Array, ...]
    meetings: tuple[Meeting, ...]

    @cached_property
    def before_on_line(self) -> tuple[int, ...]:
        """For each operation the one before it on its line, or -1."""
        tails: dict[str, int] = {}
        found = []
        for index, op in enumerate(self.ops):
            found.append(tails.get(op.line, -1))
            tails[op.line] = index
        return tuple(found)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """For each meeting the operation with which every rank joins it."""
        found = {op.joins: index for index, op in enumerate(self.ops) if op.joins >= 0}
        return tuple(found[meeting] for meeting in range(len(self.meetings)))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Parts of arrays that operations touch whole."""
        from sim.compiled.cells import cells_of

        return tuple(cells_of(self))

    def replay(self, ranks: int, *, slowdown: Sequence[float] | None = None) -> CompiledRun:
        """Run it on `ranks` ranks; see `sim.compiled.run`."""
        from sim.compiled.run import replay

        return replay(self, ranks, slowdown=slowdown)


def compile_schedule(
    schedule: Schedule, *, backend: str, num_ubatches: int = 2, layers: int = 1, cost: CostTable | None = None
) -> CompiledSchedule:
    """The device program of one rank for a split step of `layers` MoE layers.

    Args:
        cost: durations. Compute takes no longer beside exchanges, and hosts take no time: see `sim.compiled.run`.

    Raises:
        ScheduleError: the schedule is not for this backend, or its ring does not play; see `dbo.schedule.validate`.
    """
    from dbo.job.layer import LayerJob, layer_program
    from sim.compiled.recording import Recording
    from sim.world import launch

    validate(schedule, backend=backend, num_ubatches=num_ubatches)
    job = LayerJob(
        schedule=schedule,
        backend=backend,
        ranks=RECORDED_RANKS,
        layers=layers,
        num_ubatches=num_ubatches,
        tokens=max(LayerJob.tokens, num_ubatches),
    )
    run = launch(layer_program(job), ranks=RECORDED_RANKS, mode="ordering", cost=devices_only(cost or CostTable()))
    for error in run.errors:
        if error is not None:
            raise error
    recording = Recording(run.trace)
    return CompiledSchedule(
        schedule=schedule.name,
        backend=backend,
        num_ubatches=num_ubatches,
        layers=layers,
        ops=tuple(recording.ops),
        arrays=tuple(recording.arrays),
        meetings=tuple(recording.meetings),
    )


def devices_only(cost: CostTable) -> CostTable:
    """The same machine with hosts that take no time, and compute that takes no longer beside exchanges."""
    return replace(cost, contention=False, host_launch_us=0.0, host_switch_us=0.0)
