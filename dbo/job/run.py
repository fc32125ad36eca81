"""The main job: a model folder and prompts through simulated ranks, threads and streams, to a verdict.

    request → configuration → model folder → prompts → launch → trace → detectors → comparison with the reference → result

The defaults make a run in which some steps split and some do not, in a few seconds on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from dbo import registry
from dbo.check import judge
from dbo.config import DBOConfig, Workload, effective, validate
from dbo.errors import NotAvailable, UsageError
from dbo.export.chrome import write_trace
from dbo.job.defaults import flags_of
from dbo.job.inputs import (
    SIM_CAPABILITIES,
    fault_of,
    generated_folder,
    programs_of,
    prompts_of,
    schedule_of,
    scratch,
    shape_of,
    spread,
)
from dbo.job.rank import FolderWeights, RankJob, RankMain
from dbo.job.reference import first_error, note_reference, reference_of, with_twins
from dbo.job.report import FinishedRun, result_of, step_reports
from dbo.job.types import CheckRequest, CheckResult, Progress
from dbo.model.config import load_model_config
from dbo.schedule import to_text
from dbo.schedule import validate as validate_schedule


def run(request: CheckRequest, progress: Progress) -> CheckResult:
    """Run one `dbo check`.

    Raises:
        UsageError: the request cannot work; one sentence says why.
        NotAvailable: this build or machine does not have what it asks for.
    """
    world = registry.load(request.world)
    config = DBOConfig(**flags_of(request))
    machine = registry.machine(
        request.world, device=request.device, ranks=config.num_ranks, share_device=request.share_device
    )
    folder = request.model or generated_folder(request, progress)
    model_config = load_model_config(folder)
    schedule = schedule_of(config)
    prompts = prompts_of(request, config, folder, model_config)
    warnings = validate(
        config,
        shape_of(model_config),
        device=machine.limits if machine else None,
        capabilities=machine.capabilities if machine else SIM_CAPABILITIES,
        workload=Workload(prefill_tokens=sum(map(len, prompts)), decode_tokens=request.steps * len(prompts)),
    )
    if config.enable_dbo:
        validate_schedule(schedule, backend=config.all2all_backend, num_ubatches=config.num_ubatches)
    requests = spread(prompts, config.data_parallel_size, request.steps + 1)
    weights_of = (
        None
        if request.mode == "ordering"
        else FolderWeights(folder=str(folder), config=model_config, dtype=config.dtype)
    )
    job = RankJob(
        config=config,
        model_config=model_config,
        schedule=schedule,
        requests=requests,
        weights_of=weights_of,
        program_of=programs_of(request, config),
        keep_logits=weights_of is not None,
    )

    path = request.trace or scratch() / f"check-{request.seed}.json"
    progress.stage(f"running {config.num_ranks} ranks in world {request.world} ({request.mode})")
    options = machine.options if machine else {}
    launched = world.launch(RankMain(job), ranks=config.num_ranks, mode=request.mode, **options)
    launched.trace.meta |= {
        "backend": config.all2all_backend,
        "schedule": to_text(schedule),
        "ubatches": config.num_ubatches,
        "seed": request.seed,
        "config": effective(config),
    }
    if not launched.trace.meta.get("complete", False) and (cut := first_error(launched.errors)):
        launched.trace.meta["why_cut"] = cut
    outcomes = [value or [] for value in launched.values]
    if launched.trace.meta.get("complete", False) and any(not rank[-1].all_idle for rank in outcomes if rank):
        most = max(map(len, outcomes))
        launched.trace.meta |= {"complete": False, "why_cut": f"requests are left after {most} steps"}
    _raise_usage(launched.errors, request)
    steps = step_reports(outcomes)
    for step in steps:
        progress.step(step)

    progress.stage("judging the trace")
    report = judge(launched.trace)
    if request.inject is not None and report.verdict.good:
        # Nothing was found. Either a detector is blind, or the run has no place for this fault: the latter is refused.
        fault, where = fault_of(request, request.inject)
        fault.require_effect(launched.trace, where)
    reference = reference_of(job, requests, outcomes, progress)
    if report.verdict.good and reference.tokens_equal is False:
        note_reference(launched.trace, reference, config.dtype)
        report = judge(launched.trace)
    if machine:
        reference = with_twins(job, world, options, outcomes, launched.trace, reference, progress)
    try:
        written = str(write_trace(launched.trace, path))
    except OSError as error:  # what was found holds without the file
        written = f"not written: {error.strerror or error}"
    return result_of(
        FinishedRun(
            request=request,
            config=config,
            folder=folder,
            schedule=schedule,
            trace=launched.trace,
            report=report,
            steps=steps,
            reference=reference,
            written=written,
            warnings=warnings,
        )
    )


def _raise_usage(errors: Sequence[BaseException | None], request: CheckRequest) -> None:
    """An error of a rank's program that is the user's, not a finding (a configuration difference is a finding)."""
    for error in errors:
        if isinstance(error, (UsageError, NotAvailable)) and request.inject is None:
            raise error
