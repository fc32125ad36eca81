"""DCP groups between real processes over gloo: tokens of one rank, the simulator's exchanges, planted faults, the watchdog."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dbo.contract.patience import Patience
from dbo.dcp.interface import DCPShape
from dbo.engine.components import Components
from dbo.errors import NotAvailable
from dbo.job.rank import RankMain
from dbo.job.reference import alone, compare_peers
from gpu.check import dcp_model
from gpu.check.linearity import linearity
from gpu.check.planted_faults import OnRank
from gpu.world import launch
from sim.faults import dcp_group as faults
from sim.world import launch as simulate
from tests.gpu.jobs import STALL_S, small_folder, small_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("model"))


def dcp_job(folder, exchange, *, backend="nccl", replicas=1, dbo=True, interleave=1, program_of=None):
    """Two peers a replica."""
    job = small_job(folder, backend, ranks=max(2, replicas), program_of=program_of)
    config = job.config.replace(
        data_parallel_size=replicas,
        decode_context_parallel_size=2,
        dcp_comm_backend=exchange,
        cp_kv_cache_interleave_size=interleave,
    )
    return replace(job, config=config if dbo else config.without_dbo(), requests=job.requests[:replicas])


def run(job, **limits):
    limits = {"patience": Patience(stall_s=10 * STALL_S), "timeout_s": 120.0} | limits
    return launch(RankMain(job), ranks=job.config.num_ranks, device="cpu", **limits)


def said(launched, job):
    """What the peers say, compared with one rank that has all keys."""
    assert launched.errors == [None] * job.config.num_ranks, launched.errors
    return compare_peers(alone(job, job.requests), launched.values, job.config)


def exchanges(trace, ranks) -> dict[tuple[int, str], list[tuple[Any, ...]]]:
    """What each stream of each rank exchanges, in order."""
    found = defaultdict(list)
    for r in trace.of_kind("exchange"):
        found[r.rank, r.line].append((r.step, r.layer, r.ubatch, r.point, r.attrs["group"], r.attrs["index"], r.name))
    assert {rank for rank, _ in found} == set(range(ranks))
    return found


@pytest.mark.parametrize(
    ("exchange", "backend", "replicas", "dbo", "interleave"),
    [
        ("a2a", "nccl", 1, True, 1),
        ("a2a", "nccl", 1, False, 2),
        ("ag_rs", "deepep_low_latency", 1, True, 2),
        ("a2a", "nccl", 2, True, 1),
    ],
)
def test_a_group_says_what_one_rank_says(folder, exchange, backend, replicas, dbo, interleave):
    job = dcp_job(folder, exchange, backend=backend, replicas=replicas, dbo=dbo, interleave=interleave)
    launched = run(job)
    found = said(launched, job)
    assert found.tokens_equal and found.ties == 0 and found.max_rel_err < 1e-4, found
    report = dcp_model.judged(launched, job)
    assert report.violations == () and report.verdict.name == "proved", report.verdict
    assert report.checked["collective-mismatch"] > 50 and linearity(launched.trace).problems == ()
    assert any(outcome.slices for outcome in launched.values[0]) is dbo

    ranks = job.config.num_ranks
    symbols = replace(job, config=job.config.replace(world="sim"), weights_of=None, keep_logits=False)
    simulated = simulate(RankMain(symbols), ranks=ranks, mode="ordering")
    assert exchanges(launched.trace, ranks) == exchanges(simulated.trace, ranks)
    meets = [
        sorted(
            (m.attrs["group"], m.attrs["index"], tuple(m.attrs.get("members", ())))
            for m in t.of_kind("meet")
            if m.attrs["group"].startswith("dcp")
        )
        for t in (launched.trace, simulated.trace)
    ]
    assert meets[0] == meets[1] and len({members for _, _, members in meets[0]}) == replicas


def without_lse(group: Any) -> Any:
    """Every shard weighs as one key."""
    reduce = group.reduce_heads
    group.reduce_heads = lambda out, lse, lens, starts: reduce(out, lse * 0.0, lens, starts)
    return group


def one_key_less(group: Any) -> Any:
    """The local length that the exchange is told is short by one."""
    reduce = group.reduce_heads
    group.reduce_heads = lambda out, lse, lens, starts: reduce(out, lse, lens - 1, starts)
    return group


def planted(fault: Callable[[Any], Any], rank: int) -> OnRank:
    return OnRank(rank, partial(faults.plant, fault))


@pytest.mark.parametrize("fault", [without_lse, one_key_less])
def test_what_is_wrong_on_one_peer_changes_what_is_said(folder, fault):
    job = dcp_job(folder, "a2a", dbo=False, program_of=planted(fault, 1))
    found = said(run(job), replace(job, program_of=lambda rank: Components()))
    assert not found.logits_close and found.max_rel_err > 1e-2, found


def test_an_exchange_out_of_order_is_named(folder):
    """Only its own group waits for it, and the other group is not blamed."""
    job = dcp_job(folder, "a2a", replicas=2, program_of=planted(faults.exchange_after_sum, 3))
    launched = run(job, patience=Patience(stall_s=STALL_S), timeout_s=60.0)
    report = launched.report
    assert report is not None and report["reason"] == "differing", launched.errors
    assert report["rank"] in (2, 3) and report["point"] == "A1"
    first = report["text"].splitlines()[0]
    assert first.startswith("group dcp #0: rank 2 at A1") and "rank 3 at A1" in first and "rank 0" not in first


@pytest.mark.parametrize(("words", "code"), [(("--exchange", "a2a"), 0), (("--device", "cuda", "--ranks", "64"), 3)])
def test_the_table(folder, capsys, words, code):
    assert dcp_model.main(["--device", "cpu", "--backend", "nccl", "--model", str(folder), *words]) == code
    told = capsys.readouterr()
    lines = told.out.splitlines()
    if code:
        assert "num_ranks=64" in told.err and not lines
    else:
        assert [line[:4] for line in lines[:2]] == ["ok  "] * 2 and "a2a DBO eager" in lines[1]
        assert lines[2].startswith("DP 1 x DCP 2: 2 cases, 0 failed")


def test_other_tokens_make_the_table_fail(folder, capsys, monkeypatch):
    monkeypatch.setattr(dcp_model, "alone", lambda job, requests: {"0.0": ([1], [])})
    words = ["--device", "cpu", "--backend", "nccl", "--exchange", "a2a", "--model", str(folder)]
    assert dcp_model.main(words) == 1
    assert "DIFFER" in capsys.readouterr().out


def ask_for_the_direct_one(world: Any) -> None:
    world.context_parallel(
        DCPShape(size=2, backend="a2a_direct", max_rows=8, num_ubatches=1, heads=4, head_dim=8, dtype="float32")
    )


def test_the_direct_exchange_is_refused_without_devices():
    errors = launch(ask_for_the_direct_one, ranks=2, device="cpu", timeout_s=60.0).errors
    assert all(isinstance(error, NotAvailable) for error in errors), errors
    assert "use --dcp-comm-backend a2a or ag_rs" in str(errors[0])
