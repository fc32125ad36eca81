"""Judging a trace: all detectors, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from dbo.check import verdict
from dbo.check.causes import in_causal_order
from dbo.check.choices import Choice, observed
from dbo.check.happens import HappensBefore
from dbo.check.verdict import Verdict
from dbo.check.violation import Findings, Violation
from dbo.trace import Trace
from dbo.trace.collector import collector_paused


@dataclass(frozen=True, kw_only=True)
class Report:
    """What all detectors together say about one trace.

    Attributes:
        verdict: see `dbo.check.verdict`.
        violations: causes before effects.
        checked: by fault id, how many things its detector looked at (each in its own unit).
        failed: by fault id, how many violations it found.
        choices: observed choice points; a run without one stands for all of its schedules.
    """

    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    checked: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()

    @property
    def invariants(self) -> dict[str, int]:
        """{checked, failed} over all detectors."""
        return {"checked": sum(self.checked.values()), "failed": sum(self.failed.values())}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for `--json`."""
        by_id = {id: {"checked": self.checked[id], "failed": self.failed[id]} for id in self.checked}
        return {
            "verdict": self.verdict.name,
            "verdict_text": self.verdict.text,
            "invariants": {**self.invariants, "by_id": by_id},
            "choices": len(self.choices),
            "violations": [
                {
                    "id": v.id,
                    "sentence": v.sentence,
                    "rank": v.rank,
                    "ubatch": v.ubatch,
                    "step": v.step,
                    "records": list(v.records),
                    "replay": v.replay,
                    "handled": v.handled,
                }
                for v in self.violations
            ],
        }


def judge(
    trace: Trace,
    *,
    detectors: Sequence[ModuleType] | None = None,
    expect_raise: bool = False,
    happens: HappensBefore | None = None,
) -> Report:
    """Run `detectors` (default: all of `dbo.check.DETECTORS`) over a trace.

    Args:
        expect_raise: the program raises on purpose: errors that were handled as promised are no violation.
        happens: the order of `trace`, if it is known already.

    Raises:
        UsageError: the trace is not in topological order, or a record lacks an attribute that a detector needs.
    """
    if detectors is None:
        from dbo.check import DETECTORS

        detectors = DETECTORS
    with collector_paused():
        happens = happens or HappensBefore(trace)
        findings: list[Findings] = [detector.detect(trace, happens) for detector in detectors]
    if expect_raise:
        for one in findings:
            one.violations = [v for v in one.violations if not v.handled]
    violations = in_causal_order(v for one in findings for v in one.violations)
    choices = observed(trace, happens)
    checked = {one.id: one.checked for one in findings}
    return Report(
        verdict=verdict.of_run(
            violations=violations,
            checked=sum(checked.values()),
            complete=bool(trace.meta.get("complete", False)),
            choices=len(choices),
            why_cut=str(trace.meta.get("why_cut", "")),
        ),
        violations=tuple(violations),
        checked=checked,
        failed={one.id: len(one.violations) for one in findings},
        choices=tuple(choices),
    )
