"""Ranks that decide differently, and ranks that meet in different operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dbo.batch.coordinate import ROW_REAL, ROW_VOTE, Common, CommonConfig, Decision, RankColumn, decide, vote
from dbo.batch.slicing import maybe_create_ubatch_slices
from dbo.check import judge
from dbo.config import DBOConfig
from dbo.moe.nccl import NcclPrepareAndFinalize
from dbo.trace import Trace
from dbo.ubatching.forward_context import ForwardContext, override_forward_context
from dbo.ubatching.graphs import StepGraphs, graph_key
from sim.tasks import Task
from sim.world import SimWorld
from tests.faults.pair import MODEL_ONLY, Pair, all_to_all, busy, check_pair, decided, ended, op, ring_step, run

HALVES = Common(num_ubatches=2)
THRESHOLD = SimpleNamespace(enable_dbo=True, dbo_decode_token_threshold=32, dbo_prefill_token_threshold=32)


def nothing(world: SimWorld) -> None:
    return None


# -- the vote of a dummy batch ----------------------------------------------------------------------------------------


def votes_from_counts(table: np.ndarray, common: CommonConfig) -> Decision:
    """policy: no vote is sent; each rank derives all votes from the shared token counts, dummies included."""
    table = table.copy()
    table[ROW_VOTE] = table[ROW_REAL] >= THRESHOLD.dbo_decode_token_threshold
    return decide(table, common)


def dummies_do_not_split(table: np.ndarray, common: CommonConfig) -> Decision:
    """A dummy batch opts out by itself."""
    whole = {"split": False, "num_ubatches": 1, "split_points": (), "reason": "dummy"}
    return replace(votes_from_counts(table, common), **whole)  # type: ignore[arg-type]


def dummy_step(policy_of_the_dummy: Any) -> Trace:
    """Tokens [64, 64 of a dummy batch], threshold 32; two dispatches a layer when split, one when not."""

    def program(world: SimWorld) -> None:
        policy = policy_of_the_dummy if world.rank == 1 else votes_from_counts
        decision = decided(world, busy(0, 64), HALVES, policy=policy)
        rows = 64 // decision.num_ubatches
        if decision.split:
            ring_step(world, [lambda w: all_to_all(w, rows)] * 2, begin=False)
        else:
            all_to_all(world, rows)
            ended(world)
        world.wait_current_stream("sample", declared=True)

    return run(program, ranks=2)


# -- graph or eager ---------------------------------------------------------------------------------------------------


def by_own_batch(column: RankColumn) -> Callable[[np.ndarray, CommonConfig], Decision]:
    """FULL is chosen by the rank's own batch; what the others run is not asked."""

    def policy(table: np.ndarray, common: CommonConfig) -> Decision:
        full = {"cudagraph_mode": "FULL", "uniform_query_len": column.uniform_query_len} if column.wants_full else {}
        return replace(decide(table, common), **full)

    return policy


def mixed_step(own: bool) -> Trace:
    """Tokens [64 decoding, 64 with a prefill of 8], thresholds 32, one graph of 64."""
    common = Common(num_ubatches=2, cudagraph_capture_sizes=(64,))

    def program(world: SimWorld) -> None:
        decodes = int(world.rank == 0)
        votes = vote(THRESHOLD, num_tokens=64, uniform_decode=bool(decodes))
        column = busy(0, 64, vote=votes, query_len=decodes, full=bool(decodes))
        decision = decided(world, column, common, policy=by_own_batch(column) if own else decide)
        if decision.cudagraph_mode == "FULL":
            ended(world)
        else:
            ring_step(world, [nothing] * decision.num_ubatches, begin=False)

    return run(program, ranks=2)


GRAPHS = DBOConfig(
    data_parallel_size=2,
    enable_expert_parallel=True,
    cudagraph_mode="FULL",
    capture_sizes=(16, 64, 128),
    max_num_seqs=128,
)


def graph_step(rows_of: Callable[[SimWorld, Decision], int]) -> Trace:
    """Tokens [100, 1 of a dummy], graphs {16, 64, 128}: 128 rows are agreed."""

    def context(rows: int, step: int) -> ForwardContext:
        key = graph_key(GRAPHS, "s", num_tokens=[rows], num_reqs=[rows], query_len=1)
        return ForwardContext(
            attn_metadata=SimpleNamespace(num_actual_tokens=rows), num_tokens=rows, step=step, graph_key=key
        )

    def program(world: SimWorld) -> None:
        graphs = StepGraphs(world)
        graphs.capturing = True
        world.in_ubatch(-1, step=-2)
        for size in GRAPHS.cudagraph_capture_sizes:
            graphs.capture(context(size, -2), {}, lambda: op(world, "forward", us=5))
        column = busy(0, 100, query_len=1, full=True) if world.rank == 0 else RankColumn.idle(0)
        decision = decided(world, column, GRAPHS)
        graphs.replay(context(rows_of(world, decision), 0), {})
        ended(world)

    return run(program, ranks=2)


def local_rows(world: SimWorld, decision: Decision) -> int:
    """The dummy looks its graph up with its own, unpadded count."""
    own = decision.num_tokens_padded[0] if world.rank == 0 else 1
    return min(size for size in GRAPHS.cudagraph_capture_sizes if size >= own)


# -- a decision that is taken, or checked, locally --------------------------------------------------------------------

MAX_LEN, DRAFTS = 2048, 3


def draft_step(*, shared: bool) -> Trace:
    """Longest sequences [2046, 100], length limit 2048, three draft tokens, each draft forward one exchange."""

    def program(world: SimWorld) -> None:
        longest = (2046, 100)[world.rank]
        if shared:
            mine = np.zeros(world.size, dtype=np.int32)
            mine[world.rank] = longest
            longest = int(world.control.all_reduce(mine, tag=0).max())
        forwards = DRAFTS if longest + DRAFTS <= MAX_LEN else 0
        decided(world, busy(0, 8), HALVES, draft_forwards=forwards)
        for _ in range(forwards):
            all_to_all(world, 8)
        world.wait_current_stream("drafts", declared=True)
        ended(world)

    return run(program, ranks=2)


SOFT_MIN_TOKENS = 8192


def soft_or_hard_and(table: np.ndarray, common: CommonConfig) -> Decision:
    """policy: one rank above the soft size opens the split for all; every rank must be able to. No common padding."""
    tokens = table[ROW_REAL].tolist()
    split = max(tokens) >= SOFT_MIN_TOKENS and min(tokens) >= common.num_ubatches
    return replace(
        decide(table, common),
        split=split,
        num_ubatches=common.num_ubatches if split else 1,
        split_points=(),
        num_tokens_padded=tuple(tokens),
        reason="" if split else "not split: a rank cannot",
    )


def soft_step(tokens: Sequence[int], *, asks_again: bool) -> Trace:
    def program(world: SimWorld) -> None:
        own = tokens[world.rank]
        decision = decided(world, busy(0, own), HALVES, policy=soft_or_hard_and)
        force = decision.split and (own >= SOFT_MIN_TOKENS or not asks_again)
        slices, _ = maybe_create_ubatch_slices(force, [own], own, 1, 2)
        if slices is None:
            ended(world)
        else:
            ring_step(world, [nothing] * len(slices), begin=False)

    return run(program, ranks=2)


# -- members that meet in different operations ------------------------------------------------------------------------


def skipping(column_of: Callable[[int, int], RankColumn | None]) -> Trace:
    """Tokens r0 = [8, 8, 8, 8, 8], r1 = [4, 0, 4, 4, 4]: five steps, the last one cut short by whoever drifted."""
    tokens = ((8, 8, 8, 8, 8), (4, 0, 4, 4, 4))

    def program(world: SimWorld) -> None:
        for step, count in enumerate(tokens[world.rank]):
            column = column_of(step, count)
            if column is not None:
                decided(world, column, HALVES)
                ended(world)

    return run(program, ranks=2)


def chunked(sizes_of: Callable[[int, int], list[int]]) -> Trace:
    """Tokens [512, 200] in chunks of 256: sizes [256, 200], then [256, 0]."""

    def program(world: SimWorld) -> None:
        backend = NcclPrepareAndFinalize(world, num_experts=4)
        for chunk in range(2):
            sizes = sizes_of(world.rank, chunk)
            rows = world.tensors.empty((sizes[world.rank], 8), "chunk")
            routing = world.tensors.empty((sizes[world.rank], 2), "routing")
            with override_forward_context(ForwardContext(attn_metadata=None, num_tokens_across_ranks=sizes)):
                backend.prepare_async(rows, routing, routing)()

    return run(program, ranks=2)


def shared_sizes(rank: int, chunk: int) -> list[int]:
    return [min(max(tokens - 256 * chunk, 0), 256) for tokens in (512, 200)]


def own_entry_patched(rank: int, chunk: int) -> list[int]:
    """A rank without tokens sends its first chunk again, and only it knows."""
    sizes = shared_sizes(rank, chunk)
    return [size or shared_sizes(r, 0)[r] if r == rank else size for r, size in enumerate(sizes)]


class C2First:
    """The tie on rank 1 is broken the other way round."""

    def choose(self, ready: Sequence[Task]) -> int:
        return next((i for i, task in enumerate(ready) if (task.rank, task.line) == (1, "c2")), 0)


def gated(*, one_event: bool, strategy: Any = None) -> Trace:
    """Two exchanges behind events: one that wakes both, or one for each edge."""

    def program(world: SimWorld) -> None:
        batons = {name: world.host.baton(name) for name in ("c1", "c2")}
        workers = {name: world.host.worker(name) for name in batons}

        def launches(name: str) -> None:
            batons[name].take()
            world.set_stream(world.comm)
            world.at_point(name, layer=0)
            world.trace.host("point")
            all_to_all(world, 1)
            world.trace.host("point")
            if name == "c1" and not one_event:
                batons["c2"].give()

        for name, worker in workers.items():
            worker.submit(lambda name=name: launches(name))
        world.trace.host("point")
        for name in batons if one_event else ["c1"]:
            batons[name].give()
        for worker in workers.values():
            worker.join()

    return run(program, ranks=2, strategy=strategy)


HANGS = frozenset({"deadlock", "collective-mismatch"})
PAIRS = [
    Pair(
        case="vllm-project/vllm#50945",
        id="dp-disagreement",
        uses="dbo.batch.coordinate.decide",
        buggy=lambda: dummy_step(dummies_do_not_split),
        fixed=lambda: dummy_step(votes_from_counts),
        culprit={"rank": 1, "step": 0},
        says=("num_ubatches=2 and num_ubatches=1",),
        also=HANGS,
    ),
    Pair(
        case="vllm-project/vllm#25625",
        id="dp-disagreement",
        uses="dbo.batch.coordinate.decide",
        buggy=lambda: mixed_step(own=True),
        fixed=lambda: mixed_step(own=False),
        culprit={"rank": 1, "step": 0},
        says=("cudagraph_mode=FULL and cudagraph_mode=NONE",),
    ),
    Pair(
        case="vllm-project/vllm#25906",
        id="dp-disagreement",
        uses="dbo.ubatching.graphs.StepGraphs",
        buggy=lambda: graph_step(local_rows),
        fixed=lambda: graph_step(lambda world, decision: decision.num_tokens_padded[world.rank]),
        culprit={"rank": 1, "step": 0},
        says=("num_tokens=(128,) and num_tokens=(16,)",),
    ),
    Pair(
        case="vllm-project/vllm#44185",
        id="dp-disagreement",
        uses=MODEL_ONLY,
        buggy=lambda: draft_step(shared=False),
        fixed=lambda: draft_step(shared=True),
        culprit={"rank": 1, "step": 0},
        says=("draft_forwards=0 and draft_forwards=3",),
        also=HANGS,
    ),
    Pair(
        case="ROCm/ATOM#1627",
        id="dp-disagreement",
        uses="dbo.batch.slicing.maybe_create_ubatch_slices",
        buggy=lambda: soft_step([9000, 100], asks_again=True),
        fixed=lambda: soft_step([9000, 100], asks_again=False),
        culprit={"rank": 1, "step": 0},
        says=("ran 0 ubatches", "after deciding for 2"),
    ),
    Pair(
        case="vllm-project/vllm#43547",
        id="collective-mismatch",
        uses="dbo.batch.coordinate.exchange",
        buggy=lambda: skipping(lambda step, count: busy(step, count) if count else None),
        fixed=lambda: skipping(lambda step, count: busy(step, count) if count else RankColumn.idle(step)),
        culprit={"rank": 1},
        says=("dp.cpu #1 differs in tag", "tag=1", "tag=2"),
    ),
    Pair(
        case="NVIDIA/TensorRT-LLM#16745",
        id="collective-mismatch",
        uses="dbo.moe.nccl.NcclPrepareAndFinalize",
        buggy=lambda: chunked(own_entry_patched),
        fixed=lambda: chunked(shared_sizes),
        culprit={"rank": 1},
        says=("rank 1 sends rank 0 200 rows, rank 0 expects 0",),
    ),
    Pair(
        case="NVIDIA/Megatron-LM#1810",
        id="collective-mismatch",
        uses=MODEL_ONLY,
        buggy=lambda: gated(one_event=True, strategy=C2First()),
        fixed=lambda: gated(one_event=False, strategy=C2First()),
        culprit={"rank": 1},
        says=("ep #0 differs in tag", "'c1'", "'c2'"),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


def test_one_event_hides_behind_an_equal_tie_but_leaves_a_choice_open() -> None:
    report = judge(gated(one_event=True))
    assert report.violations == () and report.choices and report.verdict.name == "sampled"
    assert judge(gated(one_event=False)).verdict.text == "proved"


@pytest.mark.parametrize(("tokens", "split"), [((9000, 100), True), ((9000, 1), False), ((100, 100), False)])
def test_soft_size_is_or_and_can_split_is_and(tokens: tuple[int, int], split: bool) -> None:
    trace = soft_step(tokens, asks_again=False)
    assert [r.attrs["decision"]["split"] for r in trace.of_kind("decide")] == [split] * 2
    assert judge(trace).verdict.text == "proved"


def test_fewer_tokens_than_ubatches_split_nobody_even_at_threshold_0() -> None:
    table = np.stack([busy(0, 8, vote=True).to_array(), busy(0, 1, vote=True).to_array()], axis=1)
    assert not decide(table, HALVES).split


def test_a_chunk_without_rows_takes_part() -> None:
    indices = [r.attrs["sends"] for r in chunked(shared_sizes).of_kind("collective") if r.rank == 1]
    assert indices == [[200, 200], [200, 200], [0, 0], [0, 0]]
