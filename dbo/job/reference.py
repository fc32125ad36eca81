"""What the main job's run is compared with: the same requests alone on one rank, and on devices its serial twin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dbo import registry
from dbo.check.order import steady_order
from dbo.config import DBOConfig
from dbo.engine.runner import StepOutcome
from dbo.errors import PeerFailed, UsageError
from dbo.job.compare import TOLERANCES, Comparison, Request, compare
from dbo.job.rank import FolderWeights, RankJob, RankMain, RequestSpec
from dbo.job.types import Progress, Reference
from dbo.trace import Record, Trace, kinds


def reference_of(
    job: RankJob,
    requests: Sequence[Sequence[RequestSpec]],
    outcomes: Sequence[Sequence[StepOutcome]],
    progress: Progress,
) -> Reference:
    """The same requests on one rank, unsplit, on plain CPU tensors; greedy tokens and logits compared."""
    if job.weights_of is None:
        return Reference(tokens_equal=None, max_rel_err=None, why_not="ordering mode has no numbers")
    progress.stage("running the reference on one rank")
    said = compare_peers(alone(job, requests), outcomes, job.config)
    equal = said.tokens_equal and said.logits_close
    return Reference(tokens_equal=equal, max_rel_err=said.max_rel_err, ties=said.ties)


def alone(job: RankJob, requests: Sequence[Sequence[RequestSpec]]) -> dict[str, tuple[list[int], list[np.ndarray]]]:
    """Tokens and logits of the job's requests on one rank that has all keys: fp32, unsplit, plain CPU tensors."""
    from dbo.job.local import LocalWorld

    config = DBOConfig(
        data_parallel_size=1,
        all2all_backend="nccl",
        dtype="float32",
        block_size=job.config.block_size,
        num_kv_blocks=job.config.num_kv_blocks * job.config.num_ranks,
        max_model_len=job.config.max_model_len,
        max_num_batched_tokens=job.config.max_num_batched_tokens,
        max_num_seqs=job.config.max_num_seqs,
    )
    weights_of = job.weights_of
    if isinstance(weights_of, FolderWeights):
        weights_of = replace(weights_of, dtype="float32")
    together = [[spec for rank in requests for spec in rank]]
    twin = RankJob(
        config=config,
        model_config=job.model_config,
        schedule=job.schedule,
        requests=together,
        weights_of=weights_of,
        keep_logits=True,
    )
    return by_request([RankMain(twin)(LocalWorld())])


def note_reference(trace: Trace, reference: Reference, dtype: str) -> None:
    """Write a comparison of a whole run into its trace, for the detector `numeric` to judge."""
    error = reference.max_rel_err
    if reference.tokens_equal and error is None:
        return  # nothing was sampled
    close = error is not None and error <= TOLERANCES[dtype]
    # Logits that are close while a token differs, or is missing, are no excuse.
    far = math.inf if error is None or (close and not reference.tokens_equal) else error
    attrs = {"error": far, "limit": TOLERANCES[dtype], "reference": "the same requests, unsplit on one rank"}
    last = max((record.id for record in trace.records), default=-1)
    trace.records.append(Record(id=last + 1, rank=0, line="main", kind=kinds.NUMERIC, name="logits", attrs=attrs))


def compare_peers(
    expected: Mapping[str, Request], outcomes: Sequence[Sequence[StepOutcome]], config: DBOConfig
) -> Comparison:
    """What every rank said, against the reference; the peers of a DCP group compute the same, each by itself."""
    size = config.decode_context_parallel_size
    said = [compare(expected, by_request(outcomes[peer::size]), dtype=config.dtype) for peer in range(size)]
    return min(said, key=lambda one: (one.tokens_equal, one.logits_close))


def with_twins(
    job: RankJob,
    world: registry.WorldEntry,
    options: dict[str, Any],
    outcomes: Sequence[Sequence[StepOutcome]],
    trace: Trace,
    reference: Reference,
    progress: Progress,
) -> Reference:
    """On devices: the same run with the halves of each step one after another, and the order that the simulator gives."""
    if not any(outcome.slices for rank in outcomes for outcome in rank):
        return reference
    progress.stage("running the halves of each step one after another")
    ranks = job.config.num_ranks
    serial = world.launch(RankMain(replace(job, serial=True)), ranks=ranks, **options)
    if failed := first_error(serial.errors):
        return replace(reference, twin_failed=f"the run of the halves one after another failed: {failed}")
    expected, found = by_request([value or [] for value in serial.values]), by_request(outcomes)
    equal = expected.keys() == found.keys() and all(
        found[id][0] == tokens and all(np.array_equal(a, b) for a, b in zip(found[id][1], logits, strict=True))
        for id, (tokens, logits) in expected.items()
    )
    progress.stage("asking the simulator for the order")
    symbols = replace(job, config=job.config.replace(world="sim"), weights_of=None, keep_logits=False)
    simulated = registry.load("sim").launch(RankMain(symbols), ranks=ranks, mode="ordering")
    if failed := first_error(simulated.errors):
        return replace(reference, serial_equal=equal, twin_failed=f"the simulator's run failed: {failed}")
    same = steady_order_of(simulated.trace) == steady_order_of(trace)
    return replace(reference, serial_equal=equal, order_as_simulated=same)


def first_error(errors: Sequence[BaseException | None]) -> str:
    """The error that began it, in one line: not one of a rank that only lost its peer."""
    found = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    first = next(((r, e) for r, e in found if not isinstance(e, PeerFailed)), found[0] if found else None)
    if first is None:
        return ""
    rank, error = first
    while error.__cause__ is not None:
        error = error.__cause__
    return f"rank {rank} raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def steady_order_of(trace: Trace) -> tuple[str, ...]:
    try:
        return tuple(steady_order(trace))
    except UsageError:  # split, but too few MoE layers for a steady one
        return ()


def by_request(outcomes: Sequence[Sequence[StepOutcome]]) -> dict[str, tuple[list[int], list[np.ndarray]]]:
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
