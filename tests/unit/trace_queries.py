"""What the detector tests ask of a trace."""

from __future__ import annotations

from typing import Any

from dbo.check import DETECTORS, judge
from dbo.check.happens import HappensBefore
from dbo.check.violation import Violation
from dbo.trace import Record, Trace


def only(trace: Trace, kind: str, **wanted: Any) -> Record:
    """The first record of `kind` with the given fields or attributes."""
    for record in trace.of_kind(kind):
        if all(getattr(record, k, record.attrs.get(k)) == v for k, v in wanted.items()):
            return record
    raise AssertionError(f"the good run has no {kind} with {wanted}")


def found(trace: Trace, id: str) -> list[Violation]:
    (detector,) = [d for d in DETECTORS if d.ID == id]
    return detector.detect(trace, HappensBefore(trace)).violations


def named(trace: Trace, id: str) -> Violation:
    """The only violation of `id`; the whole verdict names it too."""
    (violation,) = found(trace, id)
    assert judge(trace).verdict.text == f"violated({id})"
    return violation
