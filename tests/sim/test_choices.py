"""What another schedule could decide otherwise is seen: such a run is no proof. Each program has a twin that is one."""

import pytest

from dbo.check import judge
from sim.world import launch


class Last:
    """The strategy that lets the last of the ready tasks run."""

    def choose(self, ready):
        return len(ready) - 1


def verdict(program, **options):
    run = launch(program, ranks=1, mode="ordering", **options)
    assert run.errors == [None]
    return str(judge(run.trace).verdict)


def start(world):
    world.in_ubatch(-1, step=0)
    world.trace.host("step.begin", tokens=1, requests=1)
    return world.tensors.empty((8,), "a")


def recorded_elsewhere(*, ordered):
    """u0 produces on comm and records an event, u1 waits for it and consumes; a baton orders the two, or nothing does."""

    def program(world):
        a, event, baton = start(world), world.event("e"), world.host.baton("produced")

        def producer():
            world.in_ubatch(0, step=0)
            world.trace.host("point", "x")
            world.set_stream(world.comm)
            world.tensors.op("produce", [], (0,), writes=[a])
            event.record(world.comm)
            world.trace.host("point", "y")
            if ordered:
                baton.give()

        def consumer():
            if ordered:
                baton.take()
            world.in_ubatch(1, step=0)
            world.trace.host("point", "x")
            world.compute.wait_event(event)
            world.tensors.op("consume", [a], (8,))

        workers = [world.host.worker(f"u{i}") for i in range(2)]
        for worker, work in zip(workers, (producer, consumer), strict=True):
            worker.submit(work)
        for worker in workers:
            worker.join()
        world.trace.host("join")
        world.compute.synchronize()
        world.comm.synchronize()

    return program


def polled(*, waits_first):
    """The program branches on a query; where it has waited for the event before, there is one answer only."""

    def program(world):
        a = start(world)
        world.set_stream(world.comm)
        world.tensors.op("produce", [], (0,), writes=[a])
        event = world.comm.record_event()
        if waits_first:
            event.synchronize()
        world.set_stream(world.compute)
        if not event.query():
            world.compute.wait_event(event)
        world.tensors.op("consume", [a], (8,))
        world.compute.synchronize()
        world.comm.synchronize()

    return program


def contended(*, takers):
    """Ubatches take one baton in turn, in no order; whoever comes second in another schedule would read too early."""

    def program(world):
        start(world)
        baton = world.host.baton("lock")

        def work():
            baton.take()
            world.trace.host("point", "held")
            baton.give()

        workers = [world.host.worker(f"u{i}") for i in range(takers)]
        for worker in workers:
            worker.submit(work)
        baton.give()
        for worker in workers:
            worker.join()
        world.trace.host("join")
        world.compute.synchronize()

    return program


@pytest.mark.parametrize(
    ("open_", "closed"),
    [
        (recorded_elsewhere(ordered=False), recorded_elsewhere(ordered=True)),
        (polled(waits_first=False), polled(waits_first=True)),
        (contended(takers=2), contended(takers=1)),
    ],
    ids=["event recorded by another line", "query", "contended baton"],
)
def test_a_choice_is_no_proof_and_its_twin_without_one_is(open_, closed):
    assert verdict(open_) == "sampled(1 of about 2)"
    assert verdict(closed) == "proved"


def test_the_choice_was_real():
    """With another strategy the event is waited for before it is recorded, which does nothing, as in CUDA."""
    assert verdict(recorded_elsewhere(ordered=False), strategy=Last()) == "violated(stream-race)"
    assert verdict(recorded_elsewhere(ordered=True), strategy=Last()) == "proved"


def test_three_takers_all_get_the_baton():
    assert verdict(contended(takers=3)).startswith("sampled(1 of about")


@pytest.mark.parametrize("name", ["compute", "comm", "side"])
def test_two_lines_that_enqueue_on_one_stream_in_no_order_are_a_choice_whatever_its_name(name):
    def program(world):
        start(world)

        def work(ubatch):
            world.in_ubatch(ubatch, step=0)
            world.trace.host("point", "x")
            world.set_stream(getattr(world, name))
            world.tensors.op(f"work of {ubatch}", [], (8,))
            world.trace.host("point", "y")

        workers = [world.host.worker(f"u{i}") for i in range(2)]
        for ubatch, worker in enumerate(workers):
            worker.submit(lambda ubatch=ubatch: work(ubatch))
        for worker in workers:
            worker.join()

    assert verdict(program) == "sampled(1 of about 2)"
