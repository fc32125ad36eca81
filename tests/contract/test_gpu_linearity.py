"""The trace of real processes as a linearisation: clean runs pass, a missing wait and a late event are named."""

from __future__ import annotations

import pytest

from dbo.contract.patience import Patience
from dbo.job.rank import RankMain
from dbo.trace import Record, Trace
from gpu.check.linearity import linearity
from gpu.check.planted_faults import OnRank
from gpu.world import launch
from tests.gpu import jobs
from tests.gpu.jobs import small_folder, small_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("model"))


def trace_of(folder, backend, planted=None):
    job = small_job(folder, backend, program_of=None if planted is None else OnRank(1, planted))
    launched = launch(RankMain(job), ranks=2, device="cpu", patience=Patience(stall_s=30.0), timeout_s=120.0)
    assert launched.errors == [None, None], launched.errors
    return launched.trace


@pytest.mark.parametrize("backend", ["nccl", "deepep_low_latency"])
def test_a_clean_run_is_a_linearisation(folder, backend):
    found = linearity(trace_of(folder, backend))
    assert found.problems == () and found.checked > 100


def test_a_missing_wait_is_named(folder):
    (problem,) = linearity(trace_of(folder, "nccl", jobs.miss_a_wait)).problems
    assert problem.text.startswith("rank 1 step 0 layer 1 ubatch 0: ") and "is not ordered after" in problem.text
    assert "no event is recorded" in problem.text or "no wait on event" in problem.text
    assert (problem.kind, problem.rank, problem.step, problem.layer, problem.ubatch) == ("unordered", 1, 0, 1, 0)


def test_an_event_recorded_after_the_yield_is_named(folder):
    (problem,) = linearity(trace_of(folder, "nccl", jobs.record_late)).problems
    assert problem.text.startswith("rank 1 step 0 layer 1 ubatch 0: D.send waits for A1 of ubatch 1 too"), problem
    assert (problem.kind, problem.layer, problem.ubatch, problem.point) == ("late", 1, 0, "D.send")


def test_times_against_an_edge_are_named():
    records = [
        Record(1, 0, "compute", "op", "A1", t_us=0.0, dur_us=50.0, point="A1", ubatch=0, layer=1, step=0),
        Record(2, 0, "comm", "exchange", "send", t_us=30.0, dur_us=5.0, after=(1,)),
    ]
    (problem,) = linearity(Trace(records=records)).problems
    assert str(problem).endswith("send (#2) starts 20.0 us before A1 (#1) has ended") and problem.kind == "time"
    records[1].t_us = 49.0
    assert linearity(Trace(records=records)).problems == ()
