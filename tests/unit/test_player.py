"""The schedule player: every preset in the order that the abstract ring gives, its yields, its streams and events."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest

from dbo.engine.components import Components
from dbo.errors import ScheduleError, UBatchError
from dbo.schedule import presets
from dbo.schedule.ring import run_ring
from dbo.trace import Record
from dbo.ubatching.forward_context import get_forward_context
from dbo.ubatching.player import SchedulePlayer
from dbo.ubatching.ring import UBatchContext
from sim.world import SimRun, SimWorld
from tests.sim.job_harness import ordering_job, run, verdict_of
from tests.unit.wrapper_harness import call, in_world, step_context, wrapper_of

LAYERS = 4
RUNS = [
    (name, backend, ubatches)
    for name, schedule in presets().items()
    for backend in ("deepep_low_latency", "nccl")
    if backend in schedule.backends
    for ubatches in (2, 3)
    if not (ubatches == 3 and (backend == "deepep_low_latency" or schedule.offset))
]


def issued(launched: SimRun, *, step: int = 0, rank: int = 0) -> list[tuple[str, int, int]]:
    """(point, ubatch, MoE layer) in order of issue; neighbours of one point are one."""
    found = [
        (r.point, r.ubatch, r.layer - 1)
        for r in sorted(launched.trace.records, key=lambda r: r.id)
        if r.on_device
        and r.point
        and r.ubatch >= 0
        and r.layer >= 1
        and r.rank == rank
        and r.step == step
        and r.kind not in ("record", "wait", "transfer")
    ]
    return [key for key, _ in groupby(found)]


@pytest.mark.parametrize(("name", "backend", "ubatches"), RUNS)
def test_a_preset_is_played_in_the_order_of_the_abstract_ring(name: str, backend: str, ubatches: int) -> None:
    job = ordering_job(
        ((9, 5), (7, 6)),
        backend=backend,
        schedule=name,
        num_ubatches=ubatches,
        new_tokens=1,
        dbo_decode_token_threshold=ubatches,
        model={"num_hidden_layers": LAYERS + 1},
    )
    launched = run(job)
    steps = run_ring(presets()[name], backend=backend, num_ubatches=ubatches, layers=LAYERS).steps
    wanted = [(s.point, s.ubatch, s.layer) for s in steps]
    for rank in (0, 1):
        assert issued(launched, rank=rank) == [key for key, _ in groupby(wanted)]
    exits = [r.attrs for r in launched.trace.of_kind("ubatch.exit")]
    assert len(exits) >= 2 * ubatches
    declared = [presets()[name].yields(LAYERS, u, ubatches) for u in range(ubatches)]
    assert {(a["yields"], a["declared_yields"], a["played_yields"]) for a in exits} == {(d, d, d) for d in declared}
    assert verdict_of(launched).verdict.name == "proved"


def test_the_order_can_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees a player that leaves a yield out."""

    class Careless(SchedulePlayer):
        def _yield(self) -> None:
            if self._yields_seen != 1:
                super()._yield()
            else:
                self._yields_seen += 1

    job = ordering_job(backend="nccl", schedule="mlp_shared_overlap", programs=lambda rank: Components(player=Careless))
    clean = ordering_job(backend="nccl", schedule="mlp_shared_overlap")
    assert issued(run(job)) != issued(run(clean))


# -- one layer, written in the test -----------------------------------------------------------------------------------

POINTS = ("D.send", "D.recv", "MLP", "C.send", "S", "C.recv")


def play_layer(
    layer_text: str, *, leave_out: str = "", extra: str = "", unknown: str = "", moe_layers: tuple[int, ...] = (0,)
) -> Any:
    """One layer in two ubatches; every point launches one operation of its name. Returns the device records."""

    def program(world: SimWorld) -> None:
        def model(*, input_ids: Any) -> Any:
            player = get_forward_context().player
            for layer in moe_layers:
                for point in ("A0", "A1", *filter(None, [unknown])):
                    player.reach(point, layer=layer)
                    world.tensors.op(point, [], (4,))
                thunks: dict[str, Callable[[], Any]] = {
                    point: lambda p=point: world.tensors.op(p, [], (4,))
                    for point in (*POINTS, *filter(None, [extra]))
                    if point != leave_out
                }
                player.play(thunks, layer=layer)
            world.tensors.op("after", [], (4,))
            return input_ids

        ids = world.tensors.empty((4,), "ids")
        wrapper = wrapper_of(world, model, schedule=layer_text, moe_layers=moe_layers)
        call(wrapper, step_context((0, 2, 4)), input_ids=ids)

    return in_world(program, arrays=False)


def of_ubatch(launched: SimRun, ubatch: int) -> list[Record]:
    return sorted((r for r in launched.trace.records if r.ubatch == ubatch), key=lambda r: r.id)


OVERLAP = "A0 A1 D.send@comm | D.recv MLP C.send@comm S | C.recv"


def test_each_point_runs_on_its_stream_and_the_layer_ends_on_compute() -> None:
    launched = play_layer("A0 A1 | D.send@comm D.recv MLP | C.send@comm S C.recv@comm copy@comm |")
    lines = {r.name: r.line for r in of_ubatch(launched, 0) if r.kind == "op"}
    comm = {"D.send", "C.send", "C.recv"}
    assert lines == {name: "comm" if name in comm else "compute" for name in ("A0", "A1", *POINTS, "after")}


def test_a_consumer_on_the_other_stream_waits_for_an_event_recorded_before_the_yield() -> None:
    """A1 -> D.send, D.send -> D.recv, MLP -> C.send, C.send -> C.recv: each crosses; none of the events is late."""
    launched = play_layer(OVERLAP)
    records = of_ubatch(launched, 0)
    by_id = {r.id: r for r in launched.trace.records}
    waits = [r for r in records if r.kind == "wait"]
    producers = []
    for wait in waits:
        (mark,) = [by_id[i] for i in wait.after if by_id[i].kind == "record"]
        behind = [r for r in records if r.kind == "op" and r.line == mark.line and r.id < mark.id]
        producers.append(behind[-1].name)
        between = [r for r in records if behind[-1].id < r.id < mark.id and r.kind == "yield"]
        assert between == [], f"the event of {behind[-1].name} was recorded after a yield"
    assert producers == ["A1", "D.send", "MLP", "C.send"]


def test_results_on_comm_are_waited_for_before_the_model_goes_on() -> None:
    launched = play_layer("A0 A1 | D.send@comm D.recv MLP | C.send@comm S C.recv@comm |")
    records = of_ubatch(launched, 0)
    after = next(r for r in records if r.name == "after")
    waits = [r for r in records if r.kind == "wait" and r.line == "compute" and r.id < after.id]
    received = next(r for r in records if r.name == "C.recv")
    marks = [r for r in records if r.kind == "record" and r.id > received.id and r.line == "comm"]
    assert waits and marks and waits[-1].id > marks[-1].id and marks[-1].id in waits[-1].after


def test_one_streams_points_need_no_events() -> None:
    def same_stream(text: str) -> list[str]:
        launched = play_layer(text)
        return [r.kind for r in launched.trace.records if r.kind in ("record", "wait")]

    assert same_stream("A0 A1 D.send | D.recv MLP C.send S | C.recv") == []
    assert same_stream(OVERLAP) != []


def test_a_point_that_the_schedule_lacks_is_refused() -> None:
    with pytest.raises(UBatchError) as caught:
        play_layer(OVERLAP, unknown="A2")
    assert isinstance(caught.value.__cause__, ScheduleError) and "point=A2, layer=0" in str(caught.value)


def test_a_thunk_that_the_schedule_never_runs_is_refused() -> None:
    with pytest.raises(UBatchError, match="points=extra, layer=0"):
        play_layer(OVERLAP, extra="extra")


def test_a_point_without_a_thunk_is_passed_over() -> None:
    launched = play_layer(OVERLAP, leave_out="S")
    assert "S" not in {r.name for r in launched.trace.records}
    assert {r.name for r in of_ubatch(launched, 1) if r.kind == "op"} >= {"D.recv", "MLP", "C.recv", "after"}


def test_layers_that_the_schedule_is_not_played_for_only_mark_their_points() -> None:
    def program(world: SimWorld) -> None:
        def model(*, input_ids: Any) -> Any:
            for point in ("A0", "A1"):
                get_forward_context().player.reach(point, layer=0)
                world.tensors.op("work", [], (4,))
            return input_ids

        ids = world.tensors.empty((4,), "ids")
        call(wrapper_of(world, model, schedule=OVERLAP, moe_layers=(1,)), step_context((0, 2, 4)), input_ids=ids)

    launched = in_world(program, arrays=False)
    assert [(r.point, r.layer) for r in of_ubatch(launched, 1) if r.name == "work"] == [("A0", 0), ("A1", 0)]
    assert list(launched.trace.of_kind("yield")) == []


def test_an_offset_skips_the_first_yields_of_the_first_and_the_last_of_the_last_ubatch() -> None:
    """sglang_decode, offset 2: ubatch 0 passes over its first two yields, ubatch 1 over its last two."""
    turns: dict[int, list[tuple[int, bool]]] = {0: [], 1: []}

    class Noting(SchedulePlayer):
        def _yield(self) -> None:
            index, before = self._yields_seen, self.context.yields
            super()._yield()
            if self.context.ring.world.rank == 0 and self.context.forward_context.step == 0:
                turns[self.context.index].append((index, self.context.yields > before))

    job = ordering_job(
        backend="nccl", schedule="sglang_decode", new_tokens=1, programs=lambda rank: Components(player=Noting)
    )
    run(job)
    total = 2 * 5
    assert [index for index, handed_on in turns[0] if not handed_on] == [0, 1]
    assert [index for index, handed_on in turns[1] if not handed_on] == [total - 2, total - 1]
    assert len(turns[0]) == len(turns[1]) == total


def test_the_context_knows_the_declared_yields_before_it_runs() -> None:
    seen: list[int] = []

    class Asking(UBatchContext):
        def __enter__(self) -> UBatchContext:
            seen.append(self.declared_yields)
            return super().__enter__()

    run(ordering_job(backend="nccl", new_tokens=1, programs=lambda rank: Components(context=Asking)))
    assert seen and set(seen) == {2 * 3}
