"""stream-race: two accesses of one byte, one of them a write, with no order between them.

For every buffer a frontier of earlier accesses is kept. An access drops what it covers: an earlier one that is ordered
before it, touches no byte outside it, and that it conflicts with at least as widely (a write covers everything, a read
covers reads). A later race with a dropped access is then a race with the one that dropped it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dbo.check import hooks
from dbo.check.happens import HappensBefore
from dbo.check.hooks import unwound_steps
from dbo.check.phases import in_phases
from dbo.check.violation import Findings
from dbo.trace import Access, BufferInfo, Record, Trace, kinds
from dbo.trace.accesses import overlaps

ID = "stream-race"
SENTENCE = "a read is not ordered after its write, or a write after an earlier read or write"
UNIT = "accesses of bytes"
READS = (*kinds.WITH_BYTES, *hooks.READS)
NEEDS = (kinds.OP,)


_Touch = tuple[Access, bool, Record]


@dataclass(frozen=True, slots=True)
class _Use:
    """One access: its bytes, the interval around them, whether it writes, by whom."""

    access: Access
    writes: bool
    record: Record
    start: int
    stop: int
    is_interval: bool


def _use(access: Access, writes: bool, record: Record) -> _Use:
    if access.strides == (1,):
        return _Use(access, writes, record, access.offset, access.offset + access.sizes[0], True)
    return _Use(access, writes, record, access.offset, access.stop, False)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """One violation for each pair of operations (by name, stream and buffer) that race; its first pair is shown."""
    found = Findings(ID)
    by_buffer: dict[int, list[_Touch]] = {}
    for record in trace.records:
        for access in record.reads:
            by_buffer.setdefault(access.buffer, []).append((access, False, record))
        for access in record.writes:
            by_buffer.setdefault(access.buffer, []).append((access, True, record))
    seen: set[tuple[object, ...]] = set()
    unwound = unwound_steps(trace)
    for buffer, touches in by_buffer.items():
        found.checked += len(touches)
        if not _can_race(touches):
            continue
        accesses = [_use(*touch) for touch in touches]
        if not in_phases(accesses, happens):
            for first, second in _races(accesses, happens):
                key = (_kind(first), _kind(second))
                if key not in seen and not _is_discarded(first, second, unwound):
                    seen.add(key)
                    _add(found, trace.buffers.get(buffer), first, second, happens)
    return found


def _can_race(touches: list[_Touch]) -> bool:
    """Whether several lines come here, one of them to write."""
    line, rank = touches[0][2].line, touches[0][2].rank
    for _, _, record in touches:
        if record.line != line or record.rank != rank:
            return any(writes for _, writes, _ in touches)
    return False


def _races(uses: Iterable[_Use], happens: HappensBefore) -> Iterator[tuple[_Use, _Use]]:
    frontier: list[_Use] = []
    for use in uses:
        record, start, stop = use.record, use.start, use.stop
        kept: list[_Use] = []
        for earlier in frontier:
            if earlier.stop <= start or stop <= earlier.start or earlier.record is record:
                kept.append(earlier)
                continue
            if not (earlier.is_interval and use.is_interval) and not overlaps(earlier.access, use.access):
                kept.append(earlier)
                continue
            before = happens.ordered(earlier.record.id, record.id)
            if not before and (use.writes or earlier.writes):
                yield earlier, use
            if not (before and (use.writes or not earlier.writes) and _covers(use, earlier)):
                kept.append(earlier)
        kept.append(use)
        frontier = kept


def _is_discarded(first: _Use, second: _Use, unwound: set[tuple[int, int]]) -> bool:
    """A read beside the end of its storage in a step that an error ends: nobody uses what was read."""
    ends = [use.record for use in (first, second) if use.record.kind == kinds.FREE]
    reads = not (first.writes and second.writes)
    return reads and any((record.rank, record.step) in unwound for record in ends)


def _covers(outer: _Use, inner: _Use) -> bool:
    if outer.access[1:] == inner.access[1:]:
        return True
    return outer.is_interval and outer.start <= inner.start and inner.stop <= outer.stop


def _kind(use: _Use) -> tuple[object, ...]:
    record = use.record
    return record.rank, record.line, record.name, record.point, record.ubatch, use.writes


def _add(found: Findings, buffer: BufferInfo | None, first: _Use, second: _Use, happens: HappensBefore) -> None:
    a, b = first.record, second.record
    name = f"buffer {first.access.buffer}" if buffer is None else buffer.name
    if buffer is not None and buffer.rank >= 0:
        name += f" of rank {buffer.rank}"
    found.violate(
        f"{name}: {_verb(first.writes)} by {_who(a)} and {_verb(second.writes)} by {_who(b)} touch the same bytes in "
        f"no fixed order; {happens.missing_edge(a.id, b.id)}",
        b,
        a.id,
    )


def _verb(writes: bool) -> str:
    return "a write" if writes else "a read"


def _who(record: Record) -> str:
    ubatch = f"u{record.ubatch} " if record.ubatch >= 0 else ""
    source = f" at {record.src}" if record.src else ""
    layer = f" of layer {record.layer}" if record.layer >= 0 else ""
    return f"{ubatch}{record.name}{layer} on {record.line} of rank {record.rank} (#{record.id}{source})"
