"""One trace of what all ranks left: unique ids, meetings of ranks as records, every edge pointing backwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dbo.trace import BufferInfo, Record, Trace, kinds


class RankRecords(Protocol):
    """What one rank recorded. In `after`, -1 - i stands for its `meets[i]`."""

    records: list[Record]
    buffers: dict[int, BufferInfo]
    meets: list[tuple[str, int]]


Meet = tuple[str, int]


def merge(parts: Sequence[RankRecords | None], meta: Mapping[str, Any]) -> Trace:
    """The trace of a run. A rank that left nothing has no records; meetings that were not complete have none either."""
    trace = Trace(meta=dict(meta))
    stride = len(parts)
    members = _members(parts)
    next_id = 1 + stride * max((r.id for p in parts if p for r in p.records), default=0) + stride
    meet_ids = {meet: next_id + at for at, meet in enumerate(sorted(members))}
    buffers = _Buffers(trace, parts)
    rows = [
        [_global(r, rank, stride, part.meets, meet_ids, buffers) for r in part.records] if part else []
        for rank, part in enumerate(parts)
    ]
    known = {r.id for row in rows for r in row} | set(meet_ids.values())
    arrivals = {meet_ids[meet]: [ids[rank] * stride + rank for rank in sorted(ids)] for meet, ids in members.items()}
    names = {number: meet for meet, number in meet_ids.items()}
    _emit(trace, rows, known, arrivals, names)
    return trace


def _members(parts: Sequence[RankRecords | None]) -> dict[Meet, dict[int, int]]:
    """Complete meetings: who came with which record (local ids)."""
    came: dict[Meet, dict[int, int]] = defaultdict(dict)
    expected: dict[Meet, int] = {}
    for rank, part in enumerate(parts):
        for record in part.records if part else ():
            meet = meet_of(record)
            if meet is not None:
                came[meet][rank] = record.id
                ranks = record.attrs.get("ranks")  # their number, or which of the run's they are
                expected[meet] = len(ranks) if isinstance(ranks, list) else len(parts)
    return {meet: ids for meet, ids in came.items() if len(ids) == expected[meet]}


def meet_of(record: Record) -> Meet | None:
    """The meeting that a record comes to as a member."""
    if record.kind in (kinds.COLLECTIVE, kinds.TRANSFER):
        return record.attrs["group"], record.attrs["index"]
    return ("low_latency", record.attrs["call"]) if record.kind == kinds.SEND else None


class _Buffers:
    """Buffer numbers of a rank to those of the trace."""

    def __init__(self, trace: Trace, parts: Sequence[RankRecords | None]) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        for rank, part in enumerate(parts):
            for number, info in (part.buffers if part else {}).items():
                own = self._numbers[rank, number] = len(trace.buffers)
                trace.buffers[own] = BufferInfo(own, rank, info.name, info.nbytes, info.owner)

    def __call__(self, rank: int, accesses: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a._replace(buffer=self._numbers[rank, a.buffer]) for a in accesses)


def _global(
    record: Record, rank: int, stride: int, meets: list[Meet], meet_ids: Mapping[Meet, int], buffers: _Buffers
) -> Record:
    after = []
    for id in record.after:
        number = id * stride + rank if id >= 0 else meet_ids.get(meets[-1 - id])
        if number is not None:
            after.append(number)
    return Record(
        record.id * stride + rank,
        rank,
        record.line,
        record.kind,
        record.name,
        record.t_us,
        record.dur_us,
        record.step,
        record.layer,
        record.ubatch,
        record.point,
        tuple(sorted(set(after))),
        buffers(rank, record.reads),
        buffers(rank, record.writes),
        record.src,
        record.attrs,
    )


def _emit(
    trace: Trace, rows: list[list[Record]], known: set[int], arrivals: dict[int, list[int]], names: dict[int, Meet]
) -> None:
    """Append records in an order in which every edge points backwards, the earliest of those that may come first."""
    done: set[int] = set()
    at = [0] * len(rows)
    times: dict[int, float] = {}
    while True:
        heads = sorted((row[i].t_us, rank) for rank, (row, i) in enumerate(zip(rows, at, strict=True)) if i < len(row))
        if not heads:
            return
        # A cut trace may name a record that was never written; with nobody ready, the earliest head goes without it.
        rank = next((r for _, r in heads if _ready(rows[r][at[r]], done, known, arrivals)), heads[0][1])
        record = rows[rank][at[rank]]
        at[rank] += 1
        for id in record.after:
            if id in arrivals and id not in done and all(a in done for a in arrivals[id]):
                group, index = names[id]
                t_us = max(times[a] for a in arrivals[id])
                members = [a % len(rows) for a in arrivals[id]]
                some = {"members": members} if len(members) < len(rows) else {}
                trace.records.append(
                    Record(
                        id,
                        -1,
                        group,
                        kinds.MEET,
                        f"{group}#{index}",
                        t_us=t_us,
                        after=tuple(arrivals[id]),
                        attrs={"group": group, "index": index, **some},
                    )
                )
                done.add(id)
        record.after = tuple(id for id in record.after if id in done)
        done.add(record.id)
        if meet_of(record) is not None:
            times[record.id] = record.t_us
        trace.records.append(record)


def _ready(record: Record, done: set[int], known: set[int], arrivals: dict[int, list[int]]) -> bool:
    return all(
        id in done or (id in arrivals and all(a in done for a in arrivals[id])) or id not in known
        for id in record.after
    )
