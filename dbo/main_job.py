"""The main job: a model folder and prompts through simulated ranks, threads and streams, to a verdict.

    request → configuration → model folder → prompts → launch → trace → detectors → comparison with the reference → result

The defaults make a run in which some steps split and some do not, in a few seconds on two cores.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dbo import registry
from dbo.check import judge, measure
from dbo.check.order import matches_seed, steady_order, steady_records
from dbo.check.report import Report
from dbo.check.verdict import inconclusive, proved
from dbo.compare import compare
from dbo.config import BACKENDS, DBOConfig, ModelShape, Workload, effective, validate
from dbo.config.facts import BackendFacts
from dbo.errors import NotAvailable, UsageError, refusal
from dbo.export.chrome import write_trace
from dbo.export.rows import layer_spans
from dbo.main_job_types import (
    CheckRequest,
    CheckResult,
    Invariants,
    Overlap,
    Progress,
    Reference,
    SteadyLayer,
    StepReport,
)
from dbo.model.config import ModelConfig, load_model_config
from dbo.program import Program
from dbo.rank import CleanPrograms, FolderWeights, RankJob, RankMain, RequestSpec
from dbo.runner import StepOutcome
from dbo.schedule import Schedule, load_schedule, parse_schedule, to_text
from dbo.schedule import validate as validate_schedule
from dbo.trace import Trace

# What `dbo check` runs when it is told nothing: two DP replicas, small steps, thresholds that some steps reach.
DEFAULTS: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_dbo": True,
    "all2all_backend": "deepep_low_latency",
    "dbo_decode_token_threshold": 4,
    "dbo_prefill_token_threshold": 24,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "block_size": 16,
    "num_kv_blocks": 64,
    "dtype": "float32",
}

PROMPTS = (
    "Two batches, one baton.",
    "While one waits, the other computes.",
    "hi",
    "All ranks must agree to split.",
    "Order matters.",
    "A prompt that straddles the split.",
    "Padding?",
    "Dispatch, experts, combine.",
)

# The simulator carries the model's dtype through the low-latency exchange, so that fp32 logits can be compared tightly.
# A device carries bf16 there, and world gpu refuses fp32.
SIM_CAPABILITIES = ("any_dtype",)


def run(request: CheckRequest, progress: Progress) -> CheckResult:
    """Run one `dbo check`.

    Raises:
        UsageError: the request cannot work; one sentence says why.
        NotAvailable: this build or machine does not have what it asks for.
    """
    world = registry.load(request.world)
    config = DBOConfig(**_flags(request))
    machine = registry.machine(
        request.world, device=request.device, ranks=config.num_ranks, share_device=request.share_device
    )
    folder = request.model or _generated_folder(request, progress)
    model_config = load_model_config(folder)
    schedule = _schedule(config)
    prompts = _prompts(request, config, folder, model_config)
    warnings = validate(
        config, _shape(model_config), device=machine.limits if machine else None,
        capabilities=machine.capabilities if machine else SIM_CAPABILITIES,
        workload=Workload(prefill_tokens=sum(map(len, prompts)), decode_tokens=request.steps * len(prompts)),
    )  # fmt: skip
    if config.enable_dbo:
        validate_schedule(schedule, backend=config.all2all_backend, num_ubatches=config.num_ubatches)
    requests = _spread(prompts, config.data_parallel_size, request.steps + 1)
    weights_of = (
        None
        if request.mode == "ordering"
        else FolderWeights(folder=str(folder), config=model_config, dtype=config.dtype)
    )
    job = RankJob(
        config=config, model_config=model_config, schedule=schedule, requests=requests, weights_of=weights_of,
        program_of=_programs(request, config), keep_logits=weights_of is not None,
    )  # fmt: skip

    progress.stage(f"running {config.num_ranks} ranks in world {request.world} ({request.mode})")
    options = machine.options if machine else {}
    launched = world.launch(RankMain(job), ranks=config.num_ranks, mode=request.mode, **options)
    launched.trace.meta |= {
        "backend": config.all2all_backend, "schedule": to_text(schedule), "ubatches": config.num_ubatches,
        "seed": request.seed, "config": effective(config),
    }  # fmt: skip
    outcomes = [value or [] for value in launched.values]
    _raise_usage(launched.errors, request)
    steps = _step_reports(outcomes)
    for step in steps:
        progress.step(step)

    progress.stage("judging the trace")
    report = judge(launched.trace)
    if request.inject is not None and report.verdict.good:
        # Nothing was found. Either a detector is blind, or the run has no place for this fault: the latter is refused.
        fault, where = _fault(request, request.inject)
        fault.require_effect(launched.trace, where)
    reference = _reference(job, requests, outcomes, progress)
    if machine:
        reference = _twins(job, world, options, outcomes, launched.trace, reference, progress)
    replay = replay_line(request)
    path = request.trace or Path(tempfile.gettempdir()) / f"dbo-check-{request.seed}.json"
    write_trace(launched.trace, path)
    return _result(request, config, folder, schedule, launched.trace, report, steps, reference, replay, path, warnings)


def _flags(request: CheckRequest) -> dict[str, Any]:
    flags = DEFAULTS | dict(request.flags)
    flags["world"] = request.world
    if "seed" not in request.flags:
        flags["seed"] = request.seed
    if flags["all2all_backend"] == "deepep_low_latency":
        # Room for one unsplit step, not for what queue pairs allow: the buffers are computed over in full.
        flags.setdefault("low_latency_max_tokens_per_rank", flags["max_num_batched_tokens"])
    carries = BACKENDS.get(flags["all2all_backend"], BackendFacts()).dtypes
    if request.world == "gpu" and request.device != "cpu" and carries and "dtype" not in request.flags:
        flags["dtype"] = min(carries)  # the simulator and gloo carry any, a library's kernels do not
    if not flags["enable_dbo"] and flags.get("num_ubatches", 1) < 2:
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            if name not in request.flags:
                flags.pop(name, None)
    return flags


def _generated_folder(request: CheckRequest, progress: Progress) -> Path:
    """The generated model folder of this seed, made on first use; without weights, and so without torch, for ordering."""
    kind = "frame" if request.mode == "ordering" else f"model-{request.seed}"
    folder = Path(tempfile.gettempdir()) / f"dbo-{kind}-v1"
    if folder.is_dir():
        return folder
    progress.stage("generating the model folder")
    # Made aside and renamed, so that two processes at once, or one that is interrupted, leave a whole folder.
    aside = Path(tempfile.mkdtemp(prefix="dbo-model-"))
    if request.mode == "ordering":
        from dbo.model.frame import write_frame

        write_frame(aside)
    else:
        from dbo.model.generator import generate_model_folder

        generate_model_folder(aside, seed=request.seed)
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(aside)
    return folder


def _schedule(config: DBOConfig) -> Schedule:
    text = config.dbo_schedule
    return parse_schedule(text) if "\n" in text else load_schedule(text)


def _shape(config: ModelConfig) -> ModelShape:
    return ModelShape(
        hidden_size=config.hidden_size, num_experts=config.n_routed_experts, num_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
    )  # fmt: skip


def _prompts(request: CheckRequest, config: DBOConfig, folder: Path, model_config: ModelConfig) -> list[list[int]]:
    from dbo.model.tokenizer import load_tokenizer

    limit = config.max_model_len - request.steps - 1
    if limit < 1:
        rule = "prompt and output fit in the model length"
        raise UsageError(refusal(rule, "lower --steps", steps=request.steps, max_model_len=config.max_model_len))
    tokenizer = load_tokenizer(folder)
    if request.prompts is None:
        return [list(tokenizer.encode(text)) for text in PROMPTS]
    return request.prompts.encode(encode=tokenizer.encode, vocab_size=model_config.vocab_size, max_tokens=limit)


def _spread(prompts: Sequence[Sequence[int]], ranks: int, max_new_tokens: int) -> list[list[RequestSpec]]:
    """Prompts to ranks in turn."""
    spread: list[list[RequestSpec]] = [[] for _ in range(ranks)]
    for index, prompt in enumerate(prompts):
        spread[index % ranks].append(
            RequestSpec(id=f"request-{index}", prompt_token_ids=tuple(prompt), max_new_tokens=max_new_tokens)
        )
    return spread


def _programs(request: CheckRequest, config: DBOConfig) -> Callable[[int], Program]:
    if request.inject is None:
        return CleanPrograms()
    fault, where = _fault(request, request.inject)
    return fault.programs(config, where)


def _fault(request: CheckRequest, inject: str) -> tuple[registry.FaultInfo, str]:
    """The fault that `--inject` names, and the place that it gives."""
    name, _, where = inject.partition(":")
    for fault in registry.faults(request.world):
        if fault.name == name:
            return fault, where
    known = ", ".join(fault.name for fault in registry.faults(request.world))
    raise UsageError(refusal("--inject names a fault", f"choose one of {known}, or list", inject=name))


def _raise_usage(errors: Sequence[BaseException | None], request: CheckRequest) -> None:
    """An error of a rank's program that is the user's, not a finding (a configuration difference is a finding)."""
    for error in errors:
        if isinstance(error, (UsageError, NotAvailable)) and request.inject is None:
            raise error


# -- what happened ----------------------------------------------------------------------------------------------------


def _step_reports(outcomes: Sequence[Sequence[StepOutcome]]) -> tuple[StepReport, ...]:
    """One report a step over all ranks, from rank 0's decision and every rank's column."""
    by_step: dict[int, list[StepOutcome]] = {}
    for rank_outcomes in outcomes:
        for outcome in rank_outcomes:
            if outcome.decision is not None and outcome.column is not None:
                by_step.setdefault(outcome.step, []).append(outcome)
    return tuple(_step_report(step, found) for step, found in sorted(by_step.items()))


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


def _reference(
    job: RankJob,
    requests: Sequence[Sequence[RequestSpec]],
    outcomes: Sequence[Sequence[StepOutcome]],
    progress: Progress,
) -> Reference:
    """The same requests on one rank, unsplit, on plain CPU tensors; greedy tokens and logits compared."""
    if job.weights_of is None:
        return Reference(tokens_equal=None, max_rel_err=None, why_not="ordering mode has no numbers")
    from dbo.local import LocalWorld

    progress.stage("running the reference on one rank")
    alone = DBOConfig(
        data_parallel_size=1, all2all_backend="nccl", dtype="float32", block_size=job.config.block_size,
        num_kv_blocks=job.config.num_kv_blocks * job.config.num_ranks, max_model_len=job.config.max_model_len,
        max_num_batched_tokens=job.config.max_num_batched_tokens, max_num_seqs=job.config.max_num_seqs,
    )  # fmt: skip
    weights_of = job.weights_of
    if isinstance(weights_of, FolderWeights):
        weights_of = replace(weights_of, dtype="float32")
    together = [[spec for rank in requests for spec in rank]]
    twin = RankJob(
        config=alone, model_config=job.model_config, schedule=job.schedule, requests=together,
        weights_of=weights_of, keep_logits=True,
    )  # fmt: skip
    expected = _by_request([RankMain(twin)(LocalWorld())])
    size = job.config.decode_context_parallel_size
    groups = [outcomes[peer::size] for peer in range(size)]
    said = compare(expected, _by_request(groups[0]), dtype=job.config.dtype)
    for others in groups[1:]:  # the peers of a DCP group compute the same tokens, each by itself
        peer = compare(expected, _by_request(others), dtype=job.config.dtype)
        said = said if not said.tokens_equal or peer.tokens_equal else peer
    equal = said.tokens_equal and said.logits_close
    return Reference(tokens_equal=equal, max_rel_err=said.max_rel_err, ties=said.ties)


def _twins(
    job: RankJob, world: registry.WorldEntry, options: dict[str, Any], outcomes: Sequence[Sequence[StepOutcome]],
    trace: Trace, reference: Reference, progress: Progress,
) -> Reference:  # fmt: skip
    """On devices: the same run with the halves of each step one after another, and the order that the simulator gives."""
    if not any(outcome.slices for rank in outcomes for outcome in rank):
        return reference
    progress.stage("running the halves of each step one after another")
    ranks = job.config.num_ranks
    serial = world.launch(RankMain(replace(job, serial=True)), ranks=ranks, **options)
    expected, found = _by_request([value or [] for value in serial.values]), _by_request(outcomes)
    equal = expected.keys() == found.keys() and all(
        found[id][0] == tokens and all(np.array_equal(a, b) for a, b in zip(found[id][1], logits, strict=True))
        for id, (tokens, logits) in expected.items()
    )
    progress.stage("asking the simulator for the order")
    symbols = replace(job, config=job.config.replace(world="sim"), weights_of=None, keep_logits=False)
    simulated = registry.load("sim").launch(RankMain(symbols), ranks=ranks, mode="ordering")
    same = _order(simulated.trace) == _order(trace)
    return replace(reference, serial_equal=equal, order_as_simulated=same)


def _order(trace: Trace) -> tuple[str, ...]:
    try:
        return tuple(steady_order(trace))
    except UsageError:  # split, but too few MoE layers for a steady one
        return ()


def _by_request(outcomes: Sequence[Sequence[StepOutcome]]) -> dict[str, tuple[list[int], list[np.ndarray]]]:
    """Tokens and rows of logits of every request, in order."""
    found: dict[str, tuple[list[int], list[np.ndarray]]] = {}
    for rank_outcomes in outcomes:
        for outcome in rank_outcomes:
            for id, token in outcome.tokens.items():
                tokens, logits = found.setdefault(id, ([], []))
                tokens.append(token)
                if id in outcome.logits:
                    logits.append(outcome.logits[id])
    return found


def replay_line(request: CheckRequest) -> str:
    """The command that runs the same again."""
    from dbo.config import FLAGS

    words = ["dbo check", f"--seed {request.seed}"]
    for flag in FLAGS:
        if flag.field in request.flags:
            value = request.flags[flag.field]
            words.append(_flag_text(flag, value))
    words += [f"--model {request.model}"] if request.model else []
    words += [f"--prompts {request.prompts.name}"] if request.prompts is not None else []
    words += [f"--steps {request.steps}"] if request.steps != 8 else []
    words += [f"--mode {request.mode}"] if request.mode != "numeric" else []
    words += [f"--inject {request.inject}"] if request.inject else []
    words += [f"--device {request.device}"] if request.device != "auto" else []
    words += ["--share-device"] if request.share_device else []
    return " ".join(words)


def _flag_text(flag: Any, value: Any) -> str:
    if flag.type is None:
        return flag.flag if value else flag.flag.replace("--", "--no-", 1)
    return f"{flag.flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _result(
    request: CheckRequest, config: DBOConfig, folder: Path, schedule: Schedule, trace: Trace, report: Report,
    steps: Sequence[StepReport], reference: Reference, replay: str, path: Path, warnings: Sequence[str],
) -> CheckResult:  # fmt: skip
    order = _order(trace) if any(step.split for step in steps) else ()
    overlap = measure(trace)
    verdict = report.verdict
    if request.world != "sim" and verdict.name == "proved":
        verdict = proved(synchronisation_only=True)  # a device's trace says nothing of the bytes that are touched
    if verdict.good and reference.tokens_equal is False:
        verdict = inconclusive("the tokens differ from the reference's, and no detector says why")
    if verdict.good and reference.serial_equal is False:
        verdict = inconclusive("the logits differ from those of the serial halves, and no detector says why")
    if verdict.good and reference.order_as_simulated is False:
        verdict = inconclusive("the steady order is not the simulator's, and no detector says why")
    return CheckResult(
        verdict=verdict,
        violations=tuple(replace(v, replay=replay) for v in report.violations),
        ranks=config.num_ranks,
        steps=tuple(steps),
        order=order,
        order_exchanged=matches_seed(order) == "exchanged",
        steady_layer=_steady_layer(trace) if order else None,
        overlap=Overlap(
            hidden_share=overlap.hidden_share, ideal_share=overlap.ideal_share, exposed_us=overlap.exposed_us
        ),
        invariants=Invariants(
            checked=sum(report.checked.values()), failed=sum(report.failed.values()), by_detector=report.checked
        ),
        reference=reference,
        forced_drains=forced_drains(trace),
        replay=replay,
        trace=path,
        seed=request.seed,
        world=request.world,
        mode=request.mode,
        device=_device(request, trace),
        backend=config.all2all_backend,
        schedule=schedule.name,
        model=str(folder),
        warnings=tuple(warnings),
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
    return sum(not r.attrs["declared"] for r in trace.of_kind("host.wait"))
