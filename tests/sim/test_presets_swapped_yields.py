"""Each preset with one yield and the item behind it changed round, in one ubatch of one rank. Ordering mode, no torch.

Such a mutant hands over as often as declared, each consumer still waits for its own producer's event, and the streams are the
same. So it is equivalent as long as that rank's exchanges keep their order; where they do not, ranks meet in different ones
and it is violated. The order is read from the trace here, not asked of a detector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dbo.engine.components import Components
from dbo.schedule import Yield, load_schedule
from dbo.ubatching.player import SchedulePlayer
from sim.world import SimRun
from tests.sim.backend_harness import DECLARED, Case
from tests.sim.job_harness import run, verdict_of


def swapped(at: int, ubatch: int) -> Components:
    class Swapped(SchedulePlayer):
        def __init__(self, context: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(context, *args, **kwargs)
            if context.index == ubatch:
                items = list(self.items)
                items[at], items[at + 1] = items[at + 1], items[at]
                self.items = tuple(items)

    return Components(player=Swapped)


def places(case: Case) -> list[int]:
    items = load_schedule(case.preset).program(case.backend).folded
    pairs = enumerate(zip(items, items[1:], strict=False))
    return [at for at, (one, two) in pairs if isinstance(one, Yield) and not isinstance(two, Yield)]


def exchanges(launched: SimRun, rank: int, backend: str) -> list[tuple[Any, ...]]:
    """This rank's exchanges in order of issue: whose, of which layer, in which half.

    Low-latency calls meet by number, collectives by number on their communicator.
    """
    kind = "send" if backend == "deepep_low_latency" else "collective"
    found = [r for r in launched.trace.records if r.rank == rank and r.kind == kind and r.ubatch >= 0]
    found.sort(key=lambda r: r.id)
    return [(r.ubatch, r.layer, r.point, r.name) for r in found]


ORDERED = [Case(*one) for one in DECLARED if one[1] != "symm_copy"]
COPIES = [Case(*one) for one in DECLARED if one[1] == "symm_copy"]


def mutant(case: Case, at: int, ubatch: int) -> SimRun:
    program = swapped(at, ubatch)
    return run(replace(case.job(), program_of=lambda rank: program if rank == 1 else Components()))


@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_a_yield_swapped_in_one_ubatch_is_violated_or_keeps_the_order_of_exchanges(case: Case) -> None:
    for ubatch in (0, 1):
        for at in places(case):
            launched = mutant(case, at, ubatch)
            kept = exchanges(launched, 0, case.backend) == exchanges(launched, 1, case.backend)
            verdict = verdict_of(launched).verdict
            assert str(verdict) == "proved" if kept else verdict.name == "violated", f"{case} u{ubatch} {at}: {verdict}"


@pytest.mark.parametrize("case", COPIES, ids=str)
def test_copies_have_regions_of_their_own_so_only_a_host_that_waits_for_counts_can_block(case: Case) -> None:
    """Every swap is equivalent but one: there ubatch 1's host waits, with the baton, for counts that its peer rank's ubatch 1
    sends only after a hand-over that this rank never makes."""
    blocked = {("vllm_high_throughput", 1, 2)}
    for ubatch in (0, 1):
        for at in places(case):
            verdict = verdict_of(mutant(case, at, ubatch)).verdict
            wanted = "violated" if (case.preset, ubatch, at) in blocked else "proved"
            assert verdict.name == wanted, f"{case} u{ubatch} {at}: {verdict}"


def test_both_kinds_occur() -> None:
    """The law above is not empty: at least one preset has a swap that changes the order of exchanges."""
    case = Case("vllm_high_throughput", "nccl")
    outcomes = {verdict_of(mutant(case, at, u)).verdict.name for u in (0, 1) for at in places(case)}
    assert outcomes == {"proved", "violated"}
