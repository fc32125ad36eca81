"""buffer-reuse: ordered, but the bytes belong to somebody else by then.

Four rules: the numbered calls of a low-latency exchange, owner tags (`tags` on writes, `expects` on reads: buffer id ->
whose data), buffers that belong to one ubatch, and buffers that were freed before an operation on them was launched.
"""

from __future__ import annotations

from typing import Any

from dbo.check import low_latency
from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "buffer-reuse"
SENTENCE = "an operation uses bytes that hold, or are about to hold, somebody else's data"
UNIT = "low-latency calls, tagged reads, accesses of owned and of freed buffers"
READS = (*low_latency.READS, *kinds.WITH_BYTES)
NEEDS = (kinds.OP,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Applies the four rules."""
    found = Findings(ID)
    low_latency.judge_calls(trace, happens, found)
    low_latency.judge_held_results(trace, found)
    _tags(trace, happens, found)
    _owners(trace, found)
    _freed(trace, happens, found)
    return found


def _tags(trace: Trace, happens: HappensBefore, found: Findings) -> None:
    """A read sees the tag that it expects on the last write ordered before it."""
    expecting: dict[int, list[tuple[Record, Any]]] = {}
    for record in trace.records:
        for buffer, tag in record.attrs.get("expects", {}).items():
            expecting.setdefault(int(buffer), []).append((record, tag))
    if not expecting:
        return
    writes: dict[int, list[tuple[Record, Any]]] = {}
    for record in trace.records:
        for buffer, tag in record.attrs.get("tags", {}).items():
            writes.setdefault(int(buffer), []).append((record, tag))
    for buffer, reads in expecting.items():
        for read, tag in reads:
            found.checked += 1
            _judge_tag(buffer, read, tag, writes.get(buffer, []), trace, happens, found)


def _judge_tag(
    buffer: int,
    read: Record,
    tag: Any,
    writes: list[tuple[Record, Any]],
    trace: Trace,
    happens: HappensBefore,
    found: Findings,
) -> None:
    last: tuple[Record, Any] | None = None
    beside: tuple[Record, Any] | None = None
    for write, written in reversed(writes):
        if happens.ordered(write.id, read.id):
            last = last or (write, written)
        elif not happens.ordered(read.id, write.id):
            if _plain(written) == _plain(tag):
                return  # the expected write races with the read: a missing wait, which stream-race reports
            beside = (write, written)
    if last is None:
        return
    finds = "finds"
    if _plain(last[1]) == _plain(tag):
        if beside is None:
            return
        last, finds = beside, "can find"
    info = trace.buffers.get(buffer)
    found.violate(
        f"{read.name} (#{read.id}, ubatch {read.ubatch} of rank {read.rank}) expects {_show(tag)} in "
        f"{info.name if info else f'buffer {buffer}'} and {finds} {_show(last[1])}, written by {last[0].name} "
        f"(#{last[0].id})",
        read,
        last[0].id,
    )


def _owners(trace: Trace, found: Findings) -> None:
    owned = {id: info for id, info in trace.buffers.items() if info.owner[:1] == "u" and info.owner[1:].isdigit()}
    told: set[tuple[int, int]] = set()
    if not owned:
        return
    for record in trace.records:
        if record.ubatch < 0 or not record.on_device:
            continue
        for access in (*record.reads, *record.writes):
            info = owned.get(access.buffer)
            if info is None:
                continue
            found.checked += 1
            if info.owner != f"u{record.ubatch}" and (info.id, record.ubatch) not in told:
                told.add((info.id, record.ubatch))
                found.violate(
                    f"{record.name} (#{record.id}) of ubatch {record.ubatch} of rank {record.rank} uses {info.name}, "
                    f"which belongs to {info.owner}",
                    record,
                )


def _freed(trace: Trace, happens: HappensBefore, found: Findings) -> None:
    """Work launched before a free is safe in stream order; work launched after it uses memory given away."""
    freed: dict[int, Record] = {need(record, "buffer"): record for record in trace.of_kind(kinds.FREE)}
    if not freed:
        return
    told: set[int] = set()
    for record in trace.records:
        for access in (*record.reads, *record.writes):
            free = freed.get(access.buffer)
            if free is None or record is free:
                continue
            found.checked += 1
            launch = happens.issuer(record) if record.on_device else record
            freed_by = happens.issuer(free) if free.on_device else free
            if launch is None or freed_by is None or launch is freed_by:
                before = record.id < free.id
            else:
                before = happens.ordered(launch.id, freed_by.id)
            if not before and access.buffer not in told:
                told.add(access.buffer)
                info = trace.buffers.get(access.buffer)
                found.violate(
                    f"{record.name} (#{record.id}, ubatch {record.ubatch} of rank {record.rank}) uses "
                    f"{info.name if info else f'buffer {access.buffer}'}, which was freed (#{free.id}) before it was "
                    f"launched",
                    record,
                    free.id,
                )


def _plain(value: Any) -> Any:
    return [_plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def _show(tag: Any) -> str:
    return "/".join(map(str, tag)) if isinstance(tag, (list, tuple)) else str(tag)
