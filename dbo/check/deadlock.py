"""deadlock: lines that can never go on, from the `blocked` records at the end of a trace."""

from __future__ import annotations

from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.check.waitfor import Waiter, minimal_stuck_set, report
from dbo.errors import UsageError
from dbo.trace import Record, Trace, kinds

ID = "deadlock"
SENTENCE = "no line can run and the step is not over"
UNIT = "places where a line can stop"
READS = (
    kinds.BARRIER,
    kinds.BLOCKED,
    kinds.COLLECTIVE,
    kinds.HOST_WAIT,
    kinds.RECV,
    kinds.RESUME,
    kinds.WAIT,
    kinds.YIELD,
)
NEEDS = ()

_STOPS = frozenset(
    (kinds.BARRIER, kinds.YIELD, kinds.RESUME, kinds.WAIT, kinds.COLLECTIVE, kinds.RECV, kinds.HOST_WAIT, kinds.BLOCKED)
)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """One violation for the minimal stuck set, at its first line."""
    found = Findings(ID)
    found.checked = sum(record.kind in _STOPS for record in trace.records)
    blocked = list(trace.of_kind(kinds.BLOCKED))
    if blocked:
        waiters = [waiter_of(record) for record in blocked]
        core = minimal_stuck_set(waiters)
        first = core[0].node if core else waiters[0].node
        shown = [r for r in blocked if any(w.node == (r.rank, r.line) for w in core)] or blocked
        at = next(r for r in shown if (r.rank, r.line) == first)
        rest = (r.id for r in shown if r is not at)
        found.violate(report(waiters), at, *rest)
    return found


def waiter_of(record: Record) -> Waiter:
    """The `Waiter` that a `blocked` record describes.

    Its attribute `waits_for` holds the fields of `Waiter` by name; `what` and `needs` must be there, the rest may be.

    Raises:
        UsageError: a needed field is missing, or one is unknown.
    """
    given: dict[str, Any] = dict(need(record, "waits_for"))
    known = Waiter.__dataclass_fields__.keys() - {"rank", "line"}
    for name in ("what", "needs"):
        if name not in given:
            raise UsageError.of("waits_for holds what and needs", fix="record both", record=record.id, missing=name)
    if given.keys() - known:
        raise UsageError.of("waits_for holds fields of Waiter", fix="use those", unknown=sorted(given.keys() - known))
    given["needs"] = tuple((int(rank), str(line)) for rank, line in given["needs"])
    given["missing"] = tuple(given.get("missing", ()))
    where = {"ubatch": record.ubatch, "point": record.point, "layer": record.layer, "step": record.step}
    return Waiter(rank=record.rank, line=record.line, **{"src": record.src, **where, **given})
