"""swallowed-error: an error hangs its step, or is lost, or the step returns fewer rows than it owes.

Every raise is reported, in a ubatch or in a step that is not split. `handled` tells the promise kept (the step ended with
that first error and no thread was left) from the promise broken; a test that raises on purpose ignores the handled ones.
"""

from __future__ import annotations

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "swallowed-error"
SENTENCE = "an error does not end its step with that error, or a step returns a short batch"
UNIT = "ends of steps and errors"
READS = (kinds.ERROR, kinds.STEP_END)
NEEDS = (kinds.STEP_END,)

JUDGED_ELSEWHERE = frozenset(("PeerFailed", "StepDrift", "CaptureError"))
"""A peer's failure, whose error is judged on that rank; and what `collective-mismatch` and `graph-capture` name better."""


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Judges each step's end by its first error, its rows and its threads."""
    found = Findings(ID)
    first: dict[tuple[int, int], Record] = {}
    ends = {(record.rank, record.step): record for record in trace.of_kind(kinds.STEP_END)}
    for record in sorted(trace.of_kind(kinds.ERROR), key=lambda r: r.id):
        key = record.rank, record.step
        if record.attrs.get("type") in JUDGED_ELSEWHERE or (not _on_ubatch_line(record) and key not in ends):
            continue  # what is no runner's step has no end that could be missed
        first.setdefault(key, record)
    for key, error in first.items():
        found.checked += 1
        _judge_error(error, ends.get(key), found)
    for key, end in ends.items():
        found.checked += 1
        if key not in first:
            _judge_end(end, found)
    return found


def _judge_error(error: Record, end: Record | None, found: Findings) -> None:
    type_name, message = need(error, "type"), error.attrs.get("message", "")
    who = f"ubatch {error.ubatch} of rank {error.rank}" if error.ubatch >= 0 else f"rank {error.rank}"
    raised = f"{who} raised {type_name}: {message} in step {error.step}"
    if end is None:
        found.violate(f"{raised}, and the step never ended (hung)", error)
        return
    status, live = need(end, "status"), need(end, "live_threads")
    reported = str(end.attrs.get("error", ""))
    if status != "error":
        short = f"returned {need(end, 'rows')} of {need(end, 'expected_rows')} rows"
        found.violate(f"{raised}, and the step {short} as if nothing had happened", error, end.id)
    elif live:
        found.violate(f"{raised}, and the step ended with {live} of its threads still running", error, end.id)
    elif type_name not in reported and (not message or message not in reported):
        found.violate(f"{raised}, but the step ended with another error: {reported}", error, end.id)
    else:
        found.violate(f"{raised}; the step ended with that error (handled)", error, end.id, handled=True)


def _judge_end(end: Record, found: Findings) -> None:
    status = need(end, "status")
    where = f"step {end.step} of rank {end.rank}"
    live = need(end, "live_threads")
    if status == "ok" and need(end, "rows") != need(end, "expected_rows"):
        found.violate(f"{where} returned {end.attrs['rows']} rows instead of {end.attrs['expected_rows']}", end)
    if live:
        found.violate(f"{where} ended with {live} of its threads still running", end)


def _on_ubatch_line(record: Record) -> bool:
    return record.line[:1] == "u" and record.line[1:].isdigit()
