"""Detectors over traces: one file each, a registry, one judge.

A detector is a module with `ID`, `SENTENCE`, `UNIT` and `detect(trace, happens) -> Findings`; it sees nothing but the
trace. To add one, write the module and list it here; its place among causes is a line in `dbo.check.causes`.
"""

from __future__ import annotations

from types import ModuleType

from dbo.check import (
    buffer_reuse,
    capacity,
    collective_mismatch,
    config,
    deadlock,
    dp_disagreement,
    empty_ubatch,
    graph_capture,
    graph_stale,
    hook_late,
    hook_lost,
    hook_twice,
    metadata_slice,
    no_overlap,
    numeric,
    padding_leak,
    slot_cycle,
    stream_race,
    swallowed_error,
    two_awake,
    unequal_yields,
)
from dbo.check.happens import HappensBefore
from dbo.check.overlap import Overlap, measure
from dbo.check.report import Report, judge
from dbo.check.verdict import Verdict
from dbo.check.violation import Findings, Violation

DETECTORS: list[ModuleType] = [
    config,
    dp_disagreement,
    empty_ubatch,
    metadata_slice,
    capacity,
    graph_capture,
    graph_stale,
    padding_leak,
    unequal_yields,
    two_awake,
    hook_lost,
    hook_twice,
    hook_late,
    slot_cycle,
    swallowed_error,
    collective_mismatch,
    buffer_reuse,
    stream_race,
    deadlock,
    numeric,
    no_overlap,
]
"""Every detector, in the order of `dbo.check.causes`. A world that judges more appends to it."""

__all__ = [
    "DETECTORS",
    "Findings",
    "HappensBefore",
    "Overlap",
    "Report",
    "Verdict",
    "Violation",
    "judge",
    "measure",
]
