"""Shared experts before the dispatch, at their point, or on the side stream, between processes: equal bits, the right order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dbo.check.order import steady_order
from dbo.contract.patience import Patience
from dbo.engine.components import Components
from dbo.job.rank import RankMain
from dbo.job.reference import by_request
from dbo.moe.modular_kernel import FusedMoEModularKernel
from gpu.check import dcp_model
from gpu.check.linearity import linearity
from gpu.check.planted_faults import OnRank
from gpu.world import launch
from sim.world import launch as simulate
from tests.gpu.jobs import small_folder, small_job

PLACEMENTS = ("overlap", "before", "stream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("model"))


def placed(folder, backend, placement, **options):
    job = small_job(folder, backend, **options)
    return replace(job, config=job.config.replace(shared_experts=placement))


def run(job):
    launched = launch(RankMain(job), ranks=2, device="cpu", patience=Patience(stall_s=30.0), timeout_s=120.0)
    assert launched.errors == [None, None], launched.errors
    return launched


def simulated_order(job):
    symbols = replace(job, config=job.config.replace(world="sim"), weights_of=None, keep_logits=False)
    return steady_order(simulate(RankMain(symbols), ranks=2, mode="ordering").trace)


@pytest.mark.parametrize("backend", ["nccl", "deepep_low_latency"])
def test_where_they_run_changes_no_bit(folder, backend):
    said = {}
    for placement in PLACEMENTS:
        job = placed(folder, backend, placement)
        launched = run(job)
        said[placement] = by_request(launched.values)
        report = dcp_model.judged(launched, job)
        assert report.violations == () and report.verdict.name == "proved", (placement, report.verdict)
        assert linearity(launched.trace).problems == ()
        assert steady_order(launched.trace) == simulated_order(job), placement
        work = {(r.line, r.point) for r in launched.trace.of_kind("op") if r.point == "S" or r.line == "side"}
        assert work == {"overlap": {("compute", "S")}, "before": set(), "stream": {("side", "A1")}}[placement]
    for placement in PLACEMENTS[1:]:
        assert said[placement].keys() == said["overlap"].keys()
        for request, (tokens, rows) in said["overlap"].items():
            assert said[placement][request][0] == tokens
            assert all(map(np.array_equal, said[placement][request][1], rows)), (placement, request)


class Unjoined(FusedMoEModularKernel):
    """Sums the parts of a layer without waiting for the side stream."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.side.join = lambda result, done: result


def test_a_layer_that_does_not_wait_for_them_is_named(folder):
    program_of = OnRank(1, partial(Components, kernel=Unjoined))
    (problem,) = linearity(run(placed(folder, "nccl", "stream", program_of=program_of)).trace).problems
    assert "rank 1" in str(problem) and "A0 is not ordered after side" in str(problem)
