"""Yield counts: the law of a plain ring, by brute force; and our own ring, which ends anyway and is reported."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from dbo.check import judge
from dbo.check.unequal_yields import plain_ring_ends
from dbo.ubatching import ring as ubatch
from tests.unit.ring_harness import VEHICLES, Ring, play

COUNTS = range(5)
RINGS = [y for ubatches in (2, 3) for y in product(COUNTS, repeat=ubatches)]


def law(yields: tuple[int, ...]) -> bool:
    """The ring law (docs/design.md, section 4): every thread finishes iff y_0 >= y_1 >= … >= y_{U-1} >= y_0 - 1."""
    chain = (*yields, yields[0] - 1)
    return all(a >= b for a, b in zip(chain, chain[1:], strict=False))


def plain_ring(yields: tuple[int, ...]) -> bool:
    """Whether every thread of a plain ring finishes: fixed successors, one binary semaphore each, nobody is skipped.

    A thread waits for its semaphore, runs; a yield releases the successor's and waits for the own one; the end of the
    thread releases the successor's once more, whether or not that one is still there.
    """
    size = len(yields)
    given = [False] * size
    given[0] = True

    def thread(index: int) -> Iterator[None]:
        for _ in range(yields[index] + 1):
            while not given[index]:
                yield
            given[index] = False
            given[(index + 1) % size] = True

    waiting = {i: thread(i) for i in range(size)}
    for _ in range(size * (max(yields) + 3)):  # more rounds than hand-overs: who has not ended by then waits for ever
        for index in list(waiting):
            if next(waiting[index], "ended") == "ended":
                del waiting[index]
    return not waiting


def test_a_plain_ring_ends_exactly_when_the_law_says_so() -> None:
    assert len(RINGS) == 25 + 125
    assert [y for y in RINGS if plain_ring(y) != law(y)] == []
    assert {law(y) for y in RINGS} == {True, False}


def test_the_detectors_law_is_the_same_law() -> None:
    assert [y for y in RINGS if plain_ring_ends(y) != plain_ring(y)] == []


def _yielding(count: int):
    def body(ring: Ring) -> None:
        for _ in range(count):
            ubatch.dbo_yield()
        ring.say(ubatch.dbo_current_ubatch_id())

    return body


def _explain(yields: tuple[int, ...], vehicle: str = "greenlet") -> str | None:
    """What is wrong with our own ring for these counts, if anything: it must end, with the right report."""
    outcome = play(*map(_yielding, yields), vehicle=vehicle, declared=[2] * len(yields))
    if outcome.launched.deadlocked or sorted(outcome.said) != list(range(len(yields))):
        return f"{yields}: not all ubatches ended"
    violations = judge(outcome.trace).violations
    blamed = {(v.id, v.ubatch) for v in violations}
    wanted = {("unequal-yields", i) for i, y in enumerate(yields) if y != 2}
    if blamed != wanted:
        return f"{yields}: reported {blamed}, not {wanted}"
    fate = "would end" if law(yields) else "would hang"
    return next((f"{yields}: {v.sentence}" for v in violations if f"a plain ring {fate}" not in v.sentence), None)


def test_our_ring_ends_with_any_counts_and_each_wrong_one_is_reported() -> None:
    assert [problem for y in RINGS if (problem := _explain(y))] == []


@pytest.mark.parametrize("vehicle", VEHICLES)
@pytest.mark.parametrize("yields", [(0, 4), (4, 0), (1, 4, 2), (2, 2), (0, 3, 0)], ids=str)
def test_our_ring_ends_on_both_vehicles(vehicle: str, yields: tuple[int, ...]) -> None:
    assert _explain(yields, vehicle) is None
