"""One trace for every world: what happened, on which line, after what, touching which bytes.

A trace is a list of `Record`s in an order in which every edge points backwards (a topological order), so a single pass
computes happens-before. A record lies on one **line** of one rank and follows the previous record of that line:

    host lines    "main" (the rank's own task), "u0", "u1", … (ubatch threads)
    device lines  "compute", "comm", "side" (streams), "net" (transfers that run beside the streams)

and it follows every record named in `after`. A record of rank -1 (`meet`) lies on no line: it has only `after`.

Every kind of record, who writes it and what it carries, is a value in `dbo.trace.kinds`.

Device records of kernels that need SMs all at once carry `sms`; those that keep them until their peers run also
`holds_until_peers`, `group` and `index`. Members of an all-to-all carry `sends` and `receives` (rows, by peer).

`record.id` is the order of *issue* (a program launches an operation long before it runs); the position in
`Trace.records` is the order in which things took effect.

accesses   arithmetic on `dbo.trace.Access`: building strided byte boxes and asking
collector  python's cyclic collector, out of the way while something large is built of which nothing can be freed yet
kind       what a kind of record is: its name, who writes it and when
kinds      the contract of the trace: every kind of record
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SCHEMA = "dbo.trace/1"

DEVICE_LINES = ("compute", "comm", "side", "net")


class Access(NamedTuple):
    """Bytes of a buffer: `offset` and the strided box (`sizes`, `strides`, all in bytes, innermost is a byte run).

    A plain interval is `Access(buffer, start, (length,), (1,))`.
    """

    buffer: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def interval(cls, buffer: int, start: int, stop: int) -> Access:
        """The bytes [start, stop) of `buffer`."""
        return cls(buffer, start, (stop - start,), (1,))

    @property
    def stop(self) -> int:
        """One past the last byte that may be touched."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + 1


class BufferInfo(NamedTuple):
    """A storage of one rank. `owner` says whose data it may hold, for example "u0" or "" (anybody)."""

    id: int
    rank: int
    name: str
    nbytes: int
    owner: str = ""
    generation: int = 0


@dataclass(slots=True)
class Record:
    """One thing that happened. Times are in microseconds of the world's clock."""

    id: int
    rank: int
    line: str
    kind: str
    name: str
    t_us: float = 0.0
    dur_us: float = 0.0
    step: int = -1
    layer: int = -1
    ubatch: int = -1
    point: str = ""
    after: tuple[int, ...] = ()
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    src: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def end_us(self) -> float:
        return self.t_us + self.dur_us

    @property
    def on_device(self) -> bool:
        return self.line in DEVICE_LINES


@dataclass(slots=True)
class Trace:
    """Records in topological order, the buffers they name, and what the run was (`meta`).

    `meta` holds at least: world, ranks, mode ("ordering"|"numeric"), schedule (its text), backend, seed, ubatches,
    complete (False when the run was cut short by a deadlock or a limit), and `config`, the effective configuration.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    # Not shown: a failing assertion about a run must not print a hundred thousand records.
    records: list[Record] = field(default_factory=list, repr=False)
    buffers: dict[int, BufferInfo] = field(default_factory=dict, repr=False)

    def of_kind(self, *kinds: str) -> Iterator[Record]:
        """Records of the given kinds, in order."""
        wanted = frozenset(kinds)
        return (r for r in self.records if r.kind in wanted)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form; `from_json` reads it back to an equal trace."""
        return {
            "schema": SCHEMA,
            "meta": self.meta,
            "buffers": [list(buffer) for buffer in self.buffers.values()],
            "records": [_pack(r) for r in self.records],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        """Read what `to_json` wrote.

        Raises:
            ValueError: another schema version, or no trace at all.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"a trace has schema={SCHEMA}: schema={data.get('schema')!r}; record it again")
        buffers = {row[0]: BufferInfo(*row) for row in data["buffers"]}
        return cls(meta=data["meta"], records=[_unpack(row) for row in data["records"]], buffers=buffers)

    def canonical_bytes(self) -> bytes:
        """The trace as bytes that depend on nothing but the run: sorted keys, no white space."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()


def _pack(record: Record) -> list[Any]:
    return [
        record.id,
        record.rank,
        record.line,
        record.kind,
        record.name,
        round(record.t_us, 4),
        round(record.dur_us, 4),
        record.step,
        record.layer,
        record.ubatch,
        record.point,
        list(record.after),
        [[a.buffer, a.offset, list(a.sizes), list(a.strides)] for a in record.reads],
        [[a.buffer, a.offset, list(a.sizes), list(a.strides)] for a in record.writes],
        record.src,
        record.attrs,
    ]


def _unpack(row: list[Any]) -> Record:
    *head, after, reads, writes, src, attrs = row
    record = Record(*head)
    record.after, record.reads, record.writes = tuple(after), _accesses(reads), _accesses(writes)
    record.src, record.attrs = src, attrs
    return record


def _accesses(rows: list[Any]) -> tuple[Access, ...]:
    return tuple(Access(buffer, offset, tuple(sizes), tuple(strides)) for buffer, offset, sizes, strides in rows)
