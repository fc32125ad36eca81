"""capacity: a size that a step can reach exceeds what was reserved for it, or a reservation grows after the lock."""

from __future__ import annotations

from collections.abc import Sequence

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "capacity"
SENTENCE = "a size that a step reaches exceeds what was reserved for it"
UNIT = "uses and reservations"
READS = (kinds.LOCK, kinds.RESERVE, kinds.USE)
NEEDS = (kinds.RESERVE,)

_Key = tuple[int, str, str]


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Every use against the reservation before it, by rank, thing and slot; sizes alive together are summed."""
    found = Findings(ID)
    reserved: dict[_Key, Record] = {}
    locked: dict[tuple[int, str], Record] = {}
    for record in sorted(trace.of_kind(kinds.RESERVE, kinds.USE, kinds.LOCK), key=lambda r: r.id):
        what = need(record, "what")
        if record.kind == kinds.LOCK:
            locked[record.rank, what] = record
            continue
        found.checked += 1
        key = (record.rank, what, str(need(record, "slot")))
        if record.kind == kinds.RESERVE:
            _judge_growth(record, reserved.get(key), locked.get((record.rank, what)), found)
            reserved[key] = record
        else:
            _judge_use(record, reserved.get(key), found)
    return found


def _judge_growth(record: Record, before: Record | None, lock: Record | None, found: Findings) -> None:
    if lock is not None and (before is None or _size(record) > _size(before)):
        was = 0 if before is None else _size(before)
        found.violate(
            f"{_what(record)} grows from {was} to {_size(record)} after the lock (#{lock.id})", record, lock.id
        )


def _judge_use(record: Record, reserved: Record | None, found: Findings) -> None:
    if reserved is None:
        found.violate(f"{_what(record)} is used ({_size(record)}) without a reservation", record)
    elif _size(record) > _size(reserved):
        together = f" ({' + '.join(map(str, record.attrs['size']))} alive together)" if _many(record) else ""
        found.violate(
            f"{_what(record)} is used up to {_size(record)}{together} in step {record.step}; reserved are "
            f"{_size(reserved)} (#{reserved.id}): reserve the largest size that a step can reach",
            record,
            reserved.id,
        )


def _size(record: Record) -> int:
    size = need(record, "size")
    return sum(size) if _many(record) else int(size)


def _many(record: Record) -> bool:
    return isinstance(record.attrs["size"], Sequence)


def _what(record: Record) -> str:
    return f"{record.attrs['what']} {record.attrs['slot']} of rank {record.rank}"
