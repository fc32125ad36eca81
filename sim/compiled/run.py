"""A compiled schedule on R ranks: when every operation starts on every rank, races, a trace where one is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dbo.errors import UsageError
from dbo.trace import Access, BufferInfo, Record, Trace, kinds
from sim.alltoall.low_latency import REGION_BYTES
from sim.compiled.program import CompiledSchedule, DeviceOp
from sim.compiled.race import CompiledRace, find_races


@dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """What a replay left.

    Attributes:
        start_us: float64 `[N, R]`, when operation n starts on rank r.
        duration_us: float64 `[N, R]`.
    """

    program: CompiledSchedule
    ranks: int
    start_us: np.ndarray
    duration_us: np.ndarray

    @cached_property
    def races(self) -> tuple[CompiledRace, ...]:
        """Over all pairs of ranks; see `sim.compiled.race`."""
        races = find_races(self.program)
        return races if self.ranks > 1 else tuple(race for race in races if race.same_rank)

    @property
    def makespan_us(self) -> float:
        """When the last operation of the last rank ends."""
        return float((self.start_us + self.duration_us).max(initial=0.0))

    def trace(self) -> Trace:
        """The device records of all ranks, as a run of the real ring writes them: R * N records, so for few ranks."""
        return _Recorder(self).trace()


def replay(program: CompiledSchedule, ranks: int, *, slowdown: Sequence[float] | None = None) -> CompiledRun:
    """Run `program` on `ranks` ranks in virtual time.

    Times are those of a machine whose hosts take no time and whose compute takes no longer beside exchanges: operations are
    placed in order of issue, for all ranks at once, and `sim.contention` needs them in order of time. Every operation
    takes as long as in the recorded run of two ranks.

    Args:
        slowdown: by rank, a factor on the durations of its kernels: stragglers. They move times, never the order.

    Raises:
        UsageError: no rank, or another number of factors than ranks.
    """
    if ranks < 1:
        raise UsageError.of("a machine has at least one rank", fix="raise it", ranks=ranks)
    factors = np.ones(ranks) if slowdown is None else np.asarray(slowdown, dtype=np.float64)
    if factors.shape != (ranks,):
        raise UsageError.of("one factor per rank", fix="give as many as ranks", ranks=ranks, slowdown=factors.shape)
    size = len(program.ops)
    start_us = np.empty((size, ranks))
    duration_us = np.empty((size, ranks))
    end_us = np.empty((size, ranks))
    met_us: list[np.ndarray | float] = [0.0] * len(program.meetings)
    zero = np.zeros(ranks)
    for index, (op, before) in enumerate(zip(program.ops, program.before_on_line, strict=True)):
        ready = end_us[before] if before >= 0 else zero
        for source in op.after:
            ready = np.maximum(ready, end_us[source])
        if op.follows >= 0:
            ready = np.maximum(ready, met_us[op.follows])
        start_us[index] = ready
        duration_us[index] = factors * (op.dur_us * (ranks - 1) if op.to_peers else op.dur_us)
        end_us[index] = start_us[index] + duration_us[index]
        if op.joins >= 0:
            met_us[op.joins] = meeting_us(end_us[index], of_others=program.meetings[op.joins].of_others)
    return CompiledRun(program=program, ranks=ranks, start_us=start_us, duration_us=duration_us)


def meeting_us(end_us: np.ndarray, *, of_others: bool) -> np.ndarray | float:
    """When all members have come; `of_others`: for each rank, when all but its own have."""
    last = float(end_us.max())
    if not of_others:
        return last
    others = np.full(len(end_us), last)
    latest = int(end_us.argmax())
    others[latest] = np.delete(end_us, latest).max(initial=0.0)
    return others


class _Recorder:
    """Writes a replay down: operation by operation, each for all ranks, so that every edge points backwards."""

    def __init__(self, run: CompiledRun) -> None:
        self.run = run
        self.ranks = run.ranks
        self.program = run.program
        meta = {"world": "sim", "ranks": run.ranks, "mode": "ordering", "complete": True, "compiled": True}
        self.result = Trace(
            meta=meta
            | {
                "schedule": self.program.schedule,
                "backend": self.program.backend,
                "ubatches": self.program.num_ubatches,
            }
        )

    def trace(self) -> Trace:
        for place, array in enumerate(self.program.arrays):
            for rank in range(self.ranks):
                of_whom, nbytes = rank, array.nbytes
                if array.window:
                    of_whom = -1 if array.window == "all" else rank
                    nbytes = REGION_BYTES * self.ranks * (self.ranks if array.window == "all" else 1)
                id = self._buffer(place, of_whom)
                self.result.buffers[id] = BufferInfo(id, of_whom, array.name, nbytes)
        for index, op in enumerate(self.program.ops):
            for rank in range(self.ranks):
                self.result.records += [self._record(index, op, rank, hop) for hop in self._hops(op)]
            if op.joins >= 0:
                self._meet(index, op.joins)
        return self.result

    def _hops(self, op: DeviceOp) -> range:
        """To which other ranks, counted from its own; 0: to none in particular."""
        return range(1, self.ranks) if op.to_peers else range(1)

    def _record(self, index: int, op: DeviceOp, rank: int, hop: int) -> Record:
        after = [self._id(at, rank, each) for at in op.after for each in self._hops(self.program.ops[at])]
        if op.follows >= 0:
            after.append(self._meet_id(op.follows, rank))
        start_us, dur_us = float(self.run.start_us[index, rank]), float(self.run.duration_us[index, rank])
        if hop:
            dur_us /= self.ranks - 1
            start_us += dur_us * (hop - 1)
        peer = (rank + hop) % self.ranks
        return Record(
            self._id(index, rank, hop),
            rank,
            op.line,
            op.kind,
            op.name,
            start_us,
            dur_us,
            0,
            op.layer,
            op.ubatch,
            op.point,
            tuple(after),
            tuple(found for access in op.reads for found in self._read(access, rank)),
            tuple(self._written(access, rank, peer) for access in op.writes),
            "",
            self._attrs(op, peer if hop else -1),
        )

    def _meet(self, index: int, place: int) -> None:
        """The meeting; or one for each rank, of all others."""
        meeting = self.program.meetings[place]
        ends = self.run.start_us[index] + self.run.duration_us[index]
        for rank in range(self.ranks) if meeting.of_others else (-1,):
            members = [member for member in range(self.ranks) if member != rank]
            group = f"{meeting.group}->r{rank}" if meeting.of_others else meeting.group
            attrs = {"group": group, "index": meeting.index} | ({"members": members} if meeting.of_others else {})
            self.result.records.append(
                Record(
                    self._meet_id(place, rank),
                    -1,
                    group,
                    kinds.MEET,
                    f"{group}#{meeting.index}",
                    float(ends[members].max(initial=0.0)),
                    after=tuple(self._id(index, member) for member in members),
                    attrs=attrs,
                )
            )

    def _attrs(self, op: DeviceOp, peer: int) -> dict[str, object]:
        attrs = dict(op.attrs)
        if op.kind == kinds.COLLECTIVE:
            attrs["ranks"] = self.ranks
        if peer >= 0:
            attrs["dst"] = peer
        return attrs

    def _read(self, access: Access, rank: int) -> list[Access]:
        match self.program.arrays[access.buffer].window:
            case "all":
                part = REGION_BYTES * self.ranks
                return [Access.interval(self._buffer(access.buffer, -1), rank * part, (rank + 1) * part)]
            case "peers":
                own = self._buffer(access.buffer, rank)
                regions = (
                    (peer * REGION_BYTES, (peer + 1) * REGION_BYTES) for peer in range(self.ranks) if peer != rank
                )
                return [Access.interval(own, *region) for region in regions]
        return [access._replace(buffer=self._buffer(access.buffer, rank))]

    def _written(self, access: Access, rank: int, peer: int) -> Access:
        match self.program.arrays[access.buffer].window:
            case "all":
                sizes, strides = (self.ranks, REGION_BYTES), (self.ranks * REGION_BYTES, 1)
                return Access(self._buffer(access.buffer, -1), rank * REGION_BYTES, sizes, strides)
            case "peers":
                start = rank * REGION_BYTES
                return Access.interval(self._buffer(access.buffer, peer), start, start + REGION_BYTES)
        return access._replace(buffer=self._buffer(access.buffer, rank))

    def _id(self, index: int, rank: int, hop: int = 0) -> int:
        return (index * self.ranks + rank) * self.ranks + hop

    def _meet_id(self, place: int, rank: int) -> int:
        of_whom = rank if self.program.meetings[place].of_others else 0
        return len(self.program.ops) * self.ranks**2 + place * self.ranks + of_whom

    def _buffer(self, array: int, rank: int) -> int:
        return array * self.ranks + max(rank, 0)
