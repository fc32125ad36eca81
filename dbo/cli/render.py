"""A `CheckResult` as text and as one JSON object: the same facts, the same order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dbo.cli.rows import draw
from dbo.cli.terminal import paint
from dbo.job.types import CheckResult, Reference, StepReport
from dbo.registry import FaultInfo

if TYPE_CHECKING:
    from dbo.check.violation import Violation

MAX_RANKS_SHOWN = 8


def to_json(result: CheckResult) -> dict[str, Any]:
    """The object of `dbo check --json`; numbers that JSON cannot hold (NaN, infinity) become null."""
    data = asdict(result)
    data["verdict"] = result.verdict.name
    data["verdict_text"] = result.verdict.text
    data["exit"] = result.exit_code
    return _finite(data)


def text(result: CheckResult, *, colour: bool = False) -> str:
    """The report of `dbo check`: what was run, each step, a steady layer, overlap, invariants, the verdict."""
    parts = [
        _heading(result),
        *(f"warning: {warning}" for warning in result.warnings),
        _steps(result.steps),
        _layer(result),
        _overlap(result),
        _invariants(result),
        _reference(result.reference),
        f"forced drains inside layers: {result.forced_drains}",
        *(_violation(violation) for violation in result.violations),
        _verdict(result, colour),
        f"trace: {result.trace}" if result.trace is not None else "",
        f"seed: {result.seed}",
        f"replay: {result.replay}",
    ]
    return "\n".join(part for part in parts if part)


def fault_list(faults: Sequence[FaultInfo]) -> str:
    """One fault a line: its name, what it does, the backends and the DCP exchanges that it applies to."""
    width = max((len(fault.name) for fault in faults), default=0)
    return "\n".join(f"{f.name:<{width}}  {f.sentence} [{_where(f)}]" for f in faults)


def _where(fault: FaultInfo) -> str:
    if fault.exchanges:
        return f"DCP groups by {', '.join(fault.exchanges)}"
    return ", ".join(fault.backends) or "every backend"


def faults_json(faults: Sequence[FaultInfo]) -> list[dict[str, Any]]:
    """`--inject list --json`: the same as objects."""
    return [
        {"name": f.name, "sentence": f.sentence, "backends": list(f.backends), "exchanges": list(f.exchanges)}
        for f in faults
    ]


def _heading(result: CheckResult) -> str:
    return (
        f"dbo check: {result.ranks} ranks, {result.backend}, schedule {result.schedule}, world {result.world} "
        f"({result.mode}{', ' if result.device else ''}{result.device})\nmodel: {result.model}"
    )


def _steps(steps: Sequence[StepReport]) -> str:
    if not steps:
        return "steps: none"
    header = ("step", "phase", "votes", "split", "tokens", "padded", "graph", "slices")
    table = [header, *(_step_row(step) for step in steps)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(["", *lines, ""])


def _step_row(step: StepReport) -> tuple[str, ...]:
    slices = _by_rank(["|".join(f"{start}:{stop}" for start, stop in ubatches) for ubatches in step.slices])
    return (
        str(step.step),
        step.phase,
        _by_rank(["yes" if vote else "no" for vote in step.votes]),
        f"{step.ubatches} ubatches" if step.split else "no",
        _by_rank([str(count) for count in step.tokens]),
        _by_rank([str(count) for count in step.padded_tokens]),
        step.graph,
        slices if step.split else step.why,
    )


def _by_rank(values: Sequence[str]) -> str:
    shown = list(values[:MAX_RANKS_SHOWN])
    if len(values) > MAX_RANKS_SHOWN:
        shown.append(f"(+{len(values) - MAX_RANKS_SHOWN} ranks)")
    return " ".join(shown)


def _layer(result: CheckResult) -> str:
    if not result.order:
        split = any(step.split for step in result.steps)
        why = "the model has too few MoE layers" if split else "no step was split"
        return f"steady layer: none, {why}"
    lines = []
    if result.steady_layer is not None:
        layer = result.steady_layer
        lines += [f"steady layer {layer.layer} of step {layer.step} on rank {layer.rank}:"]
        lines += [f"  {line}" for line in draw({"Comp": layer.comp, "Comm": layer.comm})]
    exchanged = " (ubatches exchanged against the drawing: context 0 leads)" if result.order_exchanged else ""
    return "\n".join([*lines, f"  Order: {' '.join(result.order)}{exchanged}", ""])


def _overlap(result: CheckResult) -> str:
    overlap = result.overlap
    if overlap.hidden_share is None:
        split = any(step.split for step in result.steps)
        return f"overlap: not measured, {'no exchange takes time of its own here' if split else 'no step was split'}"
    ideal = "" if overlap.ideal_share is None else f" (the schedule's own ideal: {overlap.ideal_share:.1%})"
    return f"overlap: {overlap.hidden_share:.1%} of communication hidden{ideal}, {overlap.exposed_us:.1f} µs exposed"


def _invariants(result: CheckResult) -> str:
    invariants = result.invariants
    detectors = ", ".join(f"{name} {count}" for name, count in invariants.by_detector.items())
    return f"invariants: {invariants.checked} checked, {invariants.failed} failed" + (
        f" ({detectors})" if detectors else ""
    )


def _reference(reference: Reference) -> str:
    if reference.tokens_equal is None:
        return f"reference: not compared{': ' + reference.why_not if reference.why_not else ''}"
    equal = "equal to" if reference.tokens_equal else "DIFFERENT from"
    error = (
        "" if reference.max_rel_err is None else f", largest relative error of the logits {reference.max_rel_err:.2g}"
    )
    ties = f" ({reference.ties} requests part at a tie of the reference)" if reference.ties else ""
    lines = [f"reference: greedy tokens {equal} the same model unsplit on one rank{ties}{error}"]
    if reference.twin_failed:
        lines.append(reference.twin_failed)
    if reference.serial_equal is not None:
        bits = "bit-equal to" if reference.serial_equal else "NOT bit-equal to"
        lines.append(f"serial twin: logits {bits} the same halves one after another")
    if reference.order_as_simulated is not None:
        lines.append(f"order: {'as' if reference.order_as_simulated else 'NOT as'} in world sim")
    return "\n".join(lines)


def _violation(violation: Violation) -> str:
    named = (("rank", violation.rank), ("ubatch", violation.ubatch), ("step", violation.step))
    where = " ".join(f"{name} {value}" for name, value in named if value >= 0)
    lines = [f"\nviolation {violation.id}" + (f" ({where})" if where else "")]
    lines += [f"    {line}" for line in violation.sentence.splitlines()]
    lines += [f"    replay: {violation.replay}"] if violation.replay else []
    return "\n".join(lines)


def _verdict(result: CheckResult, colour: bool) -> str:
    return "\nverdict: " + paint(result.verdict.text, "green" if result.verdict.good else "red", on=colour)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
