"""The simulated DeepEP objects as a library: events, streams, refusals, captures. No torch.

One program in the manner of vllm#38451 and vllm#27666 (docs/faults.md): work A on compute, then the other ubatch's B, then a
dispatch that depends on A only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dbo.check import HappensBefore, stream_race
from dbo.errors import CaptureError, ConfigError, NotAvailable
from dbo.moe.comm_sms import reserved_comm_sms
from sim.world import SimRun, SimWorld, launch

TOKENS, HIDDEN, TOPK, EXPERTS = 4, 64, 2, 8


def inputs(world: SimWorld, name: str) -> tuple[Any, Any, Any]:
    """x, ids and weights, made by one operation on compute."""
    weights, ids = world.tensors.empty((TOKENS, TOPK), "weights"), world.tensors.empty((TOKENS, TOPK), "ids")
    x = world.tensors.op(name, [], (TOKENS, HIDDEN), writes=[ids, weights])
    return x, ids, weights


def v1_dispatch(world: SimWorld, x: Any, ids: Any, weights: Any, **options: Any) -> Any:
    buffer = world.high_throughput
    event = options.get("previous_event")
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS, previous_event=event)
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        **options,
    )


def v2_dispatch(world: SimWorld, x: Any, ids: Any, weights: Any, **options: Any) -> Any:
    if "async_finish" in options:
        options["async_with_compute_stream"] = options.pop("async_finish")
    if options.get("previous_event") is not None:
        options["allocate_on_comm_stream"] = True
    options.setdefault("do_cpu_sync", not options.pop("num_worst_tokens", 0))
    return world.elastic.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, **options
    )


LIBRARIES = {"v1": (v1_dispatch, "high_throughput"), "v2": (v2_dispatch, "elastic")}


def run(library: str, capture_at: str) -> SimRun:
    """The dispatch's event is captured after "A", after "B", on an "other" stream, or not at all ("")."""
    dispatch, name = LIBRARIES[library]

    def program(world: SimWorld) -> None:
        buffer = getattr(world, name)
        event = None
        x, ids, weights = inputs(world, "A")
        if capture_at == "A":
            event = buffer.capture()
        if capture_at == "other":
            world.set_stream(world.comm)
            event = buffer.capture()
            world.set_stream(world.compute)
        for _ in range(4):
            world.tensors.op("B", [x], (TOKENS, HIDDEN))
        if capture_at == "B":
            event = buffer.capture()
        dispatch(world, x, ids, weights, previous_event=event, async_finish=True)

    launched = launch(program, ranks=2, mode="ordering")
    assert launched.errors == [None, None]
    return launched


def end_of(launched: SimRun, name: str) -> float:
    return max(r.end_us for r in launched.trace.of_kind("op") if r.name == name and r.rank == 0)


def first_on_comm(launched: SimRun) -> float:
    work = [r for r in launched.trace.records if r.line == "comm" and r.rank == 0 and r.reads]
    return min(r.t_us for r in work)


def races(launched: SimRun) -> int:
    return len(stream_race.detect(launched.trace, HappensBefore(launched.trace)).violations)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("capture_at", "after"), [("A", "A"), ("B", "B"), ("", "B")])
def test_a_call_starts_behind_its_event_or_the_current_streams_tail(library: str, capture_at: str, after: str) -> None:
    launched = run(library, capture_at)
    assert first_on_comm(launched) == pytest.approx(end_of(launched, after), abs=1.0)
    assert end_of(launched, "B") > end_of(launched, "A") + 5
    assert races(launched) == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_event_of_another_stream_is_a_race(library: str) -> None:
    launched = run(library, "other")
    assert first_on_comm(launched) < end_of(launched, "A")
    assert races(launched) > 0


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_compute_waits_for_a_call_or_its_event(library: str, asynchronous: bool) -> None:
    dispatch, _ = LIBRARIES[library]

    def program(world: SimWorld) -> bool:
        x, *_, event = dispatch(world, *inputs(world, "A"), async_finish=asynchronous)
        if asynchronous:
            event.current_stream_wait()
        world.tensors.op("experts", [x], (1, HIDDEN))
        return event.event is not None

    launched = launch(program, ranks=2, mode="ordering")
    assert launched.values == [asynchronous, asynchronous]
    assert races(launched) == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_asynchronous_call_that_nobody_waits_for_is_a_race(library: str) -> None:
    dispatch, _ = LIBRARIES[library]

    def program(world: SimWorld) -> None:
        x, *_ = dispatch(world, *inputs(world, "A"), async_finish=True)
        world.tensors.op("experts", [x], (1, HIDDEN))

    assert races(launch(program, ranks=2, mode="ordering")) > 0


def refused(program: Callable[[SimWorld], object]) -> BaseException | None:
    return launch(program, ranks=1, mode="ordering").errors[0]


REFUSALS: dict[str, tuple[Callable[[SimWorld], object], type[Exception], str]] = {
    "odd SMs": (lambda w: w.high_throughput.set_num_sms(7), ConfigError, "num_sms=7"),
    "no SMs": (lambda w: w.high_throughput.set_num_sms(0), ConfigError, "num_sms=0"),
    "V1 allocates on comm without an event": (
        lambda w: w.high_throughput.get_dispatch_layout(inputs(w, "A")[1], EXPERTS, allocate_on_comm_stream=True),
        ConfigError,
        "async_finish=False",
    ),
    "V2 has an event and allocates on compute": (
        lambda w: w.elastic.dispatch(
            *inputs(w, "A"), num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, previous_event=w.elastic.capture()
        ),
        ConfigError,
        "allocate_on_comm_stream=False",
    ),
    "V2 beyond its maximum": (
        lambda w: w.elastic.dispatch(*inputs(w, "A"), num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS - 1),
        ConfigError,
        f"tokens={TOKENS}",
    ),
    "V2 expands": (
        lambda w: w.elastic.dispatch(
            *inputs(w, "A"), num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, do_expand=True
        ),
        NotAvailable,
        "do_expand=True",
    ),
    "an event of a call in stream order": (
        lambda w: v1_dispatch(w, *inputs(w, "A"))[-1].current_stream_wait(),
        NotAvailable,
        "async_finish=True",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_libraries_refuse(case: str) -> None:
    program, kind, text = REFUSALS[case]
    error = refused(program)
    assert isinstance(error, kind)
    assert text in str(error)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("worst", [0, TOKENS])
def test_a_capture_takes_worst_case_sizes_only(library: str, worst: int) -> None:
    dispatch, _ = LIBRARIES[library]

    def program(world: SimWorld) -> None:
        made = inputs(world, "A")
        with world.new_graph("g").capture():
            dispatch(world, *made, num_worst_tokens=worst)

    error = refused(program)
    assert error is None if worst else isinstance(error, CaptureError)


def test_symmetric_counts_are_no_part_of_a_capture() -> None:
    def program(world: SimWorld) -> None:
        counts = world.copy_rows.counts(inputs(world, "A")[1], 1, EXPERTS)
        with world.new_graph("g").capture():
            world.symmetric.exchange_counts(counts, channel=(0, "dispatch"))

    assert isinstance(refused(program), CaptureError)


class Setting:
    num_sms = 20

    def set_num_sms(self, new_num_sms: int) -> None:
        self.num_sms = new_num_sms


@pytest.mark.parametrize(("asked", "inside"), [(8, 8), (0, 20)])
def test_reserved_sms_are_given_back(asked: int, inside: int) -> None:
    library = Setting()
    library.num_sms = 20
    with reserved_comm_sms(library, asked):
        assert library.num_sms == inside
        with reserved_comm_sms(library, 4):
            assert library.num_sms == 4
        assert library.num_sms == inside
    assert library.num_sms == 20
    with pytest.raises(ZeroDivisionError), reserved_comm_sms(library, 8):
        raise ZeroDivisionError
    assert library.num_sms == 20


@pytest.mark.parametrize("sms", [3, -2])
def test_reserved_sms_come_in_pairs(sms: int) -> None:
    with pytest.raises(ConfigError, match=f"sms={sms}"), reserved_comm_sms(Setting(), sms):
        pass


def test_a_rank_that_leaves_an_exchange_out_is_named() -> None:
    """The host of the others spins for counts; the report names who is missing."""

    def program(world: SimWorld) -> None:
        if world.rank != 2:
            v1_dispatch(world, *inputs(world, "A"))

    launched = launch(program, ranks=3, mode="ordering")
    assert launched.deadlocked
    waits = [r.attrs["waits_for"] for r in launched.trace.of_kind("blocked") if r.line == "comm"]
    assert [w["missing"] for w in waits] == [[2], [2]]


def test_a_rank_that_sends_no_signal_is_named() -> None:
    def program(world: SimWorld) -> None:
        x, *_ = inputs(world, "A")
        if world.rank != 2:
            world.symmetric.send((x,), [[2, 1, 1]] * 3, channel=(0, "combine")).rows()
            world.tensors.to_host(x, "the result")

    launched = launch(program, ranks=3, mode="ordering")
    assert launched.deadlocked
    waits = [r.attrs["waits_for"] for r in launched.trace.of_kind("blocked") if r.line == "compute"]
    assert [w["missing"] for w in waits] == [[2], [2]]
