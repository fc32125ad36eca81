"""Whole steps between real processes over gloo: tokens, bits, order, and what the trace shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dbo.check import judge
from dbo.check.order import steady_order
from dbo.config import DBOConfig
from dbo.contract.patience import Patience
from dbo.job.local import LocalWorld
from dbo.job.rank import RankJob, RankMain
from gpu.world import launch
from sim.world import launch as simulate
from tests.gpu.jobs import STALL_S, small_folder, small_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("model"))


def run(job, ranks, vehicle="thread"):
    limits = {"patience": Patience(stall_s=10 * STALL_S), "timeout_s": 120.0}
    launched = launch(RankMain(job), ranks=ranks, device="cpu", vehicle=vehicle, **limits)
    assert launched.errors == [None] * ranks, launched.errors
    assert launched.exit_codes == [0] * ranks
    return launched


def by_request(launched):
    """Tokens and logits of every request."""
    found = {}
    for outcomes in launched.values:
        for outcome in outcomes:
            for request, token in outcome.tokens.items():
                found.setdefault(request, []).append((token, outcome.logits[request]))
    return found


def reference(job):
    """The same requests on one rank, unsplit."""
    config = DBOConfig(
        all2all_backend="nccl",
        dtype="float32",
        max_model_len=64,
        block_size=8,
        num_kv_blocks=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )
    alone = replace(job, config=config, requests=[[spec for rank in job.requests for spec in rank]])
    outcomes = RankMain(alone)(LocalWorld())
    tokens: dict[str, list[int]] = {}
    for outcome in outcomes:
        for request, token in outcome.tokens.items():
            tokens.setdefault(request, []).append(token)
    return tokens


@pytest.mark.parametrize(
    ("backend", "ranks", "schedule", "vehicle"),
    [
        ("nccl", 2, None, "thread"),
        ("nccl", 2, "mlp_shared_overlap", "greenlet"),
        ("deepep_low_latency", 2, None, "greenlet"),
        ("deepep_low_latency", 4, None, "thread"),
        ("nccl", 4, None, "thread"),
        ("symm_copy", 2, None, "thread"),
    ],
)
def test_a_run_is_the_reference_the_simulation_and_its_serial_twin(folder, backend, ranks, schedule, vehicle):
    job = small_job(folder, backend, ranks=ranks, schedule=schedule)
    launched = run(job, ranks, vehicle)
    found = by_request(launched)
    split = {outcome.step for outcome in launched.values[0] if outcome.slices}
    assert split and len(split) < len(launched.values[0]), "some steps split and some do not"

    assert {request: [token for token, _ in rows] for request, rows in found.items()} == reference(job)

    twin = by_request(run(replace(job, serial=True), ranks))
    assert twin.keys() == found.keys()
    for request, rows in found.items():
        for (token, logits), (other, others) in zip(rows, twin[request], strict=True):
            assert token == other and np.array_equal(logits, others), request

    symbols = replace(job, config=job.config.replace(world="sim"), weights_of=None, keep_logits=False)
    simulated = simulate(RankMain(symbols), ranks=ranks, mode="ordering")
    for rank in range(ranks):
        assert steady_order(launched.trace, rank) == steady_order(simulated.trace, rank)

    report = judge(launched.trace)
    assert report.violations == () and report.verdict.good, report.verdict
    assert report.choices == ()
    for detector in ("unequal-yields", "two-awake", "deadlock", "collective-mismatch", "dp-disagreement"):
        assert report.checked[detector] > 0, detector


def test_threads_are_made_once_and_named(folder):
    """Each ubatch line of the trace belongs to one thread for the whole run."""
    launched = run(small_job(folder, "nccl"), 2)
    lines = {record.line for record in launched.trace.records if record.rank == 0}
    assert lines == {"main", "u0", "u1", "compute", "comm"}
    enters = [record for record in launched.trace.of_kind("ubatch.enter") if record.rank == 0]
    assert len({record.step for record in enters}) > 1 and {record.line for record in enters} == {"u0", "u1"}


def test_without_a_trace_only_the_values_come_back(folder):
    job: RankJob = small_job(folder, "nccl")
    launched = launch(RankMain(job), ranks=2, device="cpu", trace=False, timeout_s=120.0)
    assert launched.trace.records == [] and launched.errors == [None, None]
    assert sum(len(outcome.tokens) for outcome in launched.values[0]) > 0
