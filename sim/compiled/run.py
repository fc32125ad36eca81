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
from sim.cost import CostTable

_ARRAY_BYTES = 1024


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


def replay(
    program: CompiledSchedule,
    ranks: int,
    *,
    cost: CostTable | None = None,
    slowdown: Sequence[float] | None = None,
    nbytes: int = 0,
) -> CompiledRun:
    """Run `program` on `ranks` ranks in virtual time.

    Times are those of a machine on which compute takes no longer beside exchanges: operations are placed in order of issue,
    for all ranks at once, and `sim.contention` needs them in order of time. So for "nccl" they are those that the real ring
    has with `CostTable(contention=False)`; for "deepep_low_latency" there is no difference.

    Args:
        cost: durations; its contention is left out.
        slowdown: by rank, a factor on the durations of its kernels: stragglers. They move times, never the order.
        nbytes: that a rank sends in one exchange.

    Raises:
        UsageError: no rank, or another number of factors than ranks.
    """
    if ranks < 1:
        raise UsageError.of("a machine has at least one rank", fix="raise it", ranks=ranks)
    factors = np.ones(ranks) if slowdown is None else np.asarray(slowdown, dtype=np.float64)
    if factors.shape != (ranks,):
        raise UsageError.of("one factor a rank", fix="give as many as ranks", ranks=ranks, slowdown=factors.shape)
    cost = cost or CostTable()
    size = len(program.ops)
    start_us = np.empty((size, ranks))
    duration_us = np.empty((size, ranks))
    end_us = np.empty((size, ranks))
    met_us = np.zeros(len(program.meetings))
    zero = np.zeros(ranks)
    for index, (op, before) in enumerate(zip(program.ops, program.before_on_line, strict=True)):
        ready = end_us[before] if before >= 0 else zero
        for source in op.after:
            ready = np.maximum(ready, end_us[source])
        if op.follows >= 0:
            ready = np.maximum(ready, met_us[op.follows])
        start_us[index] = ready
        duration_us[index] = _duration_us(op, cost, nbytes) * factors
        end_us[index] = start_us[index] + duration_us[index]
        if op.joins >= 0:
            met_us[op.joins] = end_us[index].max()
    return CompiledRun(program=program, ranks=ranks, start_us=start_us, duration_us=duration_us)


def _duration_us(op: DeviceOp, cost: CostTable, nbytes: int) -> float:
    match op.kind:
        case "op":
            return cost.kernel(0, op.name)
        case "send":
            return cost.low_latency_send_us
        case "recv":
            return cost.low_latency_recv_us
        case "transfer":
            return cost.transfer(nbytes)
        case "exchange":
            return cost.collective(nbytes)
    return 0.0


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
        for array, name in enumerate(self.program.arrays):
            shared = array in self.program.windows
            for rank in range(self.ranks):
                nbytes = REGION_BYTES * self.ranks if shared else _ARRAY_BYTES
                id = self._buffer(array, rank)
                self.result.buffers[id] = BufferInfo(id, rank, name, nbytes)
        for index, op in enumerate(self.program.ops):
            for rank in range(self.ranks):
                self.result.records.append(self._record(index, op, rank))
            if op.joins >= 0:
                self.result.records.append(self._meet(index, op.joins))
        return self.result

    def _record(self, index: int, op: DeviceOp, rank: int) -> Record:
        after = tuple(self._id(source, rank) for source in op.after)
        if op.follows >= 0:
            after = (*after, self._meet_id(op.follows))
        return Record(
            self._id(index, rank),
            rank,
            op.line,
            op.kind,
            op.name,
            float(self.run.start_us[index, rank]),
            float(self.run.duration_us[index, rank]),
            0,
            op.layer,
            op.ubatch,
            op.point,
            after,
            tuple(a for array in op.reads for a in self._read(array, rank)),
            tuple(a for array in op.writes for a in self._write(array, rank)),
            "",
            self._attrs(op),
        )

    def _meet(self, index: int, meeting: int) -> Record:
        group, number = self.program.meetings[meeting]
        ends = self.run.start_us[index] + self.run.duration_us[index]
        return Record(
            self._meet_id(meeting),
            -1,
            group,
            kinds.MEET,
            f"{group}#{number}",
            float(ends.max()),
            after=tuple(self._id(index, rank) for rank in range(self.ranks)),
            attrs={"group": group, "index": number},
        )

    def _attrs(self, op: DeviceOp) -> dict[str, object]:
        if op.kind in (kinds.RECORD, kinds.WAIT):
            return {"event": op.name}
        meeting = max(op.joins, op.follows)
        if meeting < 0:
            return {}
        group, number = self.program.meetings[meeting]
        if op.kind in (kinds.TRANSFER, kinds.RECV):
            return {"call": number, "buffer": number % 2, "op": op.name.partition(".")[0]}
        return {"group": group, "index": number, "op": op.name, "ranks": self.ranks}

    def _read(self, array: int, rank: int) -> list[Access]:
        stop = REGION_BYTES * self.ranks if array in self.program.windows else _ARRAY_BYTES
        return [Access.interval(self._buffer(array, rank), 0, stop)]

    def _write(self, array: int, rank: int) -> list[Access]:
        if array not in self.program.windows:
            return self._read(array, rank)
        start = rank * REGION_BYTES
        return [Access.interval(self._buffer(array, peer), start, start + REGION_BYTES) for peer in range(self.ranks)]

    def _id(self, index: int, rank: int) -> int:
        return index * self.ranks + rank

    def _meet_id(self, meeting: int) -> int:
        return len(self.program.ops) * self.ranks + meeting

    def _buffer(self, array: int, rank: int) -> int:
        return array * self.ranks + rank
