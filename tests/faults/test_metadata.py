"""Fields of a ubatch's metadata that are shared, stale or cut from something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.batch.plan import BatchPlan
from dbo.batch.slicing import UBatchSlice, maybe_create_ubatch_slices, slice_plan
from dbo.check import judge
from dbo.trace import Trace
from sim.world import SimWorld
from tests.faults.pair import Body, Pair, check_pair, ring_step, run, yields
from tests.unit.plan_builder import MB, build, part, request

SlicePlan = Callable[[BatchPlan, UBatchSlice], BatchPlan]
Request = dict[str, Any]


def cut(
    requests: Sequence[Request],
    point: int,
    how: SlicePlan = slice_plan,
    *,
    parent: BatchPlan | None = None,
    parts: list[BatchPlan] | None = None,
) -> Trace:
    """One step of `requests`, cut at token `point` by `how`; each ubatch runs what its positions say that it holds."""
    plan = parent or build(requests)

    def layer(ubatch: BatchPlan) -> Body:
        """Two exchanges a layer, so two yields; without a row there is nothing to exchange."""
        return yields(2) if len(ubatch.positions) else yields(0)

    def program(world: SimWorld) -> None:
        scheduled = [r["scheduled"] for r in requests]
        _, padded = maybe_create_ubatch_slices(True, scheduled, plan.num_tokens_padded, plan.num_reqs, 2, point)
        assert padded is not None
        made = [how(plan, piece) for piece in padded]
        world.in_ubatch(-1, step=0)
        world.trace.host("slices", parent=plan.to_dict(), ubatches=[p.to_dict() for p in made])
        ring_step(world, [layer(p) for p in made], declared=[2, 2])
        if parts is not None:
            parts.extend(made)

    return run(program, config={"block_size": 8})


# -- a mask that is built after the count has shrunk: vllm#57502 ------------------------------------------------------

SIXTY_FOUR = [request(0, 64, prefilling=True)]


def too_short() -> BatchPlan:
    """Rows for one ubatch of 32 where the batch has 64."""
    whole = build(SIXTY_FOUR)
    return replace(whole, positions=whole.positions[:32])


# -- metadata cached without the ubatch: vllm#48659 -------------------------------------------------------------------

FIVE = [request(0, n, first_block=1 + MB * i, prefilling=True) for i, n in enumerate((5, 9, 2, 7, 1))]


def cached() -> SlicePlan:
    """The cache's key names the spec and the builder; the next ubatch only brings its own block table."""
    cache: dict[tuple[str, str], BatchPlan] = {}

    def how(plan: BatchPlan, piece: UBatchSlice) -> BatchPlan:
        own = slice_plan(plan, piece)
        first = cache.setdefault(("spec", "builder"), own)
        return replace(first, block_table=own.block_table)

    return how


# -- computed tokens that do not advance: vllm#56031 ------------------------------------------------------------------

CONTINUED = [request(24, 8)]


def by_request_only(plan: BatchPlan, piece: UBatchSlice) -> BatchPlan:
    """Computed counts are cut by request, and not advanced by what the earlier ubatch holds."""
    return replace(slice_plan(plan, piece), num_computed_tokens=plan.num_computed_tokens[piece.request_slice].copy())


PAIRS = [
    Pair(
        case="vllm-project/vllm#57502",
        id="metadata-slice",
        uses="dbo.batch.slicing.slice_plan",
        buggy=lambda: cut(SIXTY_FOUR, 32, parent=too_short()),
        fixed=lambda: cut(SIXTY_FOUR, 32),
        culprit={"rank": 0, "step": 0},
        says=("positions of the batch", "32 entries for 64 token rows"),
        also=frozenset({"unequal-yields"}),
    ),
    Pair(
        case="vllm-project/vllm#48659",
        id="metadata-slice",
        uses="dbo.batch.slicing.slice_plan",
        buggy=lambda: cut(FIVE, 16, cached()),
        fixed=lambda: cut(FIVE, 16),
        culprit={"rank": 0, "ubatch": 1, "step": 0},
        says=("query_start_loc of ubatch 1", "[0, 5, 14, 16]", "[0, 7, 8]"),
    ),
    Pair(
        case="vllm-project/vllm#56031",
        id="metadata-slice",
        uses="dbo.batch.slicing.slice_plan",
        buggy=lambda: cut(CONTINUED, 4, by_request_only),
        fixed=lambda: cut(CONTINUED, 4),
        culprit={"rank": 0, "ubatch": 1, "step": 0},
        says=("num_computed_tokens of ubatch 1", "[24]", "[28]"),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


def test_the_short_rows_show_as_unequal_yields_with_their_numbers() -> None:
    report = judge(cut(SIXTY_FOUR, 32, parent=too_short()))
    (yielded,) = (v for v in report.violations if v.id == "unequal-yields")
    assert yielded.ubatch == 1 and "yielded 0 times" in yielded.sentence and "y0=2, y1=0" in yielded.sentence


@pytest.mark.parametrize(("requests", "point"), [(FIVE, 16), (CONTINUED, 4), (SIXTY_FOUR, 32)], ids=["5", "1", "64"])
def test_a_slice_equals_its_tokens_built_alone(requests: list[Request], point: int) -> None:
    parts: list[BatchPlan] = []
    cut(requests, point, parts=parts)
    total = sum(r["scheduled"] for r in requests)
    for made, (start, stop) in zip(parts, [(0, point), (point, total)], strict=True):
        assert made.to_dict() == build(part(requests, start, stop)).to_dict()
        assert np.array_equal(made.seq_lens - np.diff(made.query_start_loc), made.num_computed_tokens)
    assert [len(p.query_start_loc) - 1 for p in parts] == [p.num_reqs for p in parts]


def test_the_parent_is_left_as_it_was() -> None:
    parent = build(CONTINUED)
    before = parent.to_dict()
    cut(CONTINUED, 4, parent=parent)
    assert parent.to_dict() == before
