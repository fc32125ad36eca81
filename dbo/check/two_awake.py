"""two-awake: two ubatches of a rank hold the baton at once, in this execution or in another one of the same order."""

from __future__ import annotations

from dataclasses import dataclass

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings
from dbo.trace import Record, Trace, kinds

ID = "two-awake"
SENTENCE = "two ubatches of a rank can run at once, since nothing puts one's hand-off before the other's start"
UNIT = "turns of the baton"
READS = (kinds.RESUME, kinds.UBATCH_ENTER, kinds.UBATCH_EXIT, kinds.YIELD)
NEEDS = (kinds.UBATCH_ENTER,)


@dataclass
class _Turn:
    start: Record
    end: Record | None = None


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Each turn, from enter or resume to yield or exit, must end before the next one of its rank starts."""
    found = Findings(ID)
    last: dict[int, _Turn] = {}
    open_turns: dict[tuple[int, int], _Turn] = {}
    for record in trace.of_kind(kinds.UBATCH_ENTER, kinds.RESUME, kinds.YIELD, kinds.UBATCH_EXIT):
        key = (record.rank, record.ubatch)
        if record.kind in (kinds.YIELD, kinds.UBATCH_EXIT):
            turn = open_turns.pop(key, None)
            if turn is not None:
                turn.end = record
            continue
        before = last.get(record.rank)
        if before is not None:
            found.checked += 1
            _compare(before, record, happens, found)
        last[record.rank] = open_turns[key] = _Turn(record)
    return found


def _compare(before: _Turn, start: Record, happens: HappensBefore, found: Findings) -> None:
    who = f"ubatch {start.ubatch} of rank {start.rank} starts (#{start.id})"
    if before.end is None:
        found.violate(
            f"{who} while ubatch {before.start.ubatch} still holds the baton (since #{before.start.id})",
            start,
            before.start.id,
        )
    elif not happens.ordered(before.end.id, start.id):
        found.violate(
            f"{who} but nothing puts that after the hand-off of ubatch {before.end.ubatch} (#{before.end.id})",
            start,
            before.end.id,
        )
