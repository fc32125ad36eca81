"""The ring, rule by rule, on both task vehicles of the simulated world."""

from __future__ import annotations

import threading

import pytest

from dbo.errors import RingError
from dbo.ubatching import ring as ubatch
from dbo.ubatching.forward_context import get_forward_context, set_forward_context
from dbo.ubatching.ring import UBatchCancelled, make_ubatch_contexts
from sim.world import SimWorld, launch
from tests.unit.ring_harness import VEHICLES, Ring, one_step, play


@pytest.fixture(params=VEHICLES)
def vehicle(request: pytest.FixtureRequest) -> str:
    return request.param


def _idle(ring: Ring) -> None:
    """A body that does nothing."""


# -- entering and leaving ---------------------------------------------------------------------------------------------


def test_the_baton_goes_round_from_context_0_and_back(vehicle: str) -> None:
    def body(index: int):
        def run(ring: Ring) -> None:
            ring.say(index, "enters")
            ubatch.dbo_yield()
            ring.say(index, "goes on")

        return run

    outcome = play(body(0), body(1), body(2), vehicle=vehicle)
    assert outcome.said == [(i, "enters") for i in range(3)] + [(i, "goes on") for i in range(3)]


def test_nobody_runs_before_the_starter_gives_the_baton(vehicle: str) -> None:
    """All have passed the barrier, and the starter lets every other task run: still nobody has entered."""

    def let_all_run(ring: Ring) -> None:
        bystander = ring.world.host.worker("bystander")
        for _ in range(3):
            bystander.submit(lambda: None)
            bystander.join()
        ring.say("the starter")

    outcome = play(lambda r: r.say("u0"), lambda r: r.say("u1"), vehicle=vehicle, before_start=let_all_run)
    assert outcome.said == ["the starter", "u0", "u1"]
    arrived = [r.id for r in outcome.trace.records if r.kind == "barrier"]
    entered = [r.id for r in outcome.trace.records if r.kind == "ubatch.enter"]
    assert len(arrived) == 3 and max(arrived) < min(entered)


def test_entering_installs_the_own_forward_context_and_the_compute_stream(vehicle: str) -> None:
    said: list[object] = []

    def body(ring: Ring) -> None:
        ring.say(ubatch.dbo_current_ubatch_id(), get_forward_context().attn_metadata, _stream(ring))

    def program(world: SimWorld) -> None:
        workers = [world.host.worker(f"u{i}") for i in range(2)]
        for worker in workers:  # a thread may come with any stream current
            worker.submit(lambda: world.set_stream(world.comm))
            worker.join()
        one_step(world, [body, body], said, [None, None], workers=workers)

    assert launch(program, ranks=1, mode="ordering", vehicle=vehicle).errors == [None]
    assert said == [(0, "metadata 0", "compute"), (1, "metadata 1", "compute")]


def test_after_its_exit_a_thread_is_no_ubatch_and_has_no_forward_context(vehicle: str) -> None:
    seen: list[object] = []

    def program(world: SimWorld) -> None:
        workers: list = []
        one_step(world, [_idle, _idle], [], [None, None], workers=workers)
        for worker in workers:
            worker.submit(lambda: seen.append((ubatch.dbo_enabled(), ubatch._context.get(), _has_forward_context())))
            worker.join()

    assert launch(program, ranks=1, mode="ordering", vehicle=vehicle).errors == [None]
    assert seen == [(False, None, False)] * 2


def test_exit_runs_the_pending_hook_while_still_registered_then_passes_the_baton_on(vehicle: str) -> None:
    def registers(ring: Ring) -> None:
        ubatch.dbo_register_recv_hook(lambda: ring.say("hook", ubatch.dbo_enabled(), ring.contexts[1].left))
        ubatch.dbo_yield()
        ring.say("u0 again", ring.contexts[1].left)

    outcome = play(registers, _idle, vehicle=vehicle)
    assert outcome.said == [("hook", True, False), ("u0 again", True)]
    assert outcome.kinds("u1")[-2:] == ["hook.run", "ubatch.exit"]


@pytest.mark.parametrize(("ubatches", "forwards"), [(1, 1), (0, 0), (2, 1), (2, 3)])
def test_a_ring_has_at_least_two_contexts_and_one_forward_context_each(ubatches: int, forwards: int) -> None:
    def program(world: SimWorld) -> None:
        make_ubatch_contexts(
            ubatches, world.compute, world.comm, [None] * forwards, world.host.barrier(3, "ready"), world=world
        )  # type: ignore[list-item]

    (error,) = launch(program, ranks=1, mode="ordering").errors
    assert isinstance(error, RingError) and f"num_micro_batches={ubatches}" in str(error)


# -- the yield --------------------------------------------------------------------------------------------------------


def test_a_yield_restores_the_forward_context_and_the_stream(vehicle: str) -> None:
    """Whatever the thread's forward context and stream are when the baton comes back (a world may share them)."""

    class Scrambling:
        def __init__(self, world: SimWorld, inner: object) -> None:
            self.world, self.inner = world, inner

        def give(self) -> None:
            self.inner.give()

        def take(self) -> None:
            self.inner.take()
            self.world.set_stream(self.world.compute)
            set_forward_context(None)

    def scramble(ring: Ring) -> None:
        ring.contexts[0].baton = Scrambling(ring.world, ring.contexts[0].baton)

    def body(ring: Ring) -> None:
        ubatch.dbo_switch_to_comm()
        ubatch.dbo_yield()
        ring.say(get_forward_context().attn_metadata, _stream(ring))

    outcome = play(body, _idle, vehicle=vehicle, prepare=scramble)
    assert outcome.said == [("metadata 0", "comm")]


def test_a_yield_orders_nothing_on_the_device(vehicle: str) -> None:
    def body(ring: Ring) -> None:
        for _ in range(3):
            ubatch.dbo_yield()

    outcome = play(body, body, vehicle=vehicle)
    assert [r.kind for r in outcome.trace.records if r.on_device] == []
    assert outcome.kinds("u0").count("yield") == outcome.kinds("u0").count("resume") == 3


def test_a_lone_survivors_yields_return_at_once(vehicle: str) -> None:
    def survivor(ring: Ring) -> None:
        ubatch.dbo_yield()
        for _ in range(5):
            ubatch.dbo_yield()
        ring.say(ring.contexts[0].yields)

    outcome = play(survivor, _idle, vehicle=vehicle)
    assert outcome.said == [6]
    assert outcome.kinds("u0").count("yield") == 1


def test_a_context_that_left_is_skipped(vehicle: str) -> None:
    def body(index: int, yields: int):
        def run(ring: Ring) -> None:
            for _ in range(yields):
                ring.say(index)
                ubatch.dbo_yield()
            ring.say(index)

        return run

    outcome = play(body(0, 2), body(1, 0), body(2, 2), vehicle=vehicle)
    assert outcome.said == [0, 1, 2, 0, 2, 0, 2]


# -- streams and events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["compute", "comm"])
def test_yield_and_switch_records_before_the_yield_and_waits_after_it(vehicle: str, first: str) -> None:
    """Recorded after the yield, the event would also cover what the peer launched: right answers, no overlap."""
    second = "comm" if first == "compute" else "compute"

    def owner(ring: Ring) -> None:
        if first == "comm":
            ubatch.dbo_switch_to_comm()
            ubatch.dbo_yield_and_switch_from_comm_to_compute()
        else:
            ubatch.dbo_yield_and_switch_from_compute_to_comm()
        ring.say(_stream(ring))

    def peer(ring: Ring) -> None:
        ring.world.set_stream(ring.world.compute if first == "compute" else ring.world.comm)
        ring.world.tensors.op("peer's work", [], (4,))

    outcome = play(owner, peer, vehicle=vehicle)
    assert outcome.said == [second]
    records = {r.kind: r for r in outcome.trace.records if r.kind in ("record", "wait", "yield", "resume", "op")}
    at = {kind: record.id for kind, record in records.items()}
    assert at["record"] < at["yield"] < at["op"] < at["resume"] < at["wait"]
    assert (records["record"].line, records["wait"].line) == (first, second)
    assert records["record"].id in records["wait"].after
    assert records["wait"].t_us < records["op"].end_us, "the wait covers the peer's work"


@pytest.mark.parametrize("to", ["comm", "compute"])
def test_a_plain_switch_changes_the_current_stream_only(vehicle: str, to: str) -> None:
    def body(ring: Ring) -> None:
        (ubatch.dbo_switch_to_compute if to == "comm" else ubatch.dbo_switch_to_comm)()
        (ubatch.dbo_switch_to_comm if to == "comm" else ubatch.dbo_switch_to_compute)()
        ring.say(_stream(ring))

    outcome = play(body, _idle, vehicle=vehicle)
    assert outcome.said == [to]
    assert [r for r in outcome.trace.records if r.on_device] == []


@pytest.mark.parametrize(("start", "to"), [("compute", "comm"), ("comm", "compute")])
def test_a_sync_switch_makes_the_new_stream_wait_for_the_old_one(vehicle: str, start: str, to: str) -> None:
    def body(ring: Ring) -> None:
        if start == "comm":
            ubatch.dbo_switch_to_comm()
        ring.world.tensors.op("before", [], (4,))
        (ubatch.dbo_switch_to_comm_sync if to == "comm" else ubatch.dbo_switch_to_compute_sync)()
        ring.world.tensors.op("behind", [], (4,))

    outcome = play(body, _idle, vehicle=vehicle)
    device = sorted((r for r in outcome.trace.records if r.on_device), key=lambda r: r.id)
    assert [(r.kind, r.line) for r in device] == [("op", start), ("record", start), ("wait", to), ("op", to)]
    assert device[3].t_us >= device[0].end_us
    assert "yield" not in outcome.kinds("u0")


def test_events_are_per_context(vehicle: str) -> None:
    def body(ring: Ring) -> None:
        ubatch.dbo_switch_to_comm_sync()
        ubatch.dbo_switch_to_compute_sync()

    outcome = play(body, body, vehicle=vehicle)
    names = {r.attrs["event"] for r in outcome.trace.records if r.kind == "record"}
    assert names == {"u0.compute_done", "u0.comm_done", "u1.compute_done", "u1.comm_done"}


def test_get_previous_event_runs_with_the_compute_stream_current_and_gives_the_stream_back(vehicle: str) -> None:
    def body(ring: Ring) -> None:
        ubatch.dbo_switch_to_comm()
        ring.say(ubatch.dbo_get_previous_event(lambda a, *, b: (a, b, _stream(ring)), 1, b=2), _stream(ring))
        with pytest.raises(ZeroDivisionError):
            ubatch.dbo_get_previous_event(lambda: 1 // 0)
        ring.say(_stream(ring))

    assert play(body, _idle, vehicle=vehicle).said == [((1, 2, "compute"), "comm"), "comm"]


# -- receive hooks ----------------------------------------------------------------------------------------------------


def test_a_hook_is_run_by_the_next_context_in_its_thread_with_the_owners_id(vehicle: str) -> None:
    def owner(ring: Ring) -> None:
        ubatch.dbo_register_recv_hook(
            lambda: ring.say("hook of", ubatch.dbo_current_ubatch_id(), "in", ring.world.task().line)
        )
        ring.say("registered")
        ubatch.dbo_yield()

    def peer(ring: Ring) -> None:
        ring.say("peer", ubatch.dbo_current_ubatch_id())
        ubatch.dbo_maybe_run_recv_hook()
        ring.say("peer", ubatch.dbo_current_ubatch_id())
        ubatch.dbo_maybe_run_recv_hook()  # nothing is left: it runs once

    outcome = play(owner, peer, vehicle=vehicle)
    assert outcome.said == ["registered", ("peer", 1), ("hook of", 0, "in", "u1"), ("peer", 1)]


def test_the_last_contexts_hook_goes_to_context_0(vehicle: str) -> None:
    def runs(ring: Ring) -> None:
        ubatch.dbo_yield()
        ubatch.dbo_maybe_run_recv_hook()

    def registers(ring: Ring) -> None:
        ubatch.dbo_register_recv_hook(lambda: ring.say(ring.world.task().line))
        ubatch.dbo_yield()

    assert play(runs, lambda r: ubatch.dbo_yield(), registers, vehicle=vehicle).said == ["u0"]


def test_what_a_hook_launches_belongs_to_its_owner_and_to_its_receive(vehicle: str) -> None:
    def owner(ring: Ring) -> None:
        ring.world.at_point("D.send", layer=3)
        ubatch.dbo_register_recv_hook(lambda: ring.world.tensors.op("arrives", [], (4,)))
        ubatch.dbo_yield()

    def peer(ring: Ring) -> None:
        ring.world.at_point("A1", layer=2)
        ubatch.dbo_maybe_run_recv_hook()
        ring.world.tensors.op("own", [], (4,))

    outcome = play(owner, peer, vehicle=vehicle)
    tags = {r.name: (r.ubatch, r.layer, r.point) for r in outcome.trace.records if r.kind == "op"}
    assert tags == {"arrives": (0, 3, "D.recv"), "own": (1, 2, "A1")}


def test_a_second_registration_while_one_is_pending_is_refused(vehicle: str) -> None:
    def body(ring: Ring) -> None:
        ubatch.dbo_register_recv_hook(lambda: ring.say("first"))
        with pytest.raises(RingError, match=r"holder=1, pending_of=0, registered_by=0"):
            ubatch.dbo_register_recv_hook(lambda: ring.say("second"))

    assert play(body, _idle, vehicle=vehicle).said == ["first"], "the pending hook survives the refusal"


@pytest.mark.parametrize("ubatches", [2, 3])
def test_a_hook_aimed_at_a_context_that_left_runs_at_once_in_the_registrant(vehicle: str, ubatches: int) -> None:
    """Also when others are still in the ring: the one behind may hold the departed one's own hook."""

    def registers(ring: Ring) -> None:
        ubatch.dbo_yield()
        ring.say("left", [c.left for c in ring.contexts])
        ubatch.dbo_register_recv_hook(lambda: ring.say(ring.world.task().line, ubatch.dbo_current_ubatch_id()))
        ring.say("registered")

    def leaves(ring: Ring) -> None:
        if ubatches == 3:
            ubatch.dbo_register_recv_hook(lambda: ring.say("of the one that left, in", ring.world.task().line))

    def stays(ring: Ring) -> None:
        ubatch.dbo_yield()

    said = play(*(registers, leaves, stays)[:ubatches], vehicle=vehicle).said
    assert said[:3] == [("left", [False, True, False][:ubatches]), ("u0", 0), "registered"]
    assert said[3:] == [("of the one that left, in", "u2")] * (ubatches == 3)


def test_a_hook_that_raises_ends_its_runner_and_gives_the_owners_id_back(vehicle: str) -> None:
    def owner(ring: Ring) -> None:
        ubatch.dbo_register_recv_hook(lambda: 1 // 0)
        ubatch.dbo_yield()

    def peer(ring: Ring) -> None:
        try:
            ubatch.dbo_maybe_run_recv_hook()
        finally:
            ring.say(ubatch.dbo_current_ubatch_id())

    outcome = play(owner, peer, vehicle=vehicle)
    assert outcome.said == [1]
    assert isinstance(outcome.errors[1], ZeroDivisionError)
    assert isinstance(outcome.errors[0], UBatchCancelled), "its peer is unwound out of its yield"
    assert isinstance(outcome.errors[0], BaseException) and not isinstance(outcome.errors[0], Exception)


# -- outside a ubatch -------------------------------------------------------------------------------------------------


def _no_ops() -> list[object]:
    """Every dbo_* function, called where no ubatch runs."""
    ran: list[str] = []
    ubatch.dbo_yield()
    ubatch.dbo_switch_to_comm()
    ubatch.dbo_switch_to_compute()
    ubatch.dbo_switch_to_comm_sync()
    ubatch.dbo_switch_to_compute_sync()
    ubatch.dbo_yield_and_switch_from_compute_to_comm()
    ubatch.dbo_yield_and_switch_from_comm_to_compute()
    ubatch.dbo_register_recv_hook(lambda: ran.append("hook"))
    ubatch.dbo_maybe_run_recv_hook()
    event = ubatch.dbo_get_previous_event(lambda: ran.append("event"))
    return [ubatch.dbo_enabled(), ubatch.dbo_current_ubatch_id(), event, ran]


NOTHING = [False, 0, None, []]


def test_outside_a_ubatch_everything_is_a_no_op() -> None:
    assert _no_ops() == NOTHING


def test_outside_a_ubatch_everything_is_a_no_op_while_a_step_runs_elsewhere_in_the_process(vehicle: str) -> None:
    """Asked in another task of the same rank, in another rank, and in a thread that the simulator does not know."""
    answers: dict[str, object] = {}

    def ask(name: str) -> None:
        answers[name] = _no_ops()

    def body(ring: Ring) -> None:
        ubatch.dbo_register_recv_hook(lambda: ring.say("hook of u0"))
        outsider = ring.world.host.worker("outsider")
        outsider.submit(lambda: ask("a worker made by a ubatch"))
        outsider.join()
        thread = threading.Thread(target=lambda: ask("a plain thread"))
        thread.start()
        thread.join()
        ring.world.control.all_gather_object("now")

    def program(world: SimWorld) -> None:
        if world.rank == 1:
            world.control.all_gather_object("now")
            ask("another rank")
            return
        one_step(world, [body, _idle], said, errors)

    said: list[object] = []
    errors: list[BaseException | None] = [None, None]
    launched = launch(program, ranks=2, mode="ordering", vehicle=vehicle)
    assert launched.errors == [None, None] and errors == [None, None]
    assert set(answers) == {"a worker made by a ubatch", "a plain thread", "another rank"}
    assert all(answer == NOTHING for answer in answers.values()), answers
    assert said == ["hook of u0"]


# -- a ring of another size -------------------------------------------------------------------------------------------


def test_the_size_of_the_ring_travels_with_its_contexts(vehicle: str) -> None:
    """A step of 3 ubatches, then one of 2 in the same threads: nobody waits for the third (vllm#30120)."""
    said: list[object] = []

    def body(index: int):
        def run(ring: Ring) -> None:
            for _ in range(2):
                ring.say(len(ring.contexts), index)
                ubatch.dbo_yield()

        return run

    def program(world: SimWorld) -> None:
        workers: list = []
        for ubatches in (3, 2, 3):
            one_step(world, [body(i) for i in range(ubatches)], said, [None] * ubatches, workers=workers)

    launched = launch(program, ranks=1, mode="ordering", vehicle=vehicle)
    assert launched.errors == [None] and not launched.deadlocked
    assert said == [(size, index) for size in (3, 2, 3) for _ in range(2) for index in range(size)]


def _stream(ring: Ring) -> str:
    return ring.world.current_stream().name


def _has_forward_context() -> bool:
    try:
        get_forward_context()
    except RuntimeError:
        return False
    return True
