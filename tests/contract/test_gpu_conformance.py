"""The same conformance suite in every world: simulated, and two and four real processes over gloo."""

from __future__ import annotations

from functools import partial

import pytest

from dbo.conformance import suite as conformance
from dbo.conformance.suite import run_suite
from dbo.contract.patience import Patience
from dbo.trace import kinds
from gpu.world import launch as launch_processes
from sim.engine import Engine
from sim.streams import SimEvent
from sim.world import launch as launch_simulated

pytest.importorskip("torch", reason="processes over gloo, and numbers, need torch")

BACKENDS = ("nccl", "deepep_low_latency", "symm_copy")


def failures(results):
    assert len(results) >= 10, [r.name for r in results]
    return {r.name: r.problem for r in results if not r.passed}


@pytest.mark.parametrize(("ranks", "vehicle"), [(2, "thread"), (2, "greenlet"), (4, "thread")])
def test_real_processes_keep_the_contract(ranks, vehicle):
    launch = partial(
        launch_processes, ranks=ranks, device="cpu", patience=Patience(stall_s=2.0), timeout_s=120.0, vehicle=vehicle
    )
    assert failures(run_suite(launch, ranks=ranks, backends=BACKENDS)) == {}


def test_the_simulator_keeps_the_contract_with_numbers():
    assert failures(run_suite(partial(launch_simulated, ranks=2), ranks=2, backends=BACKENDS)) == {}


def test_the_simulator_keeps_the_contract_without_numbers():
    assert failures(run_suite(partial(launch_simulated, ranks=3, mode="ordering"), ranks=3, numbers=False)) == {}


class LosesAGive:
    """A baton that forgets every second give."""

    def __init__(self, baton):
        self.baton, self.gives = baton, 0

    def take(self):
        self.baton.take()

    def give(self):
        self.gives += 1
        if self.gives != 2:
            self.baton.give()


class KeepsTags:
    """A world whose `restore_tags` does nothing."""

    def __init__(self, world):
        self.__dict__["world"] = world

    def __getattr__(self, name):
        return getattr(self.world, name)

    def restore_tags(self, tags):
        return None


@pytest.mark.parametrize(
    ("case", "broken"), [(conformance.streams_and_tags_are_the_tasks_own, KeepsTags)], ids=["restore_tags"]
)
def test_a_world_that_breaks_a_rule_fails_its_case(case, broken):
    launched = launch_simulated(lambda world: conformance._run(case, broken(world)), ranks=2, mode="ordering")
    assert all("restored" in problem for problem in launched.values)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (lambda event: event.marker is not None, "before an event that was never recorded"),
        (lambda event: True if event.marker is None else None, "yes or no behind queued work: None"),
        (lambda event: event.marker is None, "waited for has happened"),
    ],
    ids=["unrecorded", "no answer", "never"],
)
def test_an_event_that_cannot_say_whether_it_happened_is_found(query, text, monkeypatch):
    monkeypatch.setattr(SimEvent, "query", query)
    launched = launch_simulated(
        lambda world: conformance._run(conformance.events_order_streams, world), ranks=2, mode="ordering"
    )
    assert all(text in problem for problem in launched.values), launched.values


def test_in_the_simulator_an_event_whose_work_has_not_run_has_not_happened():
    """The host races ahead: nothing runs before it waits, and a record made again is the one that is asked about."""

    def program(world):
        event = world.compute.record_event()
        answers = [event.query()]
        event.synchronize()
        answers.append(event.query())
        event.record(world.compute)
        return [*answers, event.query()]

    launched = launch_simulated(program, ranks=2, mode="ordering")
    assert launched.values == [[False, True, False]] * 2


def test_a_baton_that_loses_a_give_is_found():
    def program(world):
        real = world.host.baton
        world.host.baton = lambda name: LosesAGive(real(name))
        return conformance._run(conformance.batons_hand_over_in_turn, world)

    launched = launch_simulated(program, ranks=2, mode="ordering")
    assert launched.deadlocked


@pytest.mark.parametrize(
    "kind",
    [
        kinds.YIELD,
        kinds.RESUME,
        kinds.UBATCH_ENTER,
        kinds.UBATCH_EXIT,
        kinds.HOOK_REGISTER,
        kinds.HOOK_RUN,
        kinds.BARRIER,
        kinds.HOST_WAIT,
        kinds.CHOICE,
    ],
)
def test_a_kind_that_loses_its_writer_is_named(kind, monkeypatch):
    """The writer of one kind of host record falls silent; everything else stays as it is."""
    write = Engine.host_record

    def all_but_one(self, task, what, name="", attrs=None):
        return task.last_record if what == kind else write(self, task, what, name, attrs)

    monkeypatch.setattr(Engine, "host_record", all_but_one)
    found = failures(run_suite(partial(launch_simulated, ranks=2, mode="ordering"), ranks=2, numbers=False))
    assert f"no record of kind {kind}: " in found["records_keep_their_contract"]


def test_a_ring_that_does_not_say_that_it_yields_is_named(monkeypatch):
    """The line of dbo.ubatching.ring that writes the record is gone."""

    class Silent:
        YIELD = "resume"

        def __getattr__(self, name):
            return getattr(kinds, name)

    monkeypatch.setattr("dbo.ubatching.ring.kinds", Silent())
    found = failures(run_suite(partial(launch_simulated, ranks=2, mode="ordering"), ranks=2, numbers=False))
    assert "no record of kind yield: " in found["records_keep_their_contract"]


@pytest.mark.parametrize("kind", [kinds.WAIT, kinds.RECORD, kinds.MEET])
def test_a_device_that_loses_a_kind_is_named(kind):
    def launch(program):
        launched = launch_simulated(program, ranks=2, mode="ordering")
        kept = {r.id for r in launched.trace.records if r.kind != kind}
        for record in launched.trace.records:
            record.after = tuple(id for id in record.after if id in kept)
        launched.trace.records[:] = [r for r in launched.trace.records if r.kind != kind]
        return launched

    found = failures(run_suite(launch, ranks=2, numbers=False))
    assert f"no record of kind {kind}" in found["records_keep_their_contract"]


def test_a_world_that_writes_a_kind_otherwise_is_named_with_it(monkeypatch):
    write = Engine.host_record

    def without_index(self, task, kind, name="", attrs=None):
        return write(self, task, kind, name, {k: v for k, v in (attrs or {}).items() if k != "index"})

    monkeypatch.setattr(Engine, "host_record", without_index)
    found = failures(run_suite(partial(launch_simulated, ranks=2, mode="ordering"), ranks=2, numbers=False))
    assert "a record of kind yield" in found["records_keep_their_contract"]
    assert "lacks index" in found["records_keep_their_contract"]


def test_a_rank_that_does_not_wait_for_its_peers_is_found():
    """A launch in which nobody is ever stuck cannot pass."""
    stuck = conformance._guarded(
        "who_stays_away_is_named",
        lambda: conformance._absence_is_named(launch_simulated(lambda world: "left", ranks=2, mode="ordering")),
    )
    assert "stuck" in stuck.problem
