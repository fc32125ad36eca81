"""How much communication is hidden under compute, and how much the schedule itself would allow.

What runs on the compute stream while a ubatch's bytes are under way is the other ubatch's work, or its own shared
expert: nothing else of its own can run without them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

from dbo.check.happens import HappensBefore
from dbo.trace import Record, Trace, kinds

READS = (
    kinds.COLLECTIVE,
    kinds.EXCHANGE,
    kinds.OP,
    kinds.RECORD,
    kinds.RECV,
    kinds.SEND,
    kinds.TRANSFER,
    kinds.UBATCH_ENTER,
    kinds.WAIT,
)
"""Kinds of records that this module looks at, for the detectors that use it."""

_EXCHANGES = frozenset((kinds.COLLECTIVE, kinds.EXCHANGE, kinds.SEND, kinds.RECV, kinds.TRANSFER))

# What keeps the compute stream busy and may hide communication. An exchange there (of a DCP group, in attention) is a step
# of its ubatch's own work, beside which the other ubatch's dispatch or combine is as well hidden as beside a product.
_WORK = frozenset((kinds.OP, kinds.EXCHANGE))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication of split steps and what hides it.

    Attributes:
        hidden_share: time under compute on the same rank / all communication time; None: no such time.
        ideal_share: the same with every communication as hidden as the issue order allows.
        exposed_us: communication time that nothing hides.
        comm_us: all communication time.
    """

    hidden_share: float | None
    ideal_share: float | None
    exposed_us: float
    comm_us: float


def is_communication(record: Record) -> bool:
    """Bytes between ranks under way beside the compute stream."""
    return record.kind == kinds.TRANSFER or (record.line in ("comm", "net") and record.kind in _EXCHANGES)


def split_steps(trace: Trace) -> set[tuple[int, int]]:
    """(rank, step) in which at least two ubatches ran; runs of the capture phase (steps below -1) are left out."""
    ubatches: dict[tuple[int, int], set[int]] = defaultdict(set)
    for record in trace.records:
        if record.ubatch >= 0 and record.step >= -1 and (record.kind == kinds.UBATCH_ENTER or record.on_device):
            ubatches[record.rank, record.step].add(record.ubatch)
    return {key for key, found in ubatches.items() if len(found) > 1}


def measure(trace: Trace, rank: int | None = None, *, happens: HappensBefore | None = None) -> Overlap:
    """The overlap of one rank, or of all.

    The ideal: a communication can hide under the compute that is issued between the end of its own ubatch's work before
    it (a yield may lie between that and its own launch) and the first operation of its own ubatch that depends on it,
    under no more of it than it lasts itself, and under none that already hides another one on the same line.

    Args:
        happens: the order of `trace`, if it is known already.
    """
    happens = happens or HappensBefore(trace)
    comm_us = hidden_us = ideal_us = 0.0
    split = split_steps(trace)
    groups: dict[tuple[int, int], _Step] = defaultdict(_Step)
    for record in trace.records:
        key = (record.rank, record.step)
        if record.on_device and record.ubatch >= 0 and key in split and (rank is None or record.rank == rank):
            groups[key].add(record)
    for step in groups.values():
        step.sort()
        for record in step.comm:
            comm_us += record.dur_us
            hidden_us += step.hidden_us(record)
            ideal_us += step.hideable_us(record, happens)
    if comm_us == 0:
        return Overlap(hidden_share=None, ideal_share=None, exposed_us=0.0, comm_us=0.0)
    return Overlap(
        hidden_share=min(1.0, hidden_us / comm_us),
        ideal_share=ideal_us / comm_us,
        exposed_us=max(0.0, comm_us - hidden_us),
        comm_us=comm_us,
    )


class _Step:
    """One split step of one rank: its communication, and its compute by ubatch."""

    def __init__(self) -> None:
        self.comm: list[Record] = []
        self._compute: dict[int, list[Record]] = defaultdict(list)

    def add(self, record: Record) -> None:
        if is_communication(record):
            if record.dur_us > 0:
                self.comm.append(record)
        elif record.line == "compute":
            self._compute[record.ubatch].append(record)

    def sort(self) -> None:
        self.comm.sort(key=lambda r: r.id)
        self._rows = {ubatch: _Row(records) for ubatch, records in self._compute.items()}
        work = [r for records in self._compute.values() for r in records if r.kind in _WORK and r.dur_us > 0]
        work.sort(key=lambda r: r.id)
        self._work_ids = [r.id for r in work]
        self._free_us: dict[str, list[float]] = defaultdict(lambda: [r.dur_us for r in work])

    def hidden_us(self, record: Record) -> float:
        return sum(row.busy_us(record.t_us, record.end_us) for row in self._rows.values())

    def hideable_us(self, record: Record, happens: HappensBefore) -> float:
        """How much of `record` the issue order can hide; uses up the compute that does. Called in issue order."""
        own = self._rows.get(record.ubatch)
        start = own.last_work_before(record) if own is not None else record.id
        stop = own.first_dependent(record, happens) if own is not None else None
        first = bisect_right(self._work_ids, start)
        last = len(self._work_ids) if stop is None else bisect_left(self._work_ids, stop)
        free_us, left_us = self._free_us[record.line], record.dur_us
        for at in range(first, last):
            used_us = min(free_us[at], left_us)
            free_us[at] -= used_us
            left_us -= used_us
            if left_us <= 0:
                break
        return record.dur_us - left_us


class _Row:
    """The compute-stream records of one ubatch in one step."""

    def __init__(self, records: list[Record]) -> None:
        self._all = sorted(records, key=lambda r: r.id)
        self._ids = [r.id for r in self._all]
        work = [r for r in self._all if r.kind in _WORK and r.dur_us > 0]
        work.sort(key=lambda r: r.t_us)
        self._work = work
        self._starts = [r.t_us for r in work]
        self._busy_sums = _sums([r.dur_us for r in work])

    def busy_us(self, start: float, stop: float) -> float:
        """Time within [start, stop) in which an operation runs; operations of one stream never overlap."""
        return max(0.0, self._busy_until(stop) - self._busy_until(start))

    def _busy_until(self, time: float) -> float:
        at = bisect_right(self._starts, time)
        if at == 0:
            return 0.0
        last = self._work[at - 1]
        return self._busy_sums[at - 1] + min(last.dur_us, time - last.t_us)

    def last_work_before(self, record: Record) -> int:
        """Id of the last work here that was issued before `record`; the record's own id when there is none."""
        for earlier in reversed(self._all[: bisect_left(self._ids, record.id)]):
            if earlier.kind not in (kinds.RECORD, kinds.WAIT):
                return earlier.id
        return record.id

    def first_dependent(self, record: Record, happens: HappensBefore) -> int | None:
        """Id of the first record here, in issue order, that comes after `record`; None when none does."""
        for later in self._all[bisect_right(self._ids, record.id) :]:
            if happens.ordered(record.id, later.id):
                return later.id
        return None


def _sums(values: list[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
