"""Every preset, run in the simulated world on each backend that it declares: proved, and in the order that it predicts.

`preset_orders.txt` holds the orders that real runs gave. No torch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from dbo.check.order import steady_order
from dbo.check.report import Report
from dbo.errors import ScheduleError
from dbo.schedule import order_line, presets, validate
from sim.world import SimRun
from tests.sim.backend_harness import DECLARED, host_counts
from tests.sim.job_harness import ordering_job, run, split_steps, verdict_of

GOLDEN = Path(__file__).with_name("preset_orders.txt")

# A receive there is a wait alone: the library's own kernel has put the rows where they are wanted. What the reduction behind
# copies has made is nobody's buffer, and need not be copied out of it.
WAITS_ONLY = {
    "deepep_high_throughput": ("D.recv", "C.recv"),
    "deepep_v2": ("D.recv", "C.recv"),
    "symm_copy": ("copy",),
}


@cache
def steady(preset: str, backend: str, ubatches: int = 2) -> tuple[str, SimRun, Report]:
    """The steady order of a run with four MoE layers, the run, and what the detectors say."""
    launched = run(
        ordering_job(
            ((6 * ubatches,), (6 * ubatches,)),
            backend=backend,
            schedule=preset,
            num_ubatches=ubatches,
            model={"num_hidden_layers": 5},
            max_num_batched_tokens=24,
            new_tokens=1,
        )
    )
    return " ".join(steady_order(launched.trace)), launched, verdict_of(launched)


def predicted(preset: str, backend: str, ubatches: int = 2) -> str:
    line = order_line(presets()[preset], backend=backend, num_ubatches=ubatches)
    silent = WAITS_ONLY.get(backend, ())
    kinds = {label: f"{label[0]}.{label.partition('.')[2]}" for label in line.split()}
    kinds |= {label: "copy" for label in kinds if label.startswith("copy")}
    return " ".join(label for label in line.split() if kinds[label] not in silent)


@pytest.mark.parametrize(("preset", "backend"), DECLARED)
def test_a_preset_runs_in_the_order_that_it_predicts(preset: str, backend: str) -> None:
    order, launched, report = steady(preset, backend)
    assert str(report.verdict) == "proved"
    assert split_steps(launched) == [0]
    assert order == predicted(preset, backend)


def test_golden_orders_are_those_of_real_runs() -> None:
    found = [f"{preset} {backend}: {steady(preset, backend)[0]}" for preset, backend in DECLARED]
    assert GOLDEN.read_text(encoding="utf-8").splitlines() == found


@pytest.mark.parametrize(("preset", "backend"), DECLARED)
def test_three_ubatches_run_or_are_refused(preset: str, backend: str) -> None:
    schedule = presets()[preset]
    if backend == "deepep_low_latency" or schedule.offset:
        with pytest.raises(ScheduleError, match="num_ubatches=3|offset="):
            validate(schedule, backend=backend, num_ubatches=3)
        return
    validate(schedule, backend=backend, num_ubatches=3)
    order, _, report = steady(preset, backend, 3)
    assert str(report.verdict) == "proved"
    assert order == predicted(preset, backend, 3)


def test_a_carried_wait_drains_in_the_last_layer() -> None:
    """`lightllm_decode`: combine's receive stands at the start of the next layer, so it is played at the end of its own."""
    program = presets()["lightllm_decode"].program("nccl")
    assert program.carries
    for backend in presets()["lightllm_decode"].backends:
        _, launched, report = steady("lightllm_decode", backend)
        last = max(r.layer for r in launched.trace.records)
        residuals = [r for r in launched.trace.of_kind("op") if r.name == "residual" and r.layer == last]
        assert len(residuals) == 4  # two ranks, two ubatches
        assert str(report.verdict) == "proved"


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2", "symm_copy"])
def test_a_host_wait_for_counts_stands_in_every_dispatch(backend: str) -> None:
    for preset, other in DECLARED:
        if other == backend:
            _, launched, _ = steady(preset, backend)
            waits = [(r.rank, r.layer, r.ubatch) for r in host_counts(launched)]
            assert sorted(waits) == [(rank, layer, u) for rank in (0, 1) for layer in range(1, 5) for u in (0, 1)]


def test_the_output_copy_is_made_where_the_schedule_has_it() -> None:
    for preset, backend in DECLARED:
        order, *_ = steady(preset, backend)
        assert ("copy0" in order) == (preset == "vllm_high_throughput" and backend != "symm_copy")
