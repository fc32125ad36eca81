"""The ring: departed peers, stale sizes, threads that raise. The twins differ in the context class or the barrier."""

from __future__ import annotations

from typing import Any

import pytest

from dbo.check import judge
from dbo.contract.world import Barrier
from dbo.errors import DBOError
from dbo.trace import Trace
from dbo.ubatching.ring import UBatchContext, dbo_register_recv_hook
from sim.world import SimWorld
from tests.faults.pair import Body, Pair, check_pair, hand_over, ring_step, run, yields


class Broken(DBOError):
    """What a body raises on purpose."""


# -- a peer that has left ---------------------------------------------------------------------------------------------


class DepartedLooksPresent(UBatchContext):
    """The guard asks whether a step is running, not whether that peer is still in it."""

    left = property(lambda self: False, lambda self, value: None)


def shrinking(context: type[UBatchContext], *, hook: bool) -> Trace:
    """u0 = Y, Y, exit; u1 = Y, Y, [a hook for its peer], Y."""

    def longer(world: SimWorld) -> None:
        yields(2)(world)
        if hook:
            dbo_register_recv_hook(lambda: None)
        hand_over()

    return run(lambda world: ring_step(world, [yields(2), longer], declared=[2, 3], context=context))


# -- another number of ubatches in the next step ----------------------------------------------------------------------


class RingSizeOfTheProcess(UBatchContext):
    """Ring size and table are the process's, not the step's; the table only ever grows."""

    table: dict[int, UBatchContext] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table[self.index] = self

    def yield_(self) -> None:
        following = self.table[(self.index + 1) % len(self.table)]
        self.ring.world.trace.host("yield", to=following.index, index=self.yields)
        self.yields += 1
        following.baton.give()
        self.baton.take()
        self.ring.world.trace.host("resume", index=self.yields - 1)


def narrower(context: type[UBatchContext]) -> Trace:
    """A step of three ubatches, then one of two."""

    def program(world: SimWorld) -> None:
        ring_step(world, [yields(1)] * 3, declared=[1] * 3, context=context, step=0)
        ring_step(world, [yields(1)] * 2, declared=[1] * 2, context=context, step=1)

    RingSizeOfTheProcess.table.clear()
    return run(program)


# -- threads that raise -----------------------------------------------------------------------------------------------


class DiesSilently(UBatchContext):
    """A thread that raises never yields again, and nobody passes its baton on."""

    def _leave(self, error: str = "") -> None:
        if error:
            for other in self.ring.contexts:
                other.left = True
        super()._leave(error)


class DeafBarrier:
    """Does not know that one of its parties has left."""

    aborted = True

    def __init__(self, inner: Barrier) -> None:
        self.wait = inner.wait

    def abort(self) -> None:
        return None


class NobodyAborts(UBatchContext):
    """Its start barrier cannot be aborted."""

    def __init__(self, *args: Any) -> None:
        *others, ready = args
        super().__init__(*others, DeafBarrier(ready))


def after_barrier(base: type[UBatchContext]) -> type[UBatchContext]:
    """u1 raises when all have met, before it ever has the baton."""

    class Raising(base):  # type: ignore[valid-type, misc]
        def __enter__(self) -> UBatchContext:
            if self.index == 1:
                take = self.baton.take

                def raising() -> None:
                    take()
                    raise Broken("before the first hand-off")

                self.baton.take = raising  # type: ignore[method-assign]
            return super().__enter__()

    return Raising


def raising(segment: int, count: int) -> Body:
    """A body of `count` yields that raises in `segment` (0: before the first yield)."""

    def body(world: SimWorld) -> None:
        yields(segment)(world)
        raise Broken(f"segment {segment} of {count + 1}")

    return body


def failing(context: type[UBatchContext], bodies: list[Body], *, before: tuple[int, ...] = ()) -> Trace:
    """A step in which somebody raises; then a step in which nobody does."""

    def before_ubatch(index: int) -> None:
        if index in before:
            raise Broken(f"u{index}, before the start barrier")

    def program(world: SimWorld) -> None:
        ring_step(world, bodies, declared=[2, 2], context=context, before_ubatch=before_ubatch)
        ring_step(world, [yields(2)] * 2, declared=[2, 2], context=UBatchContext, step=1)

    return run(program)


def raises(case: str, name: str, *, buggy: Any, fixed: Any, bodies: list[Body], ubatch: int, **more: Any) -> Pair:
    return Pair(
        case=case,
        name=name,
        id="swallowed-error",
        uses="dbo.ubatching.ring.UBatchContext",
        raises=True,
        buggy=lambda: failing(buggy, bodies, **more),
        fixed=lambda: failing(fixed, bodies, **more),
        culprit={"rank": 0, "ubatch": ubatch, "step": 0},
        says=("raised Broken", "never ended (hung)"),
        also=frozenset({"deadlock"}),
    )


BARRIER = "h2oai/datatable#2521"
PAIRS = [
    Pair(
        case="vllm-project/vllm#55586",
        name="hook",
        id="unequal-yields",
        uses="dbo.ubatching.ring.UBatchContext",
        buggy=lambda: shrinking(DepartedLooksPresent, hook=True),
        fixed=lambda: shrinking(UBatchContext, hook=True),
        culprit={"rank": 0, "ubatch": 1, "step": 0},
        says=("a plain ring would hang (y0=2, y1=3)",),
        also=frozenset({"deadlock", "hook-lost"}),
    ),
    Pair(
        case="vllm-project/vllm#55586",
        name="yield",
        id="unequal-yields",
        uses="dbo.ubatching.ring.UBatchContext",
        buggy=lambda: shrinking(DepartedLooksPresent, hook=False),
        fixed=lambda: shrinking(UBatchContext, hook=False),
        culprit={"rank": 0, "ubatch": 1, "step": 0},
        says=("a plain ring would hang (y0=2, y1=3)",),
        also=frozenset({"deadlock"}),
    ),
    raises(
        "vllm-project/vllm#55586",
        "raise",
        buggy=DiesSilently,
        fixed=UBatchContext,
        bodies=[raising(1, 2), yields(2)],
        ubatch=0,
    ),
    Pair(
        case="vllm-project/vllm#30120",
        id="deadlock",
        uses="dbo.ubatching.ring.UBatchContext",
        buggy=lambda: narrower(RingSizeOfTheProcess),
        fixed=lambda: narrower(UBatchContext),
        culprit={"rank": 0, "step": 1},
        says=("baton u0", "baton u1"),
    ),
    raises(
        BARRIER,
        "before the barrier",
        buggy=NobodyAborts,
        fixed=UBatchContext,
        bodies=[yields(2), yields(2)],
        ubatch=1,
        before=(1,),
    ),
    raises(
        BARRIER,
        "before the first hand-off",
        buggy=after_barrier(DiesSilently),
        fixed=after_barrier(UBatchContext),
        bodies=[yields(2), yields(2)],
        ubatch=1,
    ),
    raises(
        BARRIER, "last segment", buggy=DiesSilently, fixed=UBatchContext, bodies=[raising(2, 2), yields(2)], ubatch=0
    ),
    raises(
        BARRIER, "both", buggy=NobodyAborts, fixed=UBatchContext, bodies=[yields(2), yields(2)], ubatch=0, before=(0, 1)
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


def test_a_hook_for_a_departed_peer_runs_at_once_in_its_owner() -> None:
    trace = shrinking(UBatchContext, hook=True)
    (hook,) = trace.of_kind("hook.run")
    assert (hook.attrs["owner"], hook.attrs["runner"], hook.line) == (1, 1, "u1")


def test_a_narrower_step_hands_over_from_0_to_1_to_0() -> None:
    hops = [(r.ubatch, r.attrs["to"]) for r in narrower(UBatchContext).of_kind("yield") if r.step == 1]
    assert hops == [(0, 1), (1, 0)]


@pytest.mark.parametrize("ubatch", [0, 1])
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_a_raise_in_any_segment_of_any_thread_ends_the_step_with_it(ubatch: int, segment: int) -> None:
    bodies = [raising(segment, 2) if i == ubatch else yields(2) for i in range(2)]
    trace = failing(UBatchContext, bodies)
    report = judge(trace)
    (violation,) = report.violations
    assert violation.handled and (violation.id, violation.ubatch, violation.step) == ("swallowed-error", ubatch, 0)
    assert f"segment {segment} of 3" in violation.sentence
    assert [r.attrs["status"] for r in trace.of_kind("step.end")] == ["error", "ok"]
