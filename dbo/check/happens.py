"""Happens-before over a trace: vector clocks in one pass, collapsed to what differs.

A full clock has one entry a line; with 64 ranks that is 320 entries for every record, and joining them would cost more
than everything else. Three facts keep it small:

* a record without an edge from another line knows exactly what its predecessor knew, so the two share one clock;
* most edges stay inside a rank, so a clock is a short tuple (the rank's own lines) beside a shared array (all lines);
* the members of a collective come after the same arrivals, so their join is made once and shared.

The entry of line l in a clock is the number of records of l that happened before; a record's own line is implicit.
Meetings (rank -1) lie on no line: they are ordered by `after` alone, have no entry, and pass on what they know.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dbo.errors import UsageError
from dbo.trace import Record, Trace, kinds
from dbo.trace.collector import collector_paused

_Local = tuple[int, ...]
_MANY = 8
"""A record after more sources than this is taken for a member of a collective."""


class Frontier:
    """The last of some records on every line they lie on: who comes after the frontier comes after all of them."""

    def __init__(self, last: dict[int, int]) -> None:
        self._lines = np.fromiter(last.keys(), dtype=np.int64, count=len(last))
        self._counts = np.fromiter(last.values(), dtype=np.int64, count=len(last))
        self._unseen: dict[int, list[tuple[int, int]]] = {}

    def unseen(self, shared: int, clock: np.ndarray) -> list[tuple[int, int]]:
        """(line, count) of what the shared clock number `shared` does not know. Many records have one shared clock."""
        known = self._unseen.get(shared)
        if known is None:
            late = np.flatnonzero(clock[self._lines] < self._counts)
            known = list(zip(self._lines[late].tolist(), self._counts[late].tolist(), strict=True))
            self._unseen[shared] = known
        return known


class HappensBefore:
    """The partial order of a trace. Immutable once built.

    Args:
        trace: its records must be in topological order (every edge points backwards).

    Raises:
        UsageError: an edge names a record that does not come earlier, or two records share an id.
    """

    def __init__(self, trace: Trace) -> None:
        self.records = trace.records
        self.position: dict[int, int] = {record.id: at for at, record in enumerate(trace.records)}
        if len(self.position) != len(trace.records):
            raise UsageError.of("record ids are unique", fix="record the trace again", records=len(trace.records))
        with collector_paused():
            self._number_lines()
            self._walk()

    def ordered(self, a: int, b: int) -> bool:
        """True when record `a` happens before record `b` (ids) in every execution of the same partial order."""
        at, bt = self.position[a], self.position[b]
        if at >= bt:
            return False
        line, count = self._line[at], self._count[at]
        if line < 0:
            return self._reaches(at, bt)
        if line == self._line[bt]:
            return True
        first, last = self._span[bt]
        if first <= line < last:
            return self._local[bt][line - first] >= count
        return bool(self._arrays[self._global[bt]][line] >= count)

    def concurrent(self, a: int, b: int) -> bool:
        """True when neither record happens before the other."""
        return a != b and not self.ordered(a, b) and not self.ordered(b, a)

    def frontier(self, ids: Iterable[int]) -> Frontier:
        """The frontier of some records; none of them a meeting."""
        last: dict[int, int] = {}
        for id in ids:
            at = self.position[id]
            line = self._line[at]
            last[line] = max(last.get(line, 0), self._count[at])
        return Frontier(last)

    def follows(self, id: int, frontier: Frontier) -> bool:
        """True when all records of `frontier` happen before record `id`."""
        at = self.position[id]
        shared, own = self._global[at], self._line[at]
        first, last = self._span[at]
        local = self._local[at]
        for line, count in frontier.unseen(shared, self._arrays[shared]):
            if line == own:
                if count >= self._count[at]:
                    return False
            elif not first <= line < last or local[line - first] < count:
                return False
        return True

    def record(self, id: int) -> Record:
        return self.records[self.position[id]]

    def next_on_line(self, id: int) -> Record | None:
        """The record that follows on the same line, or None at its end."""
        following = self._next[self.position[id]]
        return None if following < 0 else self.records[following]

    def previous_on_line(self, id: int) -> Record | None:
        """The record before this one on the same line, or None at its start."""
        before = self._previous[self.position[id]]
        return None if before < 0 else self.records[before]

    def issuers(self, record: Record) -> list[Record]:
        """Host records of its own rank that a device record names: it was launched after all of them."""
        if not record.on_device:
            return []
        sources = (self.records[self.position[id]] for id in record.after)
        return [source for source in sources if source.rank == record.rank and not source.on_device]

    def issuer(self, record: Record) -> Record | None:
        """The host record that was current when a device record was launched; None where the trace does not say.

        A task that has just been joined with others names their last records besides its own, which is then the one on
        the line that the work belongs to.
        """
        known = self.issuers(record)
        if len(known) < 2:
            return known[0] if known else None
        home = f"u{record.ubatch}" if record.ubatch >= 0 else "main"
        at_home = [source for source in known if source.line == home]
        return max(at_home or known, key=lambda source: source.id, default=None)

    def missing_edge(self, a: int, b: int) -> str:
        """What would have to exist for `a` to happen before `b`, in words: the wait that nobody made."""
        first, second = self.record(a), self.record(b)
        where = f"{first.line} of rank {first.rank}"
        until = f"{_spot(first)} on {where} and {_spot(second)} on {second.line} of rank {second.rank}"
        marker = self.next_on_line(a)
        while marker is not None and marker.kind != kinds.RECORD:
            marker = self.next_on_line(marker.id)
        if marker is None:
            return f"no event is recorded on {where} and waited for between {until}"
        event = marker.attrs.get("event", marker.name)
        return f"no wait on event {event} (recorded by #{marker.id}) between {until}"

    def _number_lines(self) -> None:
        by_rank: dict[int, dict[str, int]] = {}
        for record in self.records:
            if record.rank >= 0:
                lines = by_rank.setdefault(record.rank, {})
                lines.setdefault(record.line, len(lines))
        self._base: dict[int, tuple[int, int]] = {}
        total = 0
        for rank, lines in by_rank.items():
            self._base[rank] = (total, total + len(lines))
            total += len(lines)
        self._lines = {
            (rank, name): self._base[rank][0] + k for rank, names in by_rank.items() for name, k in names.items()
        }
        self._total = total

    def _walk(self) -> None:
        size = len(self.records)
        self._line = [0] * size
        self._count = [0] * size
        self._span: list[tuple[int, int]] = [(0, 0)] * size
        self._local: list[_Local] = [()] * size
        self._global = [0] * size
        self._next = [-1] * size
        self._previous = [-1] * size
        self._arrays: list[np.ndarray] = [np.zeros(self._total, dtype=np.int32)]
        self._joins: dict[tuple[int, int], int] = {}
        self._arrivals: dict[tuple[int, ...], int] = {}
        last = [-1] * self._total
        lines, base, position = self._lines, self._base, self.position
        for at, record in enumerate(self.records):
            if record.rank < 0:
                self._line[at] = -1
                self._global[at] = self._arrival(self._sources(record, at))
                continue
            line = lines[record.rank, record.line]
            span = base[record.rank]
            before = last[line]
            if before < 0:
                local, shared, count = (0,) * (span[1] - span[0]), 0, 1
            else:
                local, shared, count = self._local[before], self._global[before], self._count[before] + 1
                self._next[before] = at
                self._previous[at] = before
            last[line] = at
            self._line[at], self._count[at], self._span[at] = line, count, span
            after = record.after
            if len(after) > _MANY:
                after, shared_part = self._split(record, at)
                shared = self._join(shared, self._arrival(shared_part))
                local = self._merged_with(shared, local, span)
            foreign: list[int] = []
            for id in after:
                source = position.get(id, size)
                if source >= at:
                    raise _forward_edge(record, id)
                other = self._line[source]
                if other < 0:
                    foreign.append(source)
                elif not span[0] <= other < span[1]:
                    if self._arrays[shared][other] < self._count[source]:
                        foreign.append(source)
                elif other != line and local[other - span[0]] < self._count[source]:
                    local = self._seen(local, source, span[0])
                    shared = self._join(shared, self._global[source])
            if foreign:
                shared = self._join(shared, self._arrival(tuple(foreign)))
                local = self._merged_with(shared, local, span)
            self._local[at], self._global[at] = local, shared

    def _merged_with(self, shared: int, local: _Local, span: tuple[int, int]) -> _Local:
        return tuple(map(max, local, self._arrays[shared][span[0] : span[1]].tolist()))

    def _split(self, record: Record, at: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(issuing records at the ends of `after`, sources between them as positions).

        The members of one collective come after the same arrivals, each after its own issuing record: without the
        latter the rest is equal for all of them, so its join is made once.
        """
        after, sources = record.after, self._sources(record, at)
        first, last = 0, len(after)
        while first < last and self._is_own_host(after[first], record.rank):
            first += 1
        while last > first and self._is_own_host(after[last - 1], record.rank):
            last -= 1
        return after[:first] + after[last:], sources[first:last]

    def _sources(self, record: Record, at: int) -> tuple[int, ...]:
        """Positions of what `record` comes after; all of them lie before it."""
        sources = tuple(self.position.get(id, at) for id in record.after)
        late = [id for id, source in zip(record.after, sources, strict=True) if source >= at]
        if late:
            raise _forward_edge(record, late[0])
        return sources

    def _reaches(self, at: int, bt: int) -> bool:
        """Whether meeting `at` comes before `bt`: by search, since a meeting lies on no line and has no entry."""
        seen, stack = {bt}, [bt]
        while stack:
            here = stack.pop()
            before = [self.position[id] for id in self.records[here].after]
            if self._previous[here] >= 0:
                before.append(self._previous[here])
            if at in before:
                return True
            fresh = [source for source in before if source > at and source not in seen]
            seen.update(fresh)
            stack += fresh
        return False

    def _is_own_host(self, id: int, rank: int) -> bool:
        source = self.records[self.position[id]]
        return source.rank == rank and not source.on_device

    def _seen(self, local: _Local, source: int, first: int) -> _Local:
        merged = list(map(max, local, self._local[source]))
        own = self._line[source] - first
        merged[own] = max(merged[own], self._count[source])
        return tuple(merged)

    def _join(self, a: int, b: int) -> int:
        if a == b or b == 0:
            return a
        if a == 0:
            return b
        key = (a, b) if a < b else (b, a)
        known = self._joins.get(key)
        if known is None:
            merged = np.maximum(self._arrays[a], self._arrays[b])
            if np.array_equal(merged, self._arrays[key[1]]):
                known = key[1]
            elif np.array_equal(merged, self._arrays[key[0]]):
                known = key[0]
            else:
                known = len(self._arrays)
                self._arrays.append(merged)
            self._joins[key] = known
        return known

    def _arrival(self, sources: tuple[int, ...]) -> int:
        if not sources:
            return 0
        if len(sources) == 1 and self._line[sources[0]] < 0:
            return self._global[sources[0]]
        known = self._arrivals.get(sources)
        if known is None:
            merged = self._arrays[self._global[sources[0]]].copy()
            for source in sources:
                np.maximum(merged, self._arrays[self._global[source]], out=merged)
                if self._line[source] < 0:
                    continue
                first, last = self._span[source]
                own = merged[first:last]
                np.maximum(own, self._local[source], out=own)
                line = self._line[source]
                merged[line] = max(merged[line], self._count[source])
            known = len(self._arrays)
            self._arrays.append(merged)
            self._arrivals[sources] = known
        return known


def _forward_edge(record: Record, id: int) -> UsageError:
    return UsageError.of("an edge names an earlier record", fix="record the trace again", record=record.id, after=id)


def _spot(record: Record) -> str:
    who = f"u{record.ubatch} " if record.ubatch >= 0 else ""
    name = record.point if record.point and record.kind != kinds.OP else record.name or record.point or record.kind
    return f"{who}{name} (#{record.id})"
