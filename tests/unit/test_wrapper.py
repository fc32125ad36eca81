"""`UBatchWrapper`: arguments, results, threads and their state, errors. Both task vehicles."""

from __future__ import annotations

import contextvars
from typing import Any, NamedTuple

import numpy as np
import pytest

from dbo.engine.components import Components
from dbo.errors import DBOError, RingError, UBatchError
from dbo.ubatching.forward_context import get_forward_context, override_forward_context
from dbo.ubatching.ring import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield,
)
from sim.world import SimWorld
from tests.unit.ring_harness import VEHICLES
from tests.unit.wrapper_harness import call, in_world, step_context, wrapper_of


@pytest.fixture(params=VEHICLES)
def vehicle(request: pytest.FixtureRequest) -> str:
    return request.param


class Pair(NamedTuple):
    left: Any
    right: Any


IDS = np.arange(10)


# -- arguments and results --------------------------------------------------------------------------------------------


def test_without_slices_the_model_runs_plainly_in_the_callers_task() -> None:
    def program(world: SimWorld) -> None:
        def model(**kwargs: Any) -> Any:
            return kwargs, world.task().line, dbo_enabled()

        kwargs, line, enabled = call(wrapper_of(world, model), step_context(None, num_tokens=10), input_ids=IDS, x=1)
        assert kwargs == {"input_ids": IDS, "x": 1} and kwargs["input_ids"] is IDS
        assert (line, enabled, world.real_tokens()) == ("main", False, 10)
        assert len(world.cluster.scheduler.tasks) == 1

    in_world(program)


@pytest.mark.parametrize("bounds", [(0, 5, 10), (0, 1, 10), (0, 3, 6, 10)], ids=str)
def test_each_ubatch_runs_its_own_slice_in_its_own_thread_and_the_results_are_joined_in_order(
    vehicle: str, bounds: tuple[int, ...]
) -> None:
    def program(world: SimWorld) -> None:
        ran: list[Any] = []

        def model(*, input_ids: np.ndarray) -> np.ndarray:
            dbo_yield()
            ran.append((world.task().line, dbo_current_ubatch_id(), input_ids.tolist()))
            if dbo_current_ubatch_id() == 0:
                dbo_yield()  # the first ubatch ends last: the order of the results is not the order of the ends
            return input_ids * 10

        joined = call(wrapper_of(world, model), step_context(bounds), input_ids=IDS)
        assert joined.tolist() == (IDS * 10).tolist()
        pieces = list(zip(bounds, bounds[1:], strict=False))
        assert ran == [(f"u{i}", i, list(range(a, b))) for i, (a, b) in enumerate(pieces)]

    in_world(program, vehicle=vehicle)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda y: [y]),
        (lambda x: (x, -x), list),
        (lambda x: [x], list),
        (lambda x: {"a": x, "b": (x, [x + 1])}, lambda y: [y["a"], y["b"][0], y["b"][1][0]]),
        (lambda x: Pair(x, {"right": x}), lambda y: [y.left, y.right["right"]]),
    ],
    ids=["array", "tuple", "list", "dict", "named tuple"],
)
def test_arrays_tuples_lists_and_dicts_are_joined(wrap: Any, unwrap: Any) -> None:
    def program(world: SimWorld) -> None:
        joined = call(wrapper_of(world, lambda input_ids: wrap(input_ids)), step_context((0, 4, 10)), input_ids=IDS)
        whole = wrap(IDS)
        assert type(joined) is type(whole)
        assert [part.tolist() for part in unwrap(joined)] == [part.tolist() for part in unwrap(whole)]

    in_world(program)


@pytest.mark.parametrize(
    ("result", "name"), [(None, "NoneType"), ("rows", "str"), ((1, 2), "int"), ({1}, "set")], ids=repr
)
def test_a_result_of_another_type_is_refused_by_name(result: object, name: str) -> None:
    def program(world: SimWorld) -> None:
        with pytest.raises(DBOError, match=f"type={name}"):
            call(wrapper_of(world, lambda **kwargs: result), step_context((0, 4, 10)), input_ids=IDS)

    in_world(program)


def test_all_keyword_arguments_reach_every_ubatch_and_those_with_a_token_axis_are_cut() -> None:
    table = np.zeros((3, 2))

    def program(world: SimWorld) -> None:
        seen: list[dict[str, Any]] = []
        call(
            wrapper_of(world, lambda **kwargs: seen.append(kwargs) or kwargs["input_ids"]),
            step_context((0, 4, 10)),
            input_ids=IDS,
            positions=IDS + 100,
            inputs_embeds=None,
            table=table,
            flag="on",
        )
        assert [(k["input_ids"].tolist(), k["positions"].tolist()) for k in seen] == [
            ([0, 1, 2, 3], [100, 101, 102, 103]),
            ([4, 5, 6, 7, 8, 9], [104, 105, 106, 107, 108, 109]),
        ]
        assert all(k["table"] is table and k["flag"] == "on" and k["inputs_embeds"] is None for k in seen)

    in_world(program)


def test_an_undeclared_argument_with_a_row_per_token_is_refused_by_name() -> None:
    """Passing it whole to each ubatch would run, and be wrong."""

    def program(world: SimWorld) -> None:
        with pytest.raises(DBOError, match=r"argument=token_types, shape=\(10,\)"):
            call(wrapper_of(world, lambda **kwargs: None), step_context((0, 4, 10)), input_ids=IDS, token_types=IDS)

    in_world(program)


def test_each_ubatch_has_a_forward_context_of_its_own() -> None:
    def program(world: SimWorld) -> None:
        seen: list[Any] = []

        def model(input_ids: np.ndarray) -> np.ndarray:
            context = get_forward_context()
            seen.append(
                (
                    context.ubatch,
                    context.num_tokens,
                    context.num_real_tokens,
                    context.step,
                    context.kv_caches,
                    context.num_tokens_across_ranks,
                    context.attn_metadata.num_actual_tokens,
                    world.real_tokens(),
                )
            )
            return input_ids

        whole = step_context((0, 4, 10), real=7, step=5)
        call(wrapper_of(world, model), whole, input_ids=IDS)
        assert seen == [(0, 4, 4, 5, ("cache",), [4], 4, 4), (1, 6, 3, 5, ("cache",), [6], 3, 3)]
        assert whole.ubatch == 0 and len(whole.ubatch_slices) == 2

    in_world(program)


def test_run_serially_gives_the_same_rows_in_the_callers_task_without_a_ring() -> None:
    def program(world: SimWorld) -> None:
        seen: list[Any] = []

        def model(input_ids: np.ndarray) -> np.ndarray:
            context = get_forward_context()
            seen.append((world.task().line, dbo_enabled(), context.ubatch, context.num_real_tokens))
            return input_ids * 3

        wrapper, context = wrapper_of(world, model), step_context((0, 4, 10))
        with override_forward_context(context):
            assert wrapper.run_serially(input_ids=IDS).tolist() == (IDS * 3).tolist()
        assert seen == [("main", False, 0, 4), ("main", False, 1, 6)]
        assert len(world.cluster.scheduler.tasks) == 1

    in_world(program)


# -- threads and their state ------------------------------------------------------------------------------------------


def test_threads_are_made_once_and_a_larger_step_adds_only_what_is_missing(vehicle: str) -> None:
    def program(world: SimWorld) -> None:
        ran: list[tuple[str, int]] = []

        def model(input_ids: np.ndarray) -> np.ndarray:
            ran.append((world.task().line, world.task().id))
            return input_ids

        wrapper = wrapper_of(world, model)
        counts = []
        for step, bounds in enumerate([(0, 5, 10), (0, 2, 10), (0, 3, 6, 10), (0, 5, 10)]):
            call(wrapper, step_context(bounds, step=step), input_ids=IDS)
            counts.append(len(world.cluster.scheduler.tasks) - 1)
        assert counts == [2, 2, 3, 3]
        assert len(set(ran)) == 3 and len(ran) == 9

    in_world(program, vehicle=vehicle)


def test_context_variables_are_installed_for_the_step_and_removed_at_its_end(vehicle: str) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def program(world: SimWorld) -> None:
        seen: list[str] = []

        def model(input_ids: np.ndarray) -> np.ndarray:
            seen.append(variable.get())
            variable.set("changed by a ubatch")
            world.set_stream(world.comm)
            return input_ids

        wrapper = wrapper_of(world, model)
        for value in ("first", "second"):
            variable.set(value)
            call(wrapper, step_context((0, 5, 10)), input_ids=IDS)
            assert variable.get() == value, "a ubatch's change reached its caller"
        assert seen == ["first", "first", "second", "second"]

        between: list[object] = []
        for worker in wrapper._workers:
            worker.submit(lambda: between.append((variable.get(), world.current_stream().name)))
            worker.join()
        assert between == [("unset", "compute")] * 2

    in_world(program, vehicle=vehicle)


def test_the_callers_stream_and_forward_context_are_as_before() -> None:
    def program(world: SimWorld) -> None:
        def model(input_ids: np.ndarray) -> np.ndarray:
            world.set_stream(world.compute)
            return input_ids

        context = step_context((0, 5, 10))
        world.set_stream(world.comm)
        call(wrapper_of(world, model), context, input_ids=IDS)
        assert world.current_stream() is world.comm
        with pytest.raises(RuntimeError, match="only during a forward pass"):
            get_forward_context()

    in_world(program)


# -- errors -----------------------------------------------------------------------------------------------------------


class Bang(Exception):
    """What the models below raise."""


@pytest.mark.parametrize("when", ["before the barrier", "first segment", "last segment", "hook", "exit"])
@pytest.mark.parametrize("ubatch", [0, 1])
def test_the_first_error_is_raised_naming_its_ubatch_and_the_next_step_works(
    vehicle: str, when: str, ubatch: int
) -> None:
    def program(world: SimWorld) -> None:
        armed = [True]

        def bang() -> None:
            if armed[0]:
                raise Bang(when)

        def before(index: int) -> None:
            if index == ubatch and when == "before the barrier":
                bang()

        def model(input_ids: np.ndarray) -> np.ndarray:
            me = dbo_current_ubatch_id()
            if me == ubatch and when == "first segment":
                bang()
            if me != ubatch and when == "hook":
                dbo_register_recv_hook(bang)  # it runs in the peer: the ubatch that is named
            dbo_yield()
            if me == ubatch and when == "hook":
                dbo_maybe_run_recv_hook()
            dbo_yield()
            if me == ubatch and when == "last segment":
                bang()
            if when == "exit":
                if me != ubatch:
                    dbo_register_recv_hook(bang)
                dbo_yield()
            return input_ids

        wrapper = wrapper_of(world, model, program=Components(before_ubatch=before))
        with pytest.raises(UBatchError, match=f"ubatch {ubatch} of rank 0 raised Bang: {when}") as caught:
            call(wrapper, step_context((0, 5, 10)), input_ids=IDS)
        assert isinstance(caught.value.__cause__, Bang) and caught.value.ubatch == ubatch
        assert wrapper.live_threads == 0
        armed[0] = False
        assert call(wrapper, step_context((0, 5, 10), step=1), input_ids=IDS).tolist() == IDS.tolist()

    launched = in_world(program, vehicle=vehicle)
    assert not launched.deadlocked and launched.ticks < 100


def test_when_both_raise_the_first_one_counts(vehicle: str) -> None:
    def program(world: SimWorld) -> None:
        def model(input_ids: np.ndarray) -> np.ndarray:
            try:
                dbo_yield()
                raise Bang("first")
            finally:
                raise Bang(f"second, in {dbo_current_ubatch_id()}") if dbo_current_ubatch_id() == 1 else Bang("first")

        with pytest.raises(UBatchError, match="ubatch 0 of rank 0 raised Bang: first"):
            call(wrapper_of(world, model), step_context((0, 5, 10)), input_ids=IDS)

    in_world(program, vehicle=vehicle)


def test_model_code_that_catches_exceptions_cannot_swallow_the_unwinding(vehicle: str) -> None:
    def program(world: SimWorld) -> None:
        went_on: list[int] = []

        def model(input_ids: np.ndarray) -> np.ndarray:
            try:
                dbo_yield()
            except Exception:
                went_on.append(dbo_current_ubatch_id())
            if dbo_current_ubatch_id() == 0:
                raise Bang("u0")
            went_on.append(1)
            dbo_yield()
            went_on.append(2)
            return input_ids

        with pytest.raises(UBatchError, match="ubatch 0"):
            call(wrapper_of(world, model), step_context((0, 5, 10)), input_ids=IDS)
        assert went_on == []

    in_world(program, vehicle=vehicle)


def test_a_failed_step_drops_pending_hooks(vehicle: str) -> None:
    def program(world: SimWorld) -> None:
        ran: list[str] = []

        def model(input_ids: np.ndarray) -> np.ndarray:
            if dbo_current_ubatch_id() == 0:
                dbo_register_recv_hook(lambda: ran.append("hook"))
                raise Bang("u0")
            return input_ids

        with pytest.raises(UBatchError, match="u0"):
            call(wrapper_of(world, model), step_context((0, 5, 10)), input_ids=IDS)
        assert ran == []

    launched = in_world(program, vehicle=vehicle)
    drops = [(r.line, r.attrs["owner"]) for r in launched.trace.of_kind("hook.drop")]
    assert drops == [("u1", 0)]


def test_a_ring_error_in_a_ubatch_is_an_error_like_any_other(vehicle: str) -> None:
    def program(world: SimWorld) -> None:
        def model(input_ids: np.ndarray) -> np.ndarray:
            dbo_register_recv_hook(lambda: None)
            dbo_register_recv_hook(lambda: None)
            return input_ids

        with pytest.raises(UBatchError, match="ubatch 0") as caught:
            call(wrapper_of(world, model), step_context((0, 5, 10)), input_ids=IDS)
        assert isinstance(caught.value.__cause__, RingError)

    in_world(program, vehicle=vehicle)


def test_a_ring_error_before_the_barrier_does_not_pass_for_the_barriers_own(vehicle: str) -> None:
    def program(world: SimWorld) -> None:
        def before(index: int) -> None:
            if index == 1:
                raise RingError("before the barrier")

        wrapper = wrapper_of(world, lambda input_ids: input_ids, program=Components(before_ubatch=before))
        with pytest.raises(UBatchError, match="ubatch 1 of rank 0 raised RingError: before the barrier"):
            call(wrapper, step_context((0, 5, 10)), input_ids=IDS)

    assert not in_world(program, vehicle=vehicle).deadlocked


def test_a_state_that_cannot_be_set_in_a_ubatch_fails_the_step_and_names_the_ubatch(vehicle: str) -> None:
    """A dispatch mode, say, that refuses to be entered twice: the ubatch never begins, and nobody waits for it."""

    class Refusing:
        def run(self, work: Any, *arguments: Any) -> Any:
            raise RuntimeError("entered twice")

    def program(world: SimWorld) -> None:
        wrapper = wrapper_of(world, lambda **inputs: inputs["input_ids"])
        usual = world.task_state
        world.task_state = Refusing  # type: ignore[method-assign, assignment]
        with pytest.raises(UBatchError, match="entered twice"):
            call(wrapper, step_context((0, 5, 10)), input_ids=IDS)
        assert wrapper.live_threads == 0
        world.task_state = usual  # type: ignore[method-assign]
        assert call(wrapper, step_context((0, 5, 10), step=1), input_ids=IDS).tolist() == IDS.tolist()

    in_world(program, vehicle=vehicle)
