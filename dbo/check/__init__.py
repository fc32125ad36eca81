"""Detectors over traces: one file each, a registry, one judge.

A detector is a module with `ID`, `SENTENCE`, `UNIT` and `detect(trace, happens) -> Findings`; it sees nothing but the
trace. To add one, write the module and list it here; its place among causes is a line in `dbo.check.causes`.

_conforms            every detector keeps the detectors' contract: mypy holds each module against it here
buffer_reuse         ordered, but the bytes belong to somebody else by then
capacity             a size that a step can reach exceeds what was reserved for it
causes               which of several violations to name: one root often shows as many symptoms
choices              points where another schedule could have had another outcome
collective_mismatch  members of a communicator meet in different operations, shapes, types or tags
config               ranks run with different effective configurations
deadlock             lines that can never go on, from the `blocked` records at the end of a trace
dp_disagreement      ranks decide differently about one step, against the rules
empty_ubatch         a rank runs a ubatch without a real token
graph_capture        a capture does what captures forbid, or a step looks its graph up under another key or program
graph_stale          a replay uses an address or a value that was right at capture and is not any more
happens              happens-before over a trace: vector clocks in one pass, collapsed to what differs
hook_late            a receive hook runs after its owner has already launched a reader of what the hook completes
hook_lost            a registered receive hook is overwritten or dropped and never runs
hook_twice           a receive hook runs more than once
hooks                what became of every receive hook: shared by hook-lost, hook-late and hook-twice
ladder               steps that fall off the captured sizes, a part of no-overlap
low_latency          the rules of numbered low-latency calls, a part of buffer-reuse
metadata_slice       a field of a ubatch is not what its parent batch implies
no_overlap           right answers, nothing hidden
numeric              a number is further from its reference than it may be
order                the steady order of a layer, read back from a trace in the spelling of the overlap schedule's own listing
overlap              how much communication is hidden under compute, and how much the schedule itself would allow
padding_leak         padding rows are dispatched, write KV outside the null block
phases               the quick way to see that a buffer is free of races: its accesses fall into phases
report               judging a trace: all detectors, one verdict
slot_cycle           kernels that hold their SMs until all peers run them, launched in opposite orders on two ranks
stream_race          two accesses of one byte, one of them a write, with no order between them
stuck_yields         how often a ubatch that is stuck inside its step should have yielded by now
swallowed_error      an error hangs its step, or is lost, or the step returns fewer rows than it owes
two_awake            two ubatches of a rank hold the baton at once
unequal_yields       a ubatch handed the baton on another number of times than its schedule declares
verdict              the one place that makes verdicts
violation            what a detector hands back: the violations that it found, and how much it looked at
waitfor              the wait-for report: who is stuck, on what, and who could still have helped
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
