"""From outcomes, trace and judgement to the result that the command line prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dbo.check import measure
from dbo.check.order import matches_seed, steady_records
from dbo.check.report import Report
from dbo.check.verdict import inconclusive, proved
from dbo.config import DBOConfig
from dbo.engine.runner import StepOutcome
from dbo.errors import PeerFailed
from dbo.export.rows import layer_spans
from dbo.job.inputs import replay_line
from dbo.job.reference import steady_order_of
from dbo.job.types import CheckRequest, CheckResult, Invariants, OverlapFigures, Reference, SteadyLayer, StepReport
from dbo.schedule import Schedule
from dbo.trace import Trace, kinds


def step_reports(outcomes: Sequence[Sequence[StepOutcome]]) -> tuple[StepReport, ...]:
    """One report a step over all ranks, from rank 0's decision and every rank's column; or what made it fail."""
    by_step: dict[int, list[StepOutcome]] = {}
    failed: dict[int, BaseException] = {}
    for rank_outcomes in outcomes:
        for outcome in rank_outcomes:
            if outcome.error is not None:
                if isinstance(failed.get(outcome.step), PeerFailed | None):  # what began it, not who lost a peer
                    failed[outcome.step] = outcome.error
            elif outcome.decision is not None and outcome.column is not None:
                by_step.setdefault(outcome.step, []).append(outcome)
    reports = [_step_report(step, found) for step, found in by_step.items() if step not in failed]
    reports += [_failed_report(step, error) for step, error in failed.items()]
    return tuple(sorted(reports, key=lambda report: report.step))


def _failed_report(step: int, error: BaseException) -> StepReport:
    why = f"{type(error).__name__}; what it was for is scheduled again"
    return StepReport(step=step, phase="failed", split=False, tokens=(), padded_tokens=(), ubatches=0, why=why)


def _step_report(step: int, found: Sequence[StepOutcome]) -> StepReport:
    decision = found[0].decision
    columns = [o.column for o in found]
    assert decision is not None
    busy = [c for c in columns if c is not None and c.real_tokens]
    decoding = [c.uniform_query_len > 0 for c in busy]
    phase = "idle" if not busy else "decode" if all(decoding) else "prefill" if not any(decoding) else "mixed"
    return StepReport(
        step=step,
        phase=phase,
        split=decision.split,
        tokens=tuple(c.real_tokens for c in columns if c is not None),
        padded_tokens=tuple(decision.num_tokens_padded),
        ubatches=decision.num_ubatches,
        votes=tuple(c.vote for c in columns if c is not None),
        slices=tuple(o.slices for o in found) if decision.split else (),
        graph=decision.cudagraph_mode,
        why=decision.reason,
    )


def _untested(config: DBOConfig, steps: Sequence[StepReport], ideal_share: float | None) -> list[str]:
    """What a good verdict does not speak of, though DBO is on."""
    if config.enable_dbo and not any(step.split for step in steps):
        return [
            "no step was split, so nothing is said about overlap; give longer prompts, or more, or lower "
            "--dbo-prefill-token-threshold and --dbo-decode-token-threshold"
        ]
    if ideal_share == 0.0:
        return ["this schedule hides nothing: no exchange has anything to run beside it"]
    return []


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run of the main job that is over and judged.

    Attributes:
        folder: the model's. written: where the trace lies, or why nowhere.
        report: the detectors'. reference: what the comparisons with the reference, and with twins, gave.
        warnings: of the configuration.
    """

    request: CheckRequest
    config: DBOConfig
    folder: Path
    schedule: Schedule
    trace: Trace
    report: Report
    steps: Sequence[StepReport]
    reference: Reference
    written: str
    warnings: Sequence[str]


def result_of(run: FinishedRun) -> CheckResult:
    """What the command line prints of it."""
    replay = replay_line(run.request)
    order = steady_order_of(run.trace) if any(step.split for step in run.steps) else ()
    overlap = measure(run.trace)
    verdict = run.report.verdict
    if run.request.world != "sim" and verdict.name == "proved":
        verdict = proved(synchronisation_only=True)  # a device's trace says nothing of the bytes that are touched
    if verdict.good and run.reference.twin_failed:
        verdict = inconclusive(run.reference.twin_failed)
    if verdict.good and run.reference.serial_equal is False:
        verdict = inconclusive("the logits differ from those of the serial halves, and no detector says why")
    if verdict.good and run.reference.order_as_simulated is False:
        verdict = inconclusive("the steady order is not the simulator's, and no detector says why")
    untested = _untested(run.config, run.steps, overlap.ideal_share)
    return CheckResult(
        verdict=verdict,
        violations=tuple(replace(v, replay=replay) for v in run.report.violations),
        ranks=run.config.num_ranks,
        steps=tuple(run.steps),
        order=order,
        order_exchanged=matches_seed(order) == "exchanged",
        steady_layer=_steady_layer(run.trace) if order else None,
        overlap=OverlapFigures(
            hidden_share=overlap.hidden_share, ideal_share=overlap.ideal_share, exposed_us=overlap.exposed_us
        ),
        invariants=Invariants(
            checked=sum(run.report.checked.values()),
            failed=sum(run.report.failed.values()),
            by_detector=run.report.checked,
        ),
        reference=run.reference,
        forced_drains=forced_drains(run.trace),
        replay=replay,
        trace=run.written,
        seed=run.request.seed,
        world=run.request.world,
        mode=run.request.mode,
        device=_device(run.request, run.trace),
        backend=run.config.all2all_backend,
        schedule=run.schedule.name,
        model=str(run.folder),
        warnings=(*run.warnings, *untested),
    )


def _device(request: CheckRequest, trace: Trace) -> str:
    shared = ", shared by all ranks: for correctness, never for speed" if request.share_device else ""
    return f"{trace.meta['device']}{shared}" if "device" in trace.meta else ""


def _steady_layer(trace: Trace) -> SteadyLayer:
    comp, comm = layer_spans(trace)
    first = steady_records(trace)[0]
    return SteadyLayer(rank=first.rank, step=first.step, layer=first.layer, comp=comp, comm=comm)


def forced_drains(trace: Trace) -> int:
    """Host waits for a device line that the program did not declare."""
    return sum(not r.attrs["declared"] for r in trace.of_kind(kinds.HOST_WAIT))
