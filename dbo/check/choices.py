"""Points where another schedule could have had another outcome. A run without one stands for all of its schedules.

Three sources: records of kind "choice", which the simulator writes where its answer may depend on the schedule; enqueues on one
stream by two host lines whose order nothing fixes; and waits for an event that another host line records, with nothing
that puts the record first (a wait for an event that was never recorded does nothing, so the order decides).
"""

from __future__ import annotations

from dataclasses import dataclass

from dbo.check.happens import HappensBefore
from dbo.trace import Record, Trace, kinds


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One observed choice point: what was open, and the records that show it."""

    what: str
    records: tuple[int, ...]


def observed(trace: Trace, happens: HappensBefore) -> list[Choice]:
    """All choice points of a trace, in order."""
    found = [
        Choice(what=record.attrs.get("what", record.name), records=(record.id,))
        for record in trace.of_kind(kinds.CHOICE)
        if not _closed(record, happens)
    ]
    found += _recorded_in_no_order(trace, happens)
    last: dict[tuple[int, str], tuple[Record, Record | None]] = {}
    for record in trace.records:
        if not record.on_device or record.line == "net":  # transfers on "net" are nobody's queue
            continue
        other = happens.issuer(record)
        before, issuer = last.get((record.rank, record.line), (None, None))
        if before is not None and not _enqueued_in_order(issuer, other, record, happens):
            found.append(Choice(what=_words(before, record, happens), records=(before.id, record.id)))
        last[record.rank, record.line] = record, other
    return found


def _closed(record: Record, happens: HappensBefore) -> bool:
    """Whether what would have decided otherwise is ordered before the answer."""
    unless = int(record.attrs.get("unless", -1))
    return unless in happens.position and happens.ordered(unless, record.id)


def _recorded_in_no_order(trace: Trace, happens: HappensBefore) -> list[Choice]:
    """Waits that found a record which, in another schedule, is made after them."""
    found = []
    for wait in trace.of_kind(kinds.WAIT):
        for marker in (happens.record(id) for id in wait.after if id in happens.position):
            if marker.kind != kinds.RECORD or marker.rank != wait.rank:
                continue
            if not _enqueued_in_order(happens.issuer(marker), happens.issuer(wait), wait, happens):
                what = (
                    f"{wait.name} (#{wait.id}) on {wait.line} of rank {wait.rank} waits for a record (#{marker.id}) that "
                    "another host line makes, and nothing puts the record first"
                )
                found.append(Choice(what=what, records=(marker.id, wait.id)))
    return found


def _enqueued_in_order(issuer: Record | None, other: Record | None, second: Record, happens: HappensBefore) -> bool:
    """Whether what `issuer` launched is enqueued before `second`, which `other` launched, in every execution.

    An operation is launched between its host record and the next one of that line, so the next one has to come before
    something that `second` is launched after.
    """
    if issuer is None or other is None:
        return False
    if issuer.line == other.line:
        return True
    following = happens.next_on_line(issuer.id)
    if following is None:
        return False
    return any(
        following.id == source.id or happens.ordered(following.id, source.id) for source in happens.issuers(second)
    )


def _words(before: Record, record: Record, happens: HappensBefore) -> str:
    if not happens.issuers(record):
        return f"nothing says which host line issued #{record.id} on {record.line} of rank {record.rank}"
    return (
        f"{before.name} (#{before.id}) and {record.name} (#{record.id}) are enqueued on {record.line} of rank "
        f"{record.rank} by two host lines in no fixed order"
    )
