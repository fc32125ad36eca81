"""The compiled form of a schedule: the device program of one rank, built once, replayed for any number of ranks.

    program = compile_schedule(load_schedule("mlp_shared_overlap"), backend="deepep_low_latency", layers=58)
    run = program.replay(ranks=1024)
    run.races, run.makespan_us, run.trace()

In a run without a fault all ranks issue the same operations in the same order, so one rank's program says everything.
`dbo.schedule.run_ring` gives the order of the points, the rules of `dbo.ubatching.player` give the events between the streams,
`sim.compiled.footprint` gives what each point launches. No host task runs. That the result is what the real ring, player and
kernel do is tests/sim/test_compiled.py: the same records, lines, arrays and edges, for every preset.

Edges lead from an operation to later ones in order of issue, and every meeting has all ranks at the same call: so a
compiled schedule cannot deadlock. Whether it races is `sim.compiled.race`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dbo.errors import NotAvailable
from dbo.schedule import HOOK_BACKENDS, Schedule
from dbo.schedule.model import OPTIONAL_POINTS
from dbo.schedule.ring import RingRun, Step, run_ring
from dbo.trace import kinds
from sim.compiled.footprint import BEGIN, END, EXCHANGES, LAYER_END, POINTS, FootprintLaunch

if TYPE_CHECKING:
    from sim.compiled.run import CompiledRun
    from sim.cost import CostTable

RESULTS = ("S", "C.recv", "copy")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOp:
    """One operation of one rank.

    Attributes:
        line, kind, name, point, ubatch, layer: as in a trace record.
        after: operations of the same rank that it waits for, by their place in the program; the one before it on its
            line is not listed.
        joins, follows: the meeting of all ranks that it is a member of, or starts after; -1: none.
        reads, writes: arrays of the rank.
    """

    line: str
    kind: str
    name: str
    point: str = ""
    ubatch: int
    layer: int
    after: tuple[int, ...] = ()
    joins: int = -1
    follows: int = -1
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompiledSchedule:
    """One rank's device program.

    Attributes:
        ops: in order of issue.
        arrays: their names; an operation names an array by its place here.
        windows: arrays that all ranks write on every rank, each in its own region.
        meetings: the group of each meeting, and its index there.
    """

    schedule: str
    backend: str
    num_ubatches: int
    layers: int
    ops: tuple[DeviceOp, ...]
    arrays: tuple[str, ...]
    windows: frozenset[int]
    meetings: tuple[tuple[str, int], ...]

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

    def replay(
        self, ranks: int, *, cost: CostTable | None = None, slowdown: Sequence[float] | None = None, nbytes: int = 0
    ) -> CompiledRun:
        """Run it on `ranks` ranks; see `sim.compiled.run`."""
        from sim.compiled.run import replay

        return replay(self, ranks, cost=cost, slowdown=slowdown, nbytes=nbytes)


def compile_schedule(schedule: Schedule, *, backend: str, num_ubatches: int = 2, layers: int = 1) -> CompiledSchedule:
    """The device program of one rank for a split step of `layers` MoE layers.

    Raises:
        ScheduleError: the schedule is not for this backend, or its ring does not play; see `dbo.schedule.validate`.
        NotAvailable: a backend whose operations `sim.compiled.footprint` does not list.
    """
    if backend not in EXCHANGES:
        known = ", ".join(EXCHANGES)
        rule = "the compiled form knows what the points of a backend launch"
        raise NotAvailable.of(rule, fix=f"use {known}, or run the real ring", backend=backend)
    ring = run_ring(schedule, backend=backend, num_ubatches=num_ubatches, layers=layers)
    compiler = _Compiler(schedule, backend)
    for part in _issue_order(ring):
        if isinstance(part, Step):
            compiler.step(part)
        else:
            compiler.layer_end(*part, last=part[1] == layers - 1)
    return CompiledSchedule(
        schedule=schedule.name,
        backend=backend,
        num_ubatches=num_ubatches,
        layers=layers,
        ops=tuple(compiler.ops),
        arrays=tuple(compiler.arrays),
        windows=frozenset(compiler.windows.values()),
        meetings=tuple(compiler.meetings),
    )


def _issue_order(ring: RingRun) -> Iterable[Step | tuple[int, int]]:
    """The steps, and between them (ubatch, layer) where a ubatch leaves a layer."""
    ends = iter(ring.layer_ends.items())
    end = next(ends, None)
    for position, step in enumerate(ring.steps):
        while end is not None and end[1] <= position:
            yield end[0]
            end = next(ends, None)
        yield step
    while end is not None:
        yield end[0]
        end = next(ends, None)


class _Compiler:
    """Streams, events and meetings of one rank while its operations are issued."""

    def __init__(self, schedule: Schedule, backend: str) -> None:
        program = schedule.program(backend)
        self.hooks = backend in HOOK_BACKENDS
        self.launches = {**POINTS, **EXCHANGES[backend]}
        self.needs = {p.name: program.waits_for(p.name) if p.name != "A0" else () for p in program.points}
        self.recorded = {producer for needs in self.needs.values() for producer in needs}
        self.recorded |= {p.name for p in program.points if p.name in RESULTS and p.stream != "compute"}
        self.ops: list[DeviceOp] = []
        self.arrays: list[str] = []
        self.windows: dict[int, int] = {}
        self.meetings: list[tuple[str, int]] = []
        self.calls = 0
        self.members = 0
        self.current: dict[tuple[int, str], int] = {}
        self.done: dict[tuple[int, str], str] = {}
        self.markers: dict[str, int] = {}
        self.sent: dict[tuple[int, str], int] = {}

    def step(self, step: Step) -> None:
        """A point: waits, operations, and the event behind them."""
        where = (step.point, step.ubatch, step.layer)
        hooked = self.hooks and step.point.endswith("recv")  # launched by the peer, outside the owner's own points
        if not hooked:
            for producer in self.needs[step.point]:
                self._wait(step.stream, self.done.pop((step.ubatch, producer)), where)
        if step.point not in OPTIONAL_POINTS or step.point in self.launches:
            for launch in self.launches[step.point]:
                self._launch(launch, step.stream, where)
        if not hooked and step.point in self.recorded:
            event = f"u{step.ubatch}.{step.stream}_done"
            self.markers[event] = self._add(step.stream, "record", event, where)
            self.done[step.ubatch, step.point] = event

    def layer_end(self, ubatch: int, layer: int, *, last: bool) -> None:
        """What the model does between two layers; layer -1 is what comes before the first."""
        where = ("", ubatch, layer)
        for point in RESULTS if layer >= 0 else ():
            if (ubatch, point) in self.done:
                self._wait("compute", self.done.pop((ubatch, point)), where)
        for launch in (LAYER_END if layer >= 0 else BEGIN) + (END if last else ()):
            self._launch(launch, "compute", where)

    def _launch(self, launch: FootprintLaunch, stream: str, where: tuple[str, int, int]) -> None:
        _, ubatch, layer = where
        reads = tuple(self._read(name, ubatch, layer) for name in launch.reads)
        if launch.kind == kinds.SEND:
            window = self._window(self.calls % 2)
            sent = self._add(stream, "send", f"{launch.name}.send", where, reads=reads)
            meeting = self._meeting("low_latency", self.calls)
            self._add(
                "net", "transfer", f"{launch.name}.transfer", where, after=(sent,), joins=meeting, writes=(window,)
            )
            self.sent[ubatch, launch.name] = meeting
            self.calls += 1
            return
        follows = -1
        kind, name = launch.kind, launch.name
        if launch.kind == kinds.RECV:
            follows = self.sent.pop((ubatch, launch.name))
            reads = (self._window(self.meetings[follows][1] % 2),)
            name = f"{launch.name}.recv"
        elif launch.kind == kinds.COLLECTIVE:
            follows = self._meeting("ep", self.members)
            self.members += 1
            self._add(stream, "collective", launch.name, where, joins=follows)
            kind = "exchange"
        writes = tuple(self._write(name, ubatch, layer) for name in launch.writes)
        self._add(stream, kind, name, where, follows=follows, reads=reads, writes=writes)

    def _wait(self, stream: str, event: str, where: tuple[str, int, int]) -> None:
        self._add(stream, "wait", event, where, after=(self.markers[event],))

    def _add(
        self,
        line: str,
        kind: str,
        name: str,
        where: tuple[str, int, int],
        *,
        after: tuple[int, ...] = (),
        joins: int = -1,
        follows: int = -1,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
    ) -> int:
        point, ubatch, layer = where
        self.ops.append(
            DeviceOp(
                line=line,
                kind=kind,
                name=name,
                point=point,
                ubatch=ubatch,
                layer=layer,
                after=after,
                joins=joins,
                follows=follows,
                reads=reads,
                writes=writes,
            )
        )
        return len(self.ops) - 1

    def _meeting(self, group: str, index: int) -> int:
        self.meetings.append((group, index))
        return len(self.meetings) - 1

    def _window(self, half: int) -> int:
        if half not in self.windows:
            self.windows[half] = self._new(f"window{half}")
        return self.windows[half]

    def _read(self, name: str, ubatch: int, layer: int) -> int:
        key = _key(name, ubatch, layer)
        if key not in self.current:  # an input of the step
            self.current[key] = self._new(name)
        return self.current[key]

    def _write(self, name: str, ubatch: int, layer: int) -> int:
        if name == "cache":  # in place
            return self._read(name, ubatch, layer)
        self.current[ubatch, name] = self._new(f"u{ubatch}.{name}.{layer}")
        return self.current[ubatch, name]

    def _new(self, name: str) -> int:
        self.arrays.append(name)
        return len(self.arrays) - 1


def _key(name: str, ubatch: int, layer: int) -> tuple[int, str]:
    """Where the current array of a name is kept: inputs and caches are shared by the ubatches."""
    if name == "cache":
        return -1, f"cache.{layer}"
    return (-1 if name in ("input_ids", "positions") else ubatch), name
