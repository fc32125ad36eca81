"""A pair: a buggy program and its fixed twin. All detectors judge both; no torch here.

The programs run in the simulator, so both twins are judged by their traces alone. The harness below plays what an
engine is around the component of `dbo` that a case is about: ranks, a coordinated step, a ring of ubatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from dbo.batch.coordinate import CommonConfig, Decision, RankColumn, decide, exchange
from dbo.batch.slicing import UBatchSlice
from dbo.check import judge
from dbo.check.report import Report
from dbo.engine.components import Components
from dbo.errors import DBOError, UBatchError
from dbo.schedule import load_schedule
from dbo.trace import Trace
from dbo.ubatching.forward_context import ForwardContext, get_forward_context, override_forward_context
from dbo.ubatching.player import SchedulePlayer
from dbo.ubatching.ring import UBatchContext, dbo_current_ubatch_id, dbo_yield
from dbo.ubatching.wrapper import UBatchWrapper
from sim.tasks import Strategy
from sim.work import Work
from sim.world import SimWorld, launch

MODEL_ONLY = "model-only"
"""`Pair.uses` of a case about something that `dbo` does not have."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One case in two programs.

    Attributes:
        case: its id in `tests.faults.cases`.
        name: which variant of the case, where it has several.
        id: the fault class that the buggy twin must be convicted of.
        uses: the shipped component that the case is about, "module.name"; or `MODEL_ONLY`.
        buggy, fixed: run a twin and return its trace.
        culprit: rank, ubatch, step of the violation that the verdict names.
        says: words of its sentence.
        also: other classes that the same root shows as; nothing else may fire.
        raises: the fixed twin raises on purpose, and handles it as promised.
        refuses: the fixed twin does not run: it refuses with an error that names this.
    """

    case: str
    id: str
    uses: str
    buggy: Callable[[], Trace]
    fixed: Callable[[], Trace]
    name: str = ""
    culprit: Mapping[str, int] = field(default_factory=dict)
    says: Sequence[str] = ()
    also: frozenset[str] = frozenset()
    raises: bool = False
    refuses: str = ""

    def __str__(self) -> str:
        return f"{self.case.rpartition('/')[2]}{'-' + self.name if self.name else ''}"


def check_pair(pair: Pair) -> None:
    """The buggy twin is convicted of its class, with its culprit; nothing is said about the fixed one."""
    check_buggy(pair)
    check_fixed(pair)


def check_buggy(pair: Pair) -> Report:
    report = judge(pair.buggy())
    fired = {id for id, count in report.failed.items() if count}
    listing = "\n".join(f"{v.id}: {v.sentence}" for v in report.violations)
    assert report.verdict.text == f"violated({pair.id})", listing or str(report.verdict)
    assert fired <= {pair.id} | pair.also, listing
    first = report.violations[0]
    assert {name: getattr(first, name) for name in pair.culprit} == dict(pair.culprit), listing
    assert all(word in first.sentence for word in pair.says), first.sentence
    return report


def check_fixed(pair: Pair) -> None:
    if pair.refuses:
        try:
            pair.fixed()
        except (DBOError, ValueError) as refused:
            assert pair.refuses in str(refused), refused
        else:
            raise AssertionError(f"{pair}: the fixed twin was not refused")
        return
    report = judge(pair.fixed(), expect_raise=pair.raises)
    assert report.verdict.text == "proved", [f"{v.id}: {v.sentence}" for v in report.violations] or (
        report.verdict.text,
        report.choices[:2],
    )


# -- programs ---------------------------------------------------------------------------------------------------------


def run(program: Callable[[SimWorld], Any], *, ranks: int = 1, strategy: Strategy | None = None, **meta: Any) -> Trace:
    """`program(world)` on every rank, in ordering mode. What a rank raises ends that rank, as the trace says."""

    def main(world: SimWorld) -> None:
        world.trace.host("point")  # so that everything launched has a host record that it was launched after
        program(world)

    launched = launch(main, ranks=ranks, mode="ordering", strategy=strategy)
    launched.trace.meta |= {"backend": "", "ubatches": 2, "schedule": "", "seed": 0, "config": {}} | meta
    return launched.trace


def op(
    world: SimWorld,
    name: str,
    *,
    us: float,
    reads: Sequence[Any] = (),
    writes: Sequence[Any] = (),
    kind: str = "op",
    **attrs: Any,
) -> None:
    """Device work of a known duration on the current stream."""
    world.current_stream().launch(
        Work(
            kind=kind,
            name=name,
            duration_us=us,
            reads=tuple(r.access() for r in reads),
            writes=tuple(w.access() for w in writes),
            src=world.source(),
            attrs=attrs,
        )
    )


Body = Callable[[SimWorld], None]


class Rows:
    """What flows through a ring of bodies: numpy rows, no device."""

    def rows(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        return array[start:stop]

    def cat(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)


def declaring(declared: Sequence[int]) -> Any:
    """A player that plays nothing and declares how often each ubatch yields."""

    class Declaring(SchedulePlayer):
        def __init__(self, context: UBatchContext, *args: Any, **kwargs: Any) -> None:
            super().__init__(context, *args, **kwargs)
            context.declared_yields = declared[context.index]

    return Declaring


def ring_step(
    world: SimWorld,
    bodies: Sequence[Body],
    *,
    declared: Sequence[int] = (),
    context: type[UBatchContext] = UBatchContext,
    step: int = 0,
    before_ubatch: Callable[[int], None] = lambda index: None,
    begin: bool = True,
) -> bool:
    """One split step through the shipped wrapper: `bodies[i]` is the model of ubatch i. False when it failed.

    Args:
        begin: write the step's begin; not when `decided` has done so.
    """
    arrays = world.tensors
    program = Components(context=context, player=declaring(declared or [0] * len(bodies)), before_ubatch=before_ubatch)

    def model(*, input_ids: np.ndarray) -> np.ndarray:
        bodies[dbo_current_ubatch_id()](world)
        return input_ids

    wrapper = UBatchWrapper(
        model,
        world=world,
        schedule=load_schedule("mlp_shared_overlap"),
        backend="deepep_low_latency",
        moe_layers=(),
        program=program,
    )
    size = len(bodies)
    forward = ForwardContext(
        attn_metadata=None,
        num_tokens=size,
        num_real_tokens=size,
        step=step,
        ubatch_slices=[UBatchSlice(slice(i, i + 1), slice(i, i + 1)) for i in range(size)],
        ubatch_metadata=[SimpleNamespace(num_actual_tokens=1)] * size,
    )
    world.in_ubatch(-1, step=step)
    if begin:
        world.trace.host("step.begin", tokens=size, requests=size)
    end: dict[str, Any] = {"status": "ok", "error": "", "rows": size, "expected_rows": size}
    world.tensors = _BodiesAndRows(arrays)
    try:
        with override_forward_context(forward):
            end["rows"] = len(wrapper(input_ids=np.zeros(size)))
    except UBatchError as error:
        end |= {"status": "error", "error": type(error.__cause__).__name__}
    finally:
        world.tensors = arrays
    world.in_ubatch(-1, step=step)
    world.trace.host("step.end", live_threads=wrapper.live_threads, **end)
    return end["status"] == "ok"


Decide = Callable[[np.ndarray, CommonConfig], Decision]


def decided(
    world: SimWorld, column: RankColumn, common: CommonConfig, *, policy: Decide = decide, **more: Any
) -> Decision:
    """Coordinate a step the shipped way: exchange the column, then decide by `policy`; both go into the trace."""
    world.in_ubatch(-1, step=column.step)
    world.trace.host("step.begin", tokens=column.real_tokens, requests=column.real_tokens)
    table = exchange(world.control, column)
    decision = policy(table, common)
    world.trace.host("decide", column=column.to_dict(), table=table.tolist(), decision=decision.to_dict() | more)
    return decision


def ended(world: SimWorld) -> None:
    """The end of a step that ran whole."""
    world.trace.host("step.end", status="ok", error="", rows=0, expected_rows=0, live_threads=0)


def busy(step: int, tokens: int, *, vote: bool = False, query_len: int = 0, full: bool = False) -> RankColumn:
    """The column of a rank with so many tokens, none of them padding."""
    return RankColumn(
        step=step, real_tokens=tokens, padded_tokens=tokens, vote=vote, uniform_query_len=query_len, wants_full=full
    )


def all_to_all(world: SimWorld, rows: int, *, width: int = 8) -> None:
    """An exchange on the current stream in which every rank sends every other one `rows` rows."""
    sent, got = (world.tensors.empty((rows * world.size, width), name) for name in ("sent", "got"))
    world.group.all_to_all_single(got, sent, [rows] * world.size, [rows] * world.size)


class _BodiesAndRows(Rows):
    """The world's own tensors for the bodies, numpy rows for what the wrapper cuts and joins."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arrays, name)


def hand_over(pass_on: Callable[[], None] = dbo_yield) -> None:
    """Yield where the schedule has one: the player counts those that it has passed."""
    player: Any = get_forward_context().player
    pass_on()
    player.context.played_yields += 1


def yields(count: int) -> Body:
    """A body that yields so often."""

    def body(world: SimWorld) -> None:
        for _ in range(count):
            hand_over()

    return body
