"""Padding that is too much, comes too early, changes real rows, or is all that a ubatch holds. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dbo.batch.coordinate import ROW_PADDED, ROW_REAL, ROW_WANTS_FULL, Common, CommonConfig, Decision, decide
from dbo.batch.slicing import default_split_points, maybe_create_ubatch_slices, slice_plan
from dbo.check import judge
from dbo.moe.row_ops import TorchRowOps
from dbo.trace import Trace
from sim.world import SimWorld
from tests.faults.pair import Decide, Pair, busy, check_pair, decided, ended, ring_step, run
from tests.unit.plan_builder import build, request

HALVES = Common(num_ubatches=2)


def nothing(world: SimWorld) -> None:
    return None


# -- a ubatch that holds padding only: vllm#57020 ---------------------------------------------------------------------


def strictly_less(table: np.ndarray, common: CommonConfig) -> Decision:
    """Guards with `2 * min < size`, so equality slips through."""
    decision = decide(table, common)
    size, least = int(table[ROW_PADDED].max()), int(table[ROW_REAL].min())
    if 2 * least < size:
        return decision
    return replace(
        decision,
        split=True,
        num_ubatches=2,
        split_points=default_split_points(size, 2),
        reason="",
        num_tokens_padded=(size,) * table.shape[1],
    )


def guarded(tokens: Sequence[int], policy: Decide = decide) -> Trace:
    """One request a rank; when split, every rank runs the larger count of rows."""

    def program(world: SimWorld) -> None:
        own = tokens[world.rank]
        decision = decided(world, busy(0, own, vote=True), HALVES, policy=policy)
        if not decision.split:
            ended(world)
            return
        rows = decision.num_tokens_padded[world.rank]
        plan = build([request(0, own, prefilling=True)], num_tokens_padded=rows)
        _, padded = maybe_create_ubatch_slices(True, [own], rows, 1, 2, decision.split_points)
        assert padded is not None
        parts = [slice_plan(plan, piece) for piece in padded]
        world.trace.host("slices", parent=plan.to_dict(), ubatches=[p.to_dict() for p in parts])
        ring_step(world, [nothing, nothing], begin=False)

    return run(program, ranks=2, config={"block_size": 8})


# -- padding that nobody needs: vllm#26375, vllm#34102 ----------------------------------------------------------------


def always_to_the_maximum(table: np.ndarray, common: CommonConfig) -> Decision:
    """Every rank is padded to the largest count, also when the step is eager and whole."""
    return replace(decide(table, common), num_tokens_padded=(int(table[ROW_PADDED].max()),) * table.shape[1])


def before_the_modes_meet(table: np.ndarray, common: CommonConfig) -> Decision:
    """A rank that wants a graph is padded to its size; only then the modes of the ranks are reduced."""
    captured = common.cudagraph_capture_sizes
    rows = [
        min((s for s in captured if s >= own), default=own) if wants else own
        for own, wants in zip(table[ROW_PADDED].tolist(), table[ROW_WANTS_FULL].tolist(), strict=True)
    ]
    return replace(decide(table, common), num_tokens_padded=tuple(rows))


def padded(tokens: Sequence[int], full: Sequence[bool], policy: Decide = decide) -> Trace:
    common = Common(num_ubatches=2, cudagraph_capture_sizes=(64,))

    def program(world: SimWorld) -> None:
        wants = full[world.rank]
        decided(world, busy(0, tokens[world.rank], query_len=int(wants), full=wants), common, policy=policy)
        ended(world)

    return run(program, ranks=2)


def rows_of(trace: Trace) -> list[Any]:
    return [record.attrs["decision"]["num_tokens_padded"] for record in trace.of_kind("decide")]


# -- padding that reaches real rows: vllm#41249 -----------------------------------------------------------------------

REAL, ROWS = 3, 8


class MultipliesByTheMask(TorchRowOps):
    """NaN times 0 is NaN."""

    def pack(self, x: Any, topk_weights: Any, topk_ids: Any, ranks: int, local_experts: int) -> Any:
        mask = (topk_ids >= 0).any(-1, keepdim=True)
        return x * mask, torch.cat((topk_ids.float(), topk_weights), dim=-1)


def sent(row_ops: TorchRowOps, content: float) -> torch.Tensor:
    """Real rows after packing and after a quantisation whose scale is the maximum of the whole group of 8 rows."""
    x = torch.arange(1.0, ROWS * 4 + 1).view(ROWS, 4)
    x[REAL:] = content
    ids = torch.zeros(ROWS, 2, dtype=torch.int64)
    ids[REAL:] = -1
    packed, _ = row_ops.pack(x, torch.ones(ROWS, 2), ids, 1, 4)
    scale = packed.abs().amax() / 127
    return ((packed / scale).round() * scale)[:REAL]


def varied(row_ops: TorchRowOps) -> Trace:
    def program(world: SimWorld) -> None:
        for content in (0.0, 1e30, float("inf"), float("nan")):
            difference = (sent(row_ops, content) - sent(row_ops, 0.0)).abs().max()
            world.trace.host(
                "numeric",
                name=f"rows 0 to {REAL - 1}",
                error=float(difference),
                limit=0.0,
                varied="padding",
                reference=f"padding rows of 0 instead of {content}",
            )

    return run(program)


PAIRS = [
    Pair(
        case="vllm-project/vllm#57020",
        id="empty-ubatch",
        uses="dbo.batch.coordinate.decide",
        buggy=lambda: guarded([64, 128], strictly_less),
        fixed=lambda: guarded([64, 128]),
        culprit={"rank": 0, "ubatch": 1, "step": 0},
        says=("64 real tokens in 2 ubatches of 64 + 64 rows",),
    ),
    Pair(
        case="vllm-project/vllm#26375",
        id="padding-leak",
        uses="dbo.batch.coordinate.decide",
        buggy=lambda: padded([8000, 200], [False, False], always_to_the_maximum),
        fixed=lambda: padded([8000, 200], [False, False]),
        culprit={"rank": 1, "step": 0},
        says=("runs 8000 rows", "its own count is 200"),
    ),
    Pair(
        case="vllm-project/vllm#34102",
        id="padding-leak",
        uses="dbo.batch.coordinate.decide",
        buggy=lambda: padded([40, 8], [True, False], before_the_modes_meet),
        fixed=lambda: padded([40, 8], [True, False]),
        culprit={"rank": 0, "step": 0},
        says=("runs 64 rows", "its own count is 40"),
    ),
    Pair(
        case="vllm-project/vllm#41249",
        id="padding-leak",
        uses="dbo.moe.row_ops.TorchRowOps",
        buggy=lambda: varied(MultipliesByTheMask()),
        fixed=lambda: varied(TorchRowOps()),
        culprit={"rank": 0},
        says=("rows 0 to 2", "changes by nan"),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


@pytest.mark.parametrize(("tokens", "split"), [((63, 128), False), ((64, 128), False), ((65, 128), True)])
def test_the_neighbours_of_one_half(tokens: tuple[int, int], split: bool) -> None:
    trace = guarded(tokens)
    assert [r.attrs["decision"]["split"] for r in trace.of_kind("decide")] == [split] * 2
    assert judge(trace).verdict.text == "proved"
    # The strict guard differs from ours in exactly one of the three.
    flagged = judge(guarded(tokens, strictly_less)).verdict.text == "violated(empty-ubatch)"
    assert flagged == (tokens[0] == 64)


def test_all_ranks_derive_the_same_rows() -> None:
    assert rows_of(padded([8000, 200], [False, False])) == [[8000, 200]] * 2
    assert rows_of(padded([40, 8], [True, False])) == [[40, 8]] * 2
    assert rows_of(padded([40, 8], [True, True])) == [[64, 64]] * 2
    assert rows_of(guarded([65, 128])) == [[128, 128]] * 2


@pytest.mark.parametrize("content", [1e30, float("inf"), float("nan")])
def test_real_rows_are_bit_equal_whatever_padding_holds(content: float) -> None:
    assert torch.equal(sent(TorchRowOps(), content), sent(TorchRowOps(), 0.0))
