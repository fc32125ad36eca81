"""Hand-made traces: a few words a record, times and edges filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dbo.trace import Access, BufferInfo, Record, Trace


class TraceBuilder:
    """Appends records in topological order; every method returns the id of the record that it added.

    A record starts when its line is free and everything it comes after has ended, unless `t` says otherwise. Defaults
    given to the constructor or to `at` (rank, step, layer, ubatch) hold until `at` changes them.
    """

    def __init__(self, *, ranks: int = 1, complete: bool = True, **meta: Any) -> None:
        self.trace = Trace(meta={"ranks": ranks, "complete": complete, "mode": "ordering", **meta})
        self._defaults: dict[str, int] = {"rank": 0, "step": 0, "layer": -1, "ubatch": -1}
        self._free: dict[tuple[int, str], float] = {}
        self._ends: dict[int, float] = {}
        self._ids = 0

    def at(self, **defaults: int) -> TraceBuilder:
        self._defaults.update(defaults)
        return self

    def buffer(self, name: str, nbytes: int = 64, *, owner: str = "", rank: int | None = None) -> int:
        id = len(self.trace.buffers) + 1
        where = self._defaults["rank"] if rank is None else rank
        self.trace.buffers[id] = BufferInfo(id, where, name, nbytes, owner)
        return id

    def skip_ids(self, count: int) -> int:
        """Reserve ids, so that a record placed later can have been issued earlier. Returns the first one."""
        first = self._ids
        self._ids += count
        return first

    def add(
        self,
        kind: str,
        line: str,
        name: str = "",
        *,
        after: Sequence[int] = (),
        reads: Sequence[int | Access] = (),
        writes: Sequence[int | Access] = (),
        t: float | None = None,
        dur: float = 0.0,
        point: str = "",
        src: str = "",
        id: int | None = None,
        rank: int | None = None,
        step: int | None = None,
        layer: int | None = None,
        ubatch: int | None = None,
        **attrs: Any,
    ) -> int:
        given = {"rank": rank, "step": step, "layer": layer, "ubatch": ubatch}
        where = {key: self._defaults[key] if value is None else value for key, value in given.items()}
        if id is None:
            id = self._ids
            self._ids += 1
        key = (where["rank"], line)
        start = max([self._free.get(key, 0.0), *(self._ends[x] for x in after)]) if t is None else t
        record = Record(
            id=id,
            line=line,
            kind=kind,
            name=name or kind,
            t_us=start,
            dur_us=dur,
            point=point,
            src=src,
            after=tuple(after),
            reads=self._accesses(reads),
            writes=self._accesses(writes),
            attrs=attrs,
            **where,
        )
        self._free[key] = self._ends[id] = record.end_us
        self.trace.records.append(record)
        return id

    def op(self, name: str, *, line: str = "compute", dur: float = 1.0, **rest: Any) -> int:
        return self.add("op", line, name, dur=dur, **rest)

    def _accesses(self, given: Sequence[int | Access]) -> tuple[Access, ...]:
        return tuple(x if isinstance(x, Access) else Access.interval(x, 0, self.trace.buffers[x].nbytes) for x in given)
