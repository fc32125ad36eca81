"""The five backends, each by its own rules: what their traces show, and what tells each apart from `nccl`. No torch."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from dbo.config import DBOConfig
from dbo.engine.components import Components
from sim.cost import CostTable
from sim.world import SimRun
from tests.sim.backend_harness import ALL_BACKENDS, STREAM_BACKENDS, host_counts, with_worst_case
from tests.sim.job_harness import ordering_job, outcomes_of, run, split_steps, verdict_of

LAYERS = 2  # MoE layers of the model
UBATCHES = 2


def one_step(backend: str, *, worst_case: bool = False, lengths: Any = ((8,), (8,)), **changes: Any) -> SimRun:
    programs = (lambda rank: Components(prepare_finalize=with_worst_case)) if worst_case else None
    launched = run(ordering_job(lengths, backend=backend, new_tokens=1, programs=programs, **changes))
    assert str(verdict_of(launched).verdict) == "proved"
    return launched


def traits(launched: SimRun) -> dict[str, Any]:
    """What a backend does in one layer of one ubatch on rank 0, by the trace alone."""
    mine = [r for r in launched.trace.records if r.rank == 0 and r.step == 0 and r.ubatch == 0 and r.layer == 1]
    waits = [r for r in host_counts(launched) if r.rank == 0 and r.ubatch == 0 and r.layer == 1]
    collectives = [r for r in mine if r.kind == "collective"]
    transfers = [r for r in mine if r.kind == "transfer"]
    touched = {launched.trace.buffers[a.buffer].name for r in mine for a in (*r.reads, *r.writes)}
    return {
        "collectives": tuple(r.name for r in collectives),
        "groups": {r.attrs["group"] for r in collectives},
        "transfers": tuple((r.name, r.attrs["dst"]) for r in transfers),
        "transfer SMs": {r.attrs.get("sms") for r in transfers},
        "halves": Counter(r.kind for r in mine if r.kind in ("send", "recv")),
        "hooks": any(r.kind == "hook.run" for r in mine),
        "kernel SMs": {r.attrs["sms"] for r in collectives if "sms" in r.attrs},
        "count waits": len(waits),
        "GIL": {r.attrs["gil"] for r in waits},
        "exchange lines": {r.line for r in mine if r.kind in ("collective", "exchange", "send", "recv", "transfer")},
        "own buffers": {name for name in touched if name.startswith(("low_latency", "deepep", "symm"))},
    }


EXPECTED: dict[str, dict[str, Any]] = {
    "nccl": {
        "collectives": ("all_to_all_single",) * 3,
        "groups": {"ep"},
        "transfers": (),
        "transfer SMs": set(),
        "halves": {},
        "hooks": False,
        "kernel SMs": set(),
        "count waits": 0,
        "GIL": set(),
        "exchange lines": {"comm"},
        "own buffers": set(),
    },
    "deepep_low_latency": {
        "collectives": (),
        "groups": set(),
        "transfers": (("dispatch.transfer", "all"), ("combine.transfer", "all")),
        "transfer SMs": {None},
        "halves": {"send": 2, "recv": 2},
        "hooks": True,
        "kernel SMs": set(),
        "count waits": 0,
        "GIL": set(),
        "exchange lines": {"compute", "net"},
        "own buffers": {"low_latency.recv0"},
        # calls 0 and 2; the other ubatch has 1 and 3
    },
    "deepep_high_throughput": {
        "collectives": ("notify_dispatch", "dispatch", "combine"),
        "groups": {"deepep"},
        "transfers": (),
        "transfer SMs": set(),
        "halves": {},
        "hooks": False,
        "kernel SMs": {20},
        "count waits": 1,
        "GIL": {"held"},
        "exchange lines": {"comm"},
        "own buffers": set(),
    },
    "deepep_v2": {
        "collectives": ("dispatch", "combine"),
        "groups": {"deepep_v2"},
        "transfers": (),
        "transfer SMs": set(),
        "halves": {},
        "hooks": False,
        "kernel SMs": {20},
        "count waits": 1,
        "GIL": {"held"},
        "exchange lines": {"comm"},
        "own buffers": {"deepep_v2.recv"},
    },
    "symm_copy": {
        "collectives": (),
        "groups": set(),
        "transfers": (("dispatch.counts.copy", 1), ("dispatch.copy", 1), ("combine.copy", 1)),
        "transfer SMs": {0},
        "halves": {},
        "hooks": False,
        "kernel SMs": set(),
        "count waits": 1,
        "GIL": {"released"},
        "exchange lines": {"net"},
        "own buffers": {"symm.u0.dispatch.counts", "symm.u0.dispatch", "symm.u0.combine"},
    },
}


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_backend_by_its_trace(backend: str) -> None:
    assert traits(one_step(backend)) == EXPECTED[backend]


def test_no_two_backends_look_alike() -> None:
    found = {backend: traits(one_step(backend)) for backend in ALL_BACKENDS}
    assert [(a, b) for a, b in combinations(found, 2) if found[a] == found[b]] == []


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2", "symm_copy"])
def test_worst_case_sizes_spare_the_host_wait(backend: str) -> None:
    eager, worst = one_step(backend), one_step(backend, worst_case=True)
    assert len(host_counts(eager)) == 2 * UBATCHES * LAYERS
    assert host_counts(worst) == []
    assert outcomes_of(worst)[0][0].tokens.keys() == outcomes_of(eager)[0][0].tokens.keys()


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_while_the_host_spins_for_counts_nothing_else_of_its_process_runs(backend: str) -> None:
    """The wait lies in the dispatch call, this ubatch has the baton, and the GIL is held."""
    launched = one_step(backend)
    waits = host_counts(launched)
    assert waits and all(w.point == "D.send" and w.line == f"u{w.ubatch}" for w in waits)
    for wait in waits:
        others = [
            r
            for r in launched.trace.records
            if r.rank == wait.rank
            and not r.on_device
            and r.line != wait.line
            and r.kind != "blocked"
            and wait.attrs["since_us"] < r.t_us < wait.t_us
        ]
        assert others == []
        assert wait.t_us > wait.attrs["since_us"]


def test_v1_tells_counts_before_it_moves_rows() -> None:
    launched = one_step("deepep_high_throughput")
    wait = host_counts(launched)[0]
    mine = [r for r in launched.trace.records if r.rank == wait.rank and r.kind == "exchange" and r.layer == wait.layer]
    told = next(r for r in mine if r.name == "notify_dispatch" and r.ubatch == wait.ubatch)
    rows = next(r for r in mine if r.name == "dispatch" and r.ubatch == wait.ubatch)
    assert told.end_us <= wait.t_us <= rows.t_us


def test_copies_take_no_sm_and_packing_does_not_travel() -> None:
    launched = one_step("symm_copy")
    copies = list(launched.trace.of_kind("transfer"))
    assert {(r.line, r.attrs["sms"]) for r in copies} == {("net", 0)}
    assert {r.attrs["dst"] for r in copies if r.rank == 0} == {1}
    packs = [r for r in launched.trace.of_kind("op") if r.name == "pack"]
    assert {r.line for r in packs} == {"comm"}


def test_regions_of_the_ubatches_are_apart_and_tagged() -> None:
    launched = one_step("symm_copy")
    names = {b.id: b.name for b in launched.trace.buffers.values()}
    seen: dict[int, set[str]] = {}
    for record in launched.trace.of_kind("transfer"):
        (buffer,) = map(int, record.attrs["tags"])
        seen.setdefault(record.ubatch, set()).add(names[buffer])
    halves = ("dispatch.counts", "dispatch", "combine")
    assert seen == {u: {f"symm.u{u}.{half}" for half in halves} for u in range(UBATCHES)}
    assert verdict_of(launched).checked["buffer-reuse"] > 0


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_comm_sms_are_those_of_split_steps_only(backend: str) -> None:
    job = ordering_job(((8, 6), (8,)), backend=backend, new_tokens=3, dbo_comm_sms=8)
    launched = run(job)
    split = set(split_steps(launched))
    sms = {
        r.step in split: r.attrs["sms"]
        for r in launched.trace.of_kind("collective")
        if r.attrs["group"].startswith("deepep")
    }
    assert sms[True] == 8
    assert len(sms) == 2 and sms[False] not in (8, 0)


def test_costs_follow_the_backend() -> None:
    cost, nbytes = CostTable(), 64 * 2**20
    v1 = [cost.high_throughput("dispatch", nbytes, sms) for sms in (8, 16, 20, 24)]
    v2 = [cost.elastic(nbytes, sms) for sms in (8, 16, 20, 24)]
    assert v1[0] > v1[1] > v1[2] == v1[3]  # so much a SM, up to what the links carry
    assert all(new < old for new, old in zip(v2, v1, strict=True))
    assert cost.high_throughput("combine", nbytes, 8) < v1[0]
    assert cost.copy_engine(nbytes) < v1[0]


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_an_unsplit_step_runs_its_shared_expert_beside_its_own_combine(backend: str) -> None:
    launched = one_step(backend, enable_dbo=False)
    combine = [r for r in launched.trace.of_kind("exchange") if r.name == "combine" and r.rank == 0]
    shared = [r for r in launched.trace.of_kind("op") if r.name == "shared_experts" and r.rank == 0]
    assert len(combine) >= LAYERS and shared
    assert all(any(c.t_us < s.end_us and s.t_us < c.end_us for c in combine) for s in shared)


@pytest.mark.parametrize("backend", STREAM_BACKENDS)
@pytest.mark.parametrize("lengths", [((9, 5), ()), ((16,), (1,)), ((3,), (3,), (2, 2), ())])
def test_ranks_with_nothing_to_send_still_take_part(backend: str, lengths: Any) -> None:
    launched = run(ordering_job(lengths, backend=backend, new_tokens=3))
    assert str(verdict_of(launched).verdict) == "proved"
    assert launched.errors == [None] * len(lengths)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_every_backend_runs_full_graphs(backend: str) -> None:
    launched = run(ordering_job(((4, 4), (4, 4)), backend=backend, new_tokens=4, cudagraph_mode="FULL"))
    assert str(verdict_of(launched).verdict) == "proved"
    assert any(True for _ in launched.trace.of_kind("replay"))
    assert host_counts(launched) == []


def test_vllm_refuses_dbo_with_v2_and_this_runs_it() -> None:
    config = DBOConfig(data_parallel_size=2, enable_expert_parallel=True, enable_dbo=True, all2all_backend="deepep_v2")
    assert (config.dbo_schedule, config.dbo_comm_sms) == ("vllm_high_throughput", 20)
    assert split_steps(one_step("deepep_v2")) == [0]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_shared_experts_before_the_dispatch_or_where_the_schedule_has_them(backend: str) -> None:
    """Before, the dispatch waits for them; else they run beside an exchange."""
    for placement in ("before", "overlap"):
        launched = one_step(backend, shared_experts=placement, schedule="mlp_shared_overlap")
        mine = [r for r in launched.trace.records if r.rank == 0 and r.ubatch == 0 and r.layer == 1 and r.on_device]
        (shared,) = [r for r in mine if r.name == "shared_experts"]
        sent = min((r for r in mine if r.point == "D.send" and (r.reads or r.kind == "collective")), key=lambda r: r.id)
        assert (shared.id < sent.id, shared.point) == ((True, "A1") if placement == "before" else (False, "S"))
