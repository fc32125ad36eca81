"""Pairs of opposite faults: a check that looks one way only passes the other one. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dbo.batch.coordinate import Common, CommonConfig, Decision, RankColumn, decide
from dbo.check import judge
from dbo.trace import Trace
from dbo.ubatching.ring import UBatchContext
from sim.world import SimWorld
from tests.faults import test_agreement as agreement
from tests.faults import test_graphs as graphs
from tests.faults import test_numeric as numeric
from tests.faults import test_padding as padding
from tests.faults import test_streams as streams
from tests.faults.pair import busy, decided, ended, ring_step, run, yields
from tests.faults.test_ring import DepartedLooksPresent


@dataclass(frozen=True, kw_only=True)
class Opposites:
    """Two faults that lie on either side of what is right; each with the class that names it."""

    name: str
    one: tuple[str, Callable[[], Trace]]
    other: tuple[str, Callable[[], Trace]]
    right: Callable[[], Trace]

    def __str__(self) -> str:
        return self.name


class EverybodyHasLeft(UBatchContext):
    """Never wakes a peer that waits: it takes everybody for gone."""

    left = property(lambda self: True, lambda self, value: None)


def handed_over(context: type[UBatchContext]) -> Trace:
    return run(lambda world: ring_step(world, [yields(2), yields(3)], declared=[2, 3], context=context))


def agreed_rows(world: SimWorld, decision: Decision) -> int:
    return decision.num_tokens_padded[world.rank]


def graph_with_dummy(*, padded: bool) -> Trace:
    """One rank decodes 100 tokens under a graph of 128, the other one is idle."""
    return agreement.graph_step(agreed_rows if padded else agreement.local_rows)


def no_tokens(*, real_work: bool) -> Trace:
    """One rank has none: it takes part whole, or runs a ubatch without a token as if there were one."""

    def always(table: np.ndarray, common: CommonConfig) -> Decision:
        decision = decide(table, common)
        return replace(decision, split=True, num_ubatches=2, split_points=(4,), num_tokens_padded=(8, 8), reason="")

    return padding.guarded([8, 4], always if real_work else decide)


def zero_is_skipped() -> Trace:
    return agreement.skipping(lambda step, count: busy(step, count) if count else None)


def zero_takes_part() -> Trace:
    return agreement.skipping(lambda step, count: busy(step, count) if count else RankColumn.idle(step))


def whole_step(policy: Callable[[np.ndarray, CommonConfig], Decision]) -> Trace:
    def program(world: SimWorld) -> None:
        decided(world, busy(0, (40, 8)[world.rank]), Common(num_ubatches=2), policy=policy)
        ended(world)

    return run(program, ranks=2)


SEVENS = torch.full((2, 1, 1, 1), 7.0), torch.full((2, 1, 1), -math.inf)

OPPOSITES: Sequence[Opposites] = [
    Opposites(
        name="an event too early, and too late",
        one=("stream-race", lambda: streams.exchange_after_a(streams.RecordsElsewhere)),
        other=("no-overlap", lambda: streams.exchange_after_a(streams.RecordsAfterTheYield)),
        right=lambda: streams.exchange_after_a(UBatchContext),
    ),
    Opposites(
        name="waking a peer that has gone, and never waking one that waits",
        one=("unequal-yields", lambda: handed_over(DepartedLooksPresent)),
        other=("deadlock", lambda: handed_over(EverybodyHasLeft)),
        right=lambda: handed_over(UBatchContext),
    ),
    Opposites(
        name="not padding a dummy, and padding when nobody needs it",
        one=("dp-disagreement", lambda: graph_with_dummy(padded=False)),
        other=("padding-leak", lambda: whole_step(padding.always_to_the_maximum)),
        right=lambda: graph_with_dummy(padded=True),
    ),
    Opposites(
        name="a local decision over the group's, and the group's checked again locally",
        one=("dp-disagreement", lambda: agreement.dummy_step(agreement.dummies_do_not_split)),
        other=("dp-disagreement", lambda: agreement.soft_step([9000, 100], asks_again=True)),
        right=lambda: agreement.soft_step([9000, 100], asks_again=False),
    ),
    Opposites(
        name="captured staging in a pool that grows, and in one that recycles",
        one=("graph-stale", lambda: graphs.grown(own_staging=False)),
        other=("buffer-reuse", lambda: graphs.two_sizes(["G4", "G8"], temporary=True)),
        right=lambda: graphs.two_sizes(["G4", "G8"], temporary=False),
    ),
    Opposites(
        name="a finite stand-in for minus infinity, and a true one without a guard",
        one=("numeric", lambda: numeric.merged_by(numeric.finite_stand_in, *SEVENS)),
        other=("numeric", lambda: numeric.merged_by(numeric.unguarded, *SEVENS)),
        right=lambda: numeric.merged_by(numeric.merge, *SEVENS),
    ),
    Opposites(
        name="no tokens as skip, and as real work",
        one=("collective-mismatch", zero_is_skipped),
        other=("empty-ubatch", lambda: no_tokens(real_work=True)),
        right=zero_takes_part,
    ),
]


@pytest.mark.parametrize("pair", OPPOSITES, ids=str)
def test_both_sides_are_found_and_the_middle_passes(pair: Opposites) -> None:
    for id, program in (pair.one, pair.other):
        assert judge(program()).verdict.text == f"violated({id})"
    assert judge(pair.right()).verdict.text == "proved"


def test_the_middle_of_padding_is_right_on_both_counts() -> None:
    assert judge(whole_step(decide)).verdict.text == "proved"
    assert judge(no_tokens(real_work=False)).verdict.text == "proved"


def test_a_peer_that_is_never_woken_waits_for_its_baton() -> None:
    (violation,) = judge(handed_over(EverybodyHasLeft)).violations
    assert violation.rank == 0 and "rank 0 u1 (step 0) waits for baton u1" in violation.sentence
