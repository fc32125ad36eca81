"""Schedules as values: the points of a layer, the program of one ubatch, and the schedule that carries it.

A **program** is what one ubatch does in one MoE layer, in order: points, yields, hooks. A **schedule** is a program for
each backend it is for, plus the offset between the ubatches. Nothing here runs anything: `dbo.schedule.ring` plays the
programs of all ubatches against each other, `dbo.schedule.validate` refuses those that would hang, race or lose data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from dbo.errors import ScheduleError

REQUIRED_POINTS = ("A0", "A1", "D.send", "D.recv", "MLP", "C.send", "C.recv", "S")
OPTIONAL_POINTS = ("copy",)
POINTS = REQUIRED_POINTS + OPTIONAL_POINTS
STREAMS = ("compute", "comm")

# What must have been issued before a point of the same ubatch and layer. "copy" fills the layer's output buffer.
PRODUCERS: Mapping[str, str] = MappingProxyType(
    {
        "A1": "A0",
        "D.send": "A1",
        "D.recv": "D.send",
        "MLP": "D.recv",
        "C.send": "MLP",
        "C.recv": "C.send",
        "S": "A1",
        "copy": "C.recv",
    }
)
RECV_OF: Mapping[str, str] = MappingProxyType({"D.send": "D.recv", "C.send": "C.recv"})

BACKENDS = ("deepep_low_latency", "deepep_high_throughput", "deepep_v2", "nccl", "symm_copy")
# Backends whose receive is a hook that the *peer* runs, on the compute stream; the others exchange on the comm stream.
HOOK_BACKENDS = frozenset({"deepep_low_latency"})


@dataclass(frozen=True)
class Point:
    """A piece of a layer and the stream ("compute" or "comm") that is current while it is issued."""

    name: str
    stream: str = "compute"


@dataclass(frozen=True)
class Yield:
    """Hand the baton to the next ubatch."""


@dataclass(frozen=True)
class RunRecvHook:
    """Run the receive hook that a peer left with this ubatch, if there is one. Nothing where the backend has none."""


Item = Point | Yield | RunRecvHook


@dataclass(frozen=True, kw_only=True)
class LayerProgram:
    """One ubatch's layer.

    Attributes:
        items: what happens, in order.
        backends: the backends it is for; empty means those of the schedule that no other program names.
    """

    items: tuple[Item, ...]
    backends: tuple[str, ...] = ()

    @cached_property
    def points(self) -> tuple[Point, ...]:
        return tuple(item for item in self.items if isinstance(item, Point))

    @cached_property
    def yields(self) -> int:
        return sum(isinstance(item, Yield) for item in self.items)

    @cached_property
    def hooks(self) -> bool:
        """Whether some item runs a peer's receive hook."""
        return any(isinstance(item, RunRecvHook) for item in self.items)

    @cached_property
    def carries(self) -> bool:
        """Whether combine's wait is carried into the next layer: `C.recv` stands before `A0`."""
        names = [point.name for point in self.points]
        return "C.recv" in names and "A0" in names and names.index("C.recv") < names.index("A0")

    @cached_property
    def folded(self) -> tuple[Item, ...]:
        """The items with a carried wait moved behind the layer that it belongs to.

        Layer after layer both forms are the same sequence; folded, the first layer has nothing to wait for and the last
        one drains itself, so this is the form to play.
        """
        if not self.carries:
            return self.items
        first = next(i for i, item in enumerate(self.items) if isinstance(item, Point) and item.name == "A0")
        return self.items[first:] + self.items[:first]

    def stream_of(self, point: str) -> str:
        """The stream of `point`.

        Raises:
            ScheduleError: the program does not have the point.
        """
        for candidate in self.points:
            if candidate.name == point:
                return candidate.stream
        known = " ".join(p.name for p in self.points)
        raise ScheduleError.of("a program knows its own points only", fix=f"ask for one of {known}", point=point)

    def waits_for(self, point: str) -> tuple[str, ...]:
        """The producers of `point` that were issued on the other stream, so that `point`'s stream must wait for them.

        Those of A0 are the outputs of the layer before. Neighbours on different streams without such an edge
        (`C.send@comm S`) need a change of stream, not a wait.
        """
        self.stream_of(point)  # refuses a point that is not here
        return self._waits[point]

    @cached_property
    def _waits(self) -> dict[str, tuple[str, ...]]:
        stream_of = {p.name: p.stream for p in self.points}
        outputs = ("S", "copy" if "copy" in stream_of else "C.recv")
        return {
            point: tuple(
                producer
                for producer in (outputs if point == "A0" else (PRODUCERS[point],))
                if stream_of.get(producer, stream) != stream
            )
            for point, stream in stream_of.items()
        }


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which point yields where, for each backend.

    Attributes:
        name, aliases: what `--dbo-schedule` accepts.
        backends: where it may be used.
        programs: at most one without `backends`, which serves the backends that no other names.
        offset: d >= 0, applied once per split region: ubatch 0 skips its first d yields, the last ubatch its last d.
        declared_yields: yields per layer that the schedule promises; None: whatever its first program has.
    """

    name: str
    backends: tuple[str, ...]
    programs: tuple[LayerProgram, ...]
    offset: int = 0
    aliases: tuple[str, ...] = ()
    declared_yields: int | None = None
    description: str = ""

    @property
    def items(self) -> tuple[Item, ...]:
        """The items of the first program."""
        return self.programs[0].items

    @property
    def hooks(self) -> bool:
        """Whether any program runs receive hooks."""
        return any(program.hooks for program in self.programs)

    @property
    def yields_per_layer(self) -> int:
        return self.programs[0].yields if self.declared_yields is None else self.declared_yields

    def program(self, backend: str | None = None) -> LayerProgram:
        """The program for `backend` (None: the schedule's first backend).

        Raises:
            ScheduleError: the schedule is not for this backend.
        """
        backend = self.backends[0] if backend is None else backend
        if backend in self.backends:
            named = [program for program in self.programs if backend in program.backends]
            rest = [program for program in self.programs if not program.backends]
            if named or rest:
                return (named or rest)[0]
        raise ScheduleError.of(
            "a schedule runs on the backends that it declares",
            fix=f"use one of {', '.join(self.backends)}, or another schedule",
            schedule=self.name,
            backend=backend,
        )

    def order(self, backend: str | None = None) -> tuple[str, ...]:
        """The names of the points in one ubatch's order."""
        return tuple(point.name for point in self.program(backend).points)

    def stream_of(self, point: str, backend: str | None = None) -> str:
        """The stream that `point` is issued on with `backend`."""
        return self.program(backend).stream_of(point)

    def skips(self, index: int, *, num_moe_layers: int, ubatch: int, num_ubatches: int) -> bool:
        """Whether `ubatch` passes over its `index`-th yield (0-based, counted over the whole split region)."""
        if num_ubatches == 1:
            return False
        first = ubatch == 0 and index < self.offset
        last = ubatch == num_ubatches - 1 and index >= self.yields_per_layer * num_moe_layers - self.offset
        return first or last

    def yields(self, num_moe_layers: int, ubatch: int, num_ubatches: int) -> int:
        """How often `ubatch` hands over in one forward pass of `num_moe_layers` MoE layers."""
        return sum(
            not self.skips(index, num_moe_layers=num_moe_layers, ubatch=ubatch, num_ubatches=num_ubatches)
            for index in range(self.yields_per_layer * num_moe_layers)
        )
