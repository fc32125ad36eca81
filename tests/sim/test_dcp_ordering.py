"""DCP in the simulated world without numbers: every exchange, layout, backend and mode is proved; faults are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dbo.engine.components import Components
from dbo.job.rank import RankJob
from sim.faults import dcp_group as faults
from tests.sim.job_harness import ordering_job, outcomes_of, run, split_steps, verdict_of

LAYOUTS = {"dp1-dcp2": (1, 2), "dp2-dcp2": (2, 2), "dp1-dcp4": (1, 4)}
EXCHANGES = ("ag_rs", "a2a", "a2a_direct")
LENGTHS = {1: ((9, 5, 7, 6),), 2: ((9, 5), (7, 6))}


def job(
    exchange: str,
    layout: str = "dp1-dcp2",
    *,
    programs: Callable[[int], Components] | None = None,
    **options: Any,
) -> RankJob:
    replicas, size = LAYOUTS[layout]
    dcp = {"decode_context_parallel_size": size, "dcp_comm_backend": exchange}
    return ordering_job(LENGTHS[replicas], new_tokens=4, programs=programs, **(dcp | options))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dbo", [True, False])
def test_every_exchange_is_proved_in_every_layout(exchange: str, layout: str, dbo: bool) -> None:
    launched = run(job(exchange, layout, enable_dbo=dbo))
    assert bool(split_steps(launched)) is dbo
    report = verdict_of(launched)
    assert str(report.verdict) == "proved", report.violations
    assert all(o.error is None for outcomes in outcomes_of(launched) for o in outcomes)


@pytest.mark.parametrize("backend", ["deepep_low_latency", "deepep_high_throughput", "deepep_v2", "symm_copy"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_backend_dispatches_the_shares_of_a_group(exchange: str, backend: str) -> None:
    hidden = {"hidden_size": 2048} if backend == "deepep_low_latency" else {}
    report = verdict_of(run(job(exchange, backend=backend, model=hidden)))
    assert str(report.verdict) == "proved", report.violations


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_graphs_replay_the_exchange(exchange: str, layout: str) -> None:
    launched = run(job(exchange, layout, cudagraph_mode="FULL", capture_sizes=(4, 8)))
    assert any(launched.trace.of_kind("replay"))
    report = verdict_of(launched)
    assert str(report.verdict) == "proved", report.violations


def test_epochs_go_on_over_eager_steps_and_replays() -> None:
    launched = run(job("a2a_direct", cudagraph_mode="FULL", capture_sizes=(4, 8)))
    merges = [r for r in launched.trace.records if r.name == "dcp.direct.merge" and r.rank == 0]
    by_buffer: dict[str, list[int]] = {}
    for record in merges:
        for buffer, (_, epoch) in record.attrs["expects"].items():
            by_buffer.setdefault(buffer, []).append(epoch)
    assert len(by_buffer) == 4  # two ubatches, two parities
    for epochs in by_buffer.values():
        assert epochs == list(range(epochs[0], epochs[0] + 2 * len(epochs), 2))


def test_a_peer_dispatches_its_share_of_the_real_rows() -> None:
    launched = run(job("a2a", "dp1-dcp4", enable_dbo=False, backend="deepep_low_latency", model={"hidden_size": 2048}))
    sends = [r for r in launched.trace.of_kind("send") if r.attrs["op"] == "dispatch" and r.step == 0 and r.layer == 1]
    real = outcomes_of(launched)[0][0].column.real_tokens
    assert len(sends) == 4 and sum(r.attrs["rows"] for r in sends) == real
    assert max(r.attrs["rows"] for r in sends) == -(-real // 4)


def planted(fault: Callable[[Any], Any], rank: int = 1) -> Callable[[int], Components]:
    return lambda r: faults.plant(fault) if r == rank else Components()


FAULTS = (
    (faults.missing_flag, "a2a_direct", "deadlock"),
    (faults.stale_flag, "a2a_direct", "stream-race"),
    (faults.wrong_parity, "a2a_direct", "buffer-reuse"),
    (faults.exchange_after_sum, "a2a", "collective-mismatch"),
    (faults.exchange_after_sum, "ag_rs", "collective-mismatch"),
)


@pytest.mark.parametrize(("fault", "exchange", "id"), FAULTS, ids=[f"{f.__name__}-{e}" for f, e, _ in FAULTS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_is_found(fault: Callable[[Any], Any], exchange: str, id: str, layout: str) -> None:
    launched = run(job(exchange, layout, programs=planted(fault)))
    report = verdict_of(launched)
    assert report.verdict.name == "violated"
    assert report.violations[0].id == id, report.violations


def test_a_missing_flag_names_the_rank_that_did_not_push() -> None:
    report = verdict_of(run(job("a2a_direct", "dp2-dcp2", programs=planted(faults.missing_flag, rank=3))))
    assert "rank 3" in report.violations[0].sentence and "dcp.direct" in report.violations[0].sentence
