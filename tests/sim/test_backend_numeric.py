"""Backends with numbers: what a dispatch delivers and a combine sums, and what a missing wait does to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbo.check import judge
from dbo.engine.components import Components
from dbo.model.config import ModelConfig
from dbo.model.generator import generate_model_folder
from dbo.moe.deepep_high_throughput import DeepEPHighThroughputPrepareAndFinalize
from dbo.moe.deepep_v2 import DeepEPV2PrepareAndFinalize
from dbo.moe.interface import ExpertInputs, summed
from dbo.moe.nccl import NcclPrepareAndFinalize
from dbo.moe.symm_copy import SymmCopyPrepareAndFinalize, share_needed
from dbo.ubatching.forward_context import ForwardContext, override_forward_context
from sim.cost import CostTable
from sim.faults import Site
from sim.faults.clean_run import CleanRun
from sim.world import SimRun, SimWorld, launch
from tests.sim.backend_harness import FAULTS, STREAM_BACKENDS
from tests.sim.job_harness import SMALL, numeric_job, outcomes_of, run, verdict_of

HIDDEN, TOPK, EXPERTS, MOST_TOKENS = 8, 2, 12, 64
GENERATED = {key: value for key, value in SMALL.items() if key not in ("num_hidden_layers", "hidden_size")}

MAKERS: dict[str, Callable[[SimWorld, bool], Any]] = {
    "nccl": lambda world, worst: NcclPrepareAndFinalize(world, num_experts=EXPERTS),
    "deepep_high_throughput": lambda world, worst: DeepEPHighThroughputPrepareAndFinalize(
        world, world.high_throughput, num_experts=EXPERTS, worst_case=worst
    ),
    "deepep_v2": lambda world, worst: DeepEPV2PrepareAndFinalize(
        world, world.elastic, num_experts=EXPERTS, worst_case=worst, max_tokens_per_rank=MOST_TOKENS
    ),
    "symm_copy": lambda world, worst: SymmCopyPrepareAndFinalize(world, num_experts=EXPERTS, worst_case=worst),
}
KINDS = [(name, worst) for name in MAKERS for worst in (False, True) if name != "nccl" or not worst]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices: more threads than one only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("model")
    return folder, generate_model_folder(folder, seed=1, hidden_size=64, num_layers=3, **GENERATED)


def batch(rank: int, tokens: int, padding: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x `[T, H]` that says whose row it is, distinct ids `[T, K]` (-1 in padding rows), weights `[T, K]`."""
    draw = np.random.default_rng(100 * rank + tokens)
    x = (1000 * rank + np.arange(tokens)[:, None] + np.arange(HIDDEN) / 16).astype(np.float32)
    ids = np.stack([draw.choice(EXPERTS, TOPK, replace=False) for _ in range(tokens)] or [np.zeros(TOPK)])[:tokens]
    ids = ids.astype(np.int64)
    ids[tokens - padding :] = -1
    x[tokens - padding :] = np.nan
    return x, ids, draw.random((tokens, TOPK), dtype=np.float32)


def scaled(inputs: ExpertInputs) -> torch.Tensor:
    """Experts whose result is the row times the weights of the experts that are here."""
    share = inputs.topk_weights.masked_fill(inputs.topk_ids < 0, 0.0).sum(-1, keepdim=True)
    here = (inputs.topk_ids >= 0).any(-1, keepdim=True)
    return (inputs.x * share).masked_fill(~here, 0.0)


def exchange(kind: tuple[str, bool], tokens: tuple[int, ...], padding: int) -> SimRun:
    """Two rounds on every rank; the value is what arrived in the last and what came back in both."""
    name, worst = kind

    def program(world: SimWorld) -> Any:
        backend = MAKERS[name](world, worst)
        x, ids, weights = (world.tensors.from_numpy(a, "in") for a in batch(world.rank, tokens[world.rank], padding))
        with override_forward_context(ForwardContext(attn_metadata=None, num_tokens_across_ranks=tokens)):
            for _ in range(2):
                arrived = backend.prepare_async(x, weights, ids)()
                combined = summed(backend.finalize_async(scaled(arrived), weights, ids)())
        found = (arrived.x, arrived.topk_ids, arrived.topk_weights, combined)
        return [world.tensors.to_host(array, "check") for array in found]

    launched = launch(program, ranks=len(tokens))
    assert launched.errors == [None] * len(tokens), launched.errors
    return launched


def expected_rows(rank: int, tokens: tuple[int, ...], padding: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(x, local ids, weights) of the rows that `rank` receives, by (source, token)."""
    local = EXPERTS // len(tokens)
    rows = []
    for source, count in enumerate(tokens):
        for x, ids, weights in zip(*batch(source, count, padding), strict=True):
            here = (ids >= rank * local) & (ids < (rank + 1) * local)
            if here.any():
                rows.append((x, np.where(here, ids - rank * local, -1), weights))
    return rows


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("tokens", [(5, 3), (4, 0), (1, 1), (3, 4, 2)], ids=str)
def test_rows_arrive_by_source_and_token_and_sums_come_back(kind: tuple[str, bool], tokens: tuple[int, ...]) -> None:
    padding = 1 if min(tokens) else 0
    for rank, (x, ids, weights, combined) in enumerate(exchange(kind, tokens, padding).values):
        wanted = expected_rows(rank, tokens, padding)
        real = (ids >= 0).any(-1)
        assert real.sum() == len(wanted)
        for at, (row, row_ids, row_weights) in zip(np.flatnonzero(real), wanted, strict=True):
            assert x[at].tolist() == row.tolist()
            assert ids[at].tolist() == row_ids.tolist()
            assert weights[at][row_ids >= 0].tolist() == row_weights[row_ids >= 0].tolist()
        own_x, own_ids, own_weights = batch(rank, tokens[rank], padding)
        total = np.where(own_ids >= 0, own_weights, 0).sum(-1, keepdims=True)
        result = np.where((own_ids >= 0).any(-1, keepdims=True), own_x * total, 0.0)
        np.testing.assert_allclose(combined, result, rtol=1e-6)


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0] != "nccl"], ids=str)
def test_sizes_are_exact_or_the_worst_case(kind: tuple[str, bool]) -> None:
    tokens = (5, 3)
    name, worst = kind
    for rank, (x, ids, *_) in enumerate(exchange(kind, tokens, 1).values):
        real = len(expected_rows(rank, tokens, 1))
        most = {"deepep_v2": 8 * len(tokens)}.get(name, sum(tokens))  # V2: 5 rows a rank, 8 are the next power of two
        assert len(x) == (most if worst else real)
        if worst and name != "symm_copy":
            assert (ids[real:] == -1).all()  # padded at the end; symm_copy's rows keep their places


@pytest.mark.parametrize(
    ("worst", "wanted"),
    [(False, {MOST_TOKENS}), (True, {1, 2, 4, 8, 16, 32, MOST_TOKENS})],
    ids=["counts on the host", "worst case"],
)
def test_few_sizes_are_ever_named_to_a_library_that_compiles_each(worst: bool, wanted: set[int]) -> None:
    def program(world: SimWorld) -> set[int]:
        named: set[int] = set()
        real = world.elastic.dispatch

        def dispatch(*args: Any, **options: Any) -> Any:
            named.add(options["num_max_tokens_per_rank"])
            return real(*args, **options)

        world.elastic.dispatch = dispatch
        backend = MAKERS["deepep_v2"](world, worst)
        for tokens in (*range(1, 20), 33, 40, 63, MOST_TOKENS):
            x, ids, weights = (world.tensors.from_numpy(a, "in") for a in batch(world.rank, tokens, 0))
            context = ForwardContext(attn_metadata=None, num_tokens_across_ranks=[tokens] * world.size)
            with override_forward_context(context):
                backend.finalize_async(backend.prepare_async(x, weights, ids)().x, weights, ids)()
        return named

    assert launch(program, ranks=2).values == [wanted, wanted]


def test_ranks_call_v2_with_the_same_number_of_rows() -> None:
    """It says where rows lie in the peers' buffers."""

    def program(world: SimWorld) -> None:
        x, ids, weights = (world.tensors.from_numpy(a, "in") for a in batch(world.rank, 3, 0))
        world.elastic.dispatch(x, ids, weights, num_experts=EXPERTS, num_max_tokens_per_rank=4 + world.rank)

    assert judge(launch(program, ranks=2).trace).verdict.id == "collective-mismatch"


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "share"), [(2, 64, 8, 0.998), (2, 8, 2, 0.786), (8, 256, 8, 0.662), (1, 8, 2, 1.0)]
)
def test_the_share_of_rows_that_a_rank_needs_is_the_one_of_even_choices(
    ranks: int, experts: int, top_k: int, share: float
) -> None:
    assert share_needed(ranks=ranks, num_experts=experts, top_k=top_k) == pytest.approx(share, abs=5e-4)
    draw = np.random.default_rng(5)
    first = [draw.permutation(experts)[:top_k].min() < experts // ranks for _ in range(4000)]
    assert np.mean(first) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(("top_k", "counted"), [(2, True), (6, False)])
def test_copies_count_rows_only_where_some_would_stay_behind(tmp_path: Path, top_k: int, counted: bool) -> None:
    sizes = GENERATED | {"num_experts_per_tok": top_k}
    model = tmp_path, generate_model_folder(tmp_path, seed=1, hidden_size=64, num_layers=3, **sizes)
    found = {b: run(numeric_job(*model, ((8,), (5,)), backend=b, new_tokens=2)) for b in ("symm_copy", "nccl")}
    waits = [r.attrs["why"] for r in found["symm_copy"].trace.of_kind("host.wait")]
    assert any("counts of symm_copy" in why for why in waits) is counted
    assert str(verdict_of(found["symm_copy"]).verdict) == "proved"
    np.testing.assert_allclose(logits(found["symm_copy"]), logits(found["nccl"]), atol=1e-5)


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_a_dispatch_lists_rows_per_expert_where_the_host_waited(backend: str) -> None:
    tokens = (5, 3)

    def program(world: SimWorld) -> list[int]:
        x, ids, weights = (world.tensors.from_numpy(a, "in") for a in batch(world.rank, tokens[world.rank], 0))
        if backend == "deepep_v2":
            handle = world.elastic.dispatch(x, ids, weights, num_experts=EXPERTS, num_max_tokens_per_rank=5)[3]
            return list(handle.num_recv_tokens_per_expert_list)
        per_rank, _, per_expert, in_rank, _ = world.high_throughput.get_dispatch_layout(ids, EXPERTS)
        return list(
            world.high_throughput.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                expert_alignment=4,
            )[3]
        )

    everything = np.concatenate([batch(rank, n, 0)[1].ravel() for rank, n in enumerate(tokens)])
    counts = [int((everything == expert).sum()) for expert in range(EXPERTS)]
    wanted = counts if backend == "deepep_v2" else [-(-n // 4) * 4 for n in counts]
    assert [n for value in launch(program, ranks=2).values for n in value] == wanted


# -- under DBO --------------------------------------------------------------------------------------------------------

# What is left out shows in the numbers of this one run only if the other side is late: exchanges that last, or compute.
SLOW_EXCHANGE = CostTable(
    high_throughput_us=400.0, elastic_us=400.0, copy_engine_us=400.0, high_throughput_notify_us=1.0
)
SLOW_COMPUTE = CostTable(kernel_us=60.0)

Model = tuple[Path, ModelConfig]


def planted(
    model: Model, backend: str, fault: str, where: str = "", *, schedule: str = "", cost: CostTable | None = None
) -> SimRun:
    job = numeric_job(*model, ((8,), (8,)), backend=backend, schedule=schedule, new_tokens=1)
    # One step: a step that fails is scheduled again, and this one would fail every time.
    return run(replace(job, program_of=FAULTS[fault].programs(job.config, where), max_steps=1), cost=cost)


@pytest.fixture(scope="module")
def clean(model: Model) -> Callable[..., SimRun]:
    """The run without a fault, once."""
    kept: dict[tuple[str, str], SimRun] = {}

    def run_once(backend: str, schedule: str = "") -> SimRun:
        if (backend, schedule) not in kept:
            launched = run(numeric_job(*model, ((8,), (8,)), backend=backend, schedule=schedule, new_tokens=1))
            assert str(verdict_of(launched).verdict) == "proved"
            kept[backend, schedule] = launched
        return kept[backend, schedule]

    return run_once


def is_damaged(launched: SimRun, right: SimRun) -> bool:
    """The sampler met poison, or the numbers are others than the right ones."""
    if any("holds no NaN" in record.attrs["message"] for record in launched.trace.of_kind("error")):
        return True
    return float(np.abs(logits(launched) - logits(right)).max()) > 1e-3


def logits(launched: SimRun) -> np.ndarray:
    return np.concatenate([row for outcomes in outcomes_of(launched) for o in outcomes for row in o.logits.values()])


WAITS = {
    "drop-wait": SLOW_EXCHANGE,
    "unawaited-result": SLOW_EXCHANGE,
    "unawaited-input": SLOW_COMPUTE,
    "early-event": SLOW_COMPUTE,
}


@pytest.mark.parametrize("fault", WAITS)
@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_a_needed_wait_left_out_shows_as_numbers_and_as_a_race(
    model: Model, clean: Callable[..., SimRun], backend: str, fault: str
) -> None:
    """In one ubatch of every rank: an exchange starts when its last member comes, who would make up for the others."""
    job = numeric_job(*model, ((8,), (8,)), backend=backend, new_tokens=1)
    hasty = FAULTS[fault].plant(Components(), Site(ubatch=1))
    launched = run(replace(job, program_of=lambda rank: hasty, max_steps=1), cost=WAITS[fault])
    assert str(verdict_of(launched).verdict) == "violated(stream-race)"
    damaged = is_damaged(launched, clean(backend))
    assert damaged


@pytest.mark.parametrize("cost", [SLOW_EXCHANGE, SLOW_COMPUTE], ids=["slow exchange", "slow compute"])
def test_with_all_its_waits_nothing_depends_on_speed(
    model: Model, clean: Callable[..., SimRun], cost: CostTable
) -> None:
    job = numeric_job(*model, ((8,), (8,)), backend="deepep_high_throughput", new_tokens=1)
    slow, right = logits(run(job, cost=cost)), logits(clean("deepep_high_throughput"))
    assert np.array_equal(slow, right)


@pytest.mark.parametrize("fault", ["late-event", "late-capture"])
@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_an_event_after_the_yield_is_right_and_hides_nothing(
    model: Model, clean: Callable[..., SimRun], backend: str, fault: str
) -> None:
    launched = planted(model, backend, fault, "rank=1,ubatch=0")
    assert str(verdict_of(launched).verdict) == "violated(no-overlap)"
    late, right = logits(launched), logits(clean(backend))
    assert np.array_equal(late, right)


@pytest.mark.parametrize("backend", STREAM_BACKENDS)
def test_what_crosses_streams_is_kept_alive(model: Model, clean: Callable[..., SimRun], backend: str) -> None:
    (site, *_) = FAULTS["unrecorded-stream"].sites(CleanRun(clean(backend).trace))
    launched = planted(model, backend, "unrecorded-stream", f"rank={site.rank}")
    assert str(verdict_of(launched).verdict) == "violated(stream-race)"


@pytest.mark.parametrize(
    ("backend", "fault", "cost"),
    [
        ("deepep_v2", "late-epilogue", SLOW_EXCHANGE),
        ("symm_copy", "skip-signal", SLOW_EXCHANGE),
        ("symm_copy", "one-region", SLOW_COMPUTE),
    ],
    ids=["late-epilogue", "skip-signal", "one-region"],
)
def test_rows_of_somebody_else_are_wrong_numbers(
    model: Model, clean: Callable[..., SimRun], backend: str, fault: str, cost: CostTable
) -> None:
    where = "rank=1,ubatch=0" if FAULTS[fault].keys else ""
    launched = planted(model, backend, fault, where, schedule="mlp_shared_overlap", cost=cost)
    assert verdict_of(launched).verdict.id == FAULTS[fault].id
    damaged = is_damaged(launched, clean(backend, "mlp_shared_overlap"))
    assert damaged


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_the_payload_keeps_the_models_dtype(model: Model, backend: str) -> None:
    launched = run(numeric_job(*model, ((6,), (5,)), backend=backend, new_tokens=2, dtype="bfloat16"))
    assert str(verdict_of(launched).verdict) == "proved"
    rows = [r for r in launched.trace.of_kind("collective") if r.name in ("dispatch", "combine")]
    assert {r.attrs["dtype"] for r in rows} == {"bfloat16"}


@pytest.mark.parametrize("backend", ["deepep_low_latency", "symm_copy"])
def test_shared_experts_give_the_same_wherever_they_run(model: Model, backend: str) -> None:
    jobs = [
        numeric_job(*model, ((8,), (8,)), backend=backend, new_tokens=1, shared_experts=placement)
        for placement in ("before", "overlap", "stream")
    ]
    before, overlap, aside = (logits(run(job)) for job in jobs)
    assert np.array_equal(before, overlap) and np.array_equal(before, aside)
