"""A minimal world for tests of the ring: one simulated rank in ordering mode, U contexts, and a body for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbo.trace import Record, Trace
from dbo.ubatching.forward_context import ForwardContext
from dbo.ubatching.ring import UBatchContext, make_ubatch_contexts
from sim.world import SimRun, SimWorld, launch

VEHICLES = ("greenlet", "thread")

Body = Callable[["Ring"], None]


@dataclass
class Ring:
    """One step's ring while it runs.

    Attributes:
        said: what the bodies reported, in order; bodies run one at a time, so the order is the ring's.
    """

    world: SimWorld
    contexts: list[UBatchContext]
    said: list[Any] = field(default_factory=list)

    def say(self, *words: Any) -> None:
        self.said.append(words[0] if len(words) == 1 else words)


@dataclass(kw_only=True)
class Outcome:
    """What is left of a ring: what was said, the trace, and the simulator's own account."""

    said: list[Any]
    launched: SimRun
    errors: list[BaseException | None]

    @property
    def trace(self) -> Trace:
        return self.launched.trace

    def line(self, line: str) -> list[Record]:
        """The records of one line, in issue order."""
        return sorted((r for r in self.trace.records if r.line == line), key=lambda r: r.id)

    def kinds(self, line: str) -> list[str]:
        return [r.kind for r in self.line(line)]


def play(
    *bodies: Body,
    vehicle: str = "greenlet",
    declared: Sequence[int] | None = None,
    before_start: Callable[[Ring], None] = lambda ring: None,
    prepare: Callable[[Ring], None] = lambda ring: None,
) -> Outcome:
    """Run one step: each body inside its own context, in its own thread, round the ring.

    Args:
        declared: yields that each context declares; none: as many as it makes (the count is not under test).
        before_start: called by the starter when all threads have passed the barrier, before anybody has the baton.
        prepare: called with the contexts before any thread starts.
    """
    said: list[Any] = []
    errors: list[BaseException | None] = [None] * len(bodies)

    def program(world: SimWorld) -> None:
        one_step(world, bodies, said, errors, declared=declared, before_start=before_start, prepare=prepare)

    launched = launch(program, ranks=1, mode="ordering", vehicle=vehicle)
    assert launched.errors == [None], launched.errors
    return Outcome(said=said, launched=launched, errors=errors)


def one_step(
    world: SimWorld,
    bodies: Sequence[Body],
    said: list[Any],
    errors: list[BaseException | None],
    *,
    workers: list[Any] | None = None,
    declared: Sequence[int] | None = None,
    before_start: Callable[[Ring], None] = lambda ring: None,
    prepare: Callable[[Ring], None] = lambda ring: None,
) -> None:
    """The starter's part: what `UBatchWrapper` does, and nothing else."""
    workers = [] if workers is None else workers
    while len(workers) < len(bodies):
        workers.append(world.host.worker(f"u{len(workers)}"))
    forwards = [ForwardContext(attn_metadata=f"metadata {i}", ubatch=i, step=0) for i in range(len(bodies))]
    barrier = world.host.barrier(len(bodies) + 1, "ready")
    contexts = make_ubatch_contexts(len(bodies), world.compute, world.comm, forwards, barrier, world=world)
    ring = Ring(world, contexts, said)
    for context, count in zip(contexts, declared or (), strict=False):
        context.declared_yields = context.played_yields = count
    prepare(ring)

    def work(index: int) -> None:
        try:
            with contexts[index]:
                bodies[index](ring)
                if declared is None:
                    contexts[index].declared_yields = contexts[index].played_yields = contexts[index].yields
        except BaseException as error:  # what ended the body is what the test asks about
            errors[index] = error

    for index, worker in enumerate(workers[: len(bodies)]):
        worker.submit(lambda i=index: work(i))
    barrier.wait()
    before_start(ring)
    contexts[0].start()
    for worker in workers[: len(bodies)]:
        worker.join()
