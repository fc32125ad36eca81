"""The ring: one `UBatchContext` a ubatch thread, and the `dbo_*` functions that a layer calls without knowing of it.

At any time one context holds the baton. `dbo_yield` hands it to the next context that is still in the ring. Streams are
shared by the contexts; each has its own two events. Outside a ubatch every `dbo_*` is a no-op.

Usage (what `UBatchWrapper` does):

1. The starter calls `make_ubatch_contexts(...)`, one ready barrier of U + 1 parties.
2. Each ubatch thread runs its model inside `with context:`.
3. The starter waits at the barrier, then gives the baton to context 0: `contexts[0].start()`.
4. All threads are joined; `ring.error` is the first error, if any.

A ubatch that raises ends the step: `Ring.fail` keeps the first error, the others leave their next yield with
`UBatchCancelled`, pending hooks are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, ParamSpec, TypeVar

from dbo.contract.world import Barrier, Event, Stream, World
from dbo.errors import RingError, Unwinding
from dbo.trace import kinds
from dbo.ubatching.forward_context import ForwardContext, set_forward_context

P = ParamSpec("P")
T = TypeVar("T")

_context: ContextVar[UBatchContext | None] = ContextVar("dbo_ubatch_context", default=None)
_hook_owner: ContextVar[int | None] = ContextVar("dbo_hook_owner", default=None)

RECV_OF = {"D.send": "D.recv", "C.send": "C.recv"}


class UBatchCancelled(Unwinding):
    """Unwinds a ubatch because another one of its rank raised. A BaseException: model code must not catch it."""


class Ring:
    """What the contexts of one step share: who is still in, the first error, the hooks' numbers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.contexts: list[UBatchContext] = []
        self.error: BaseException | None = None
        self.error_ubatch = -1
        self.next_hook = 0

    def fail(self, ubatch: int, error: BaseException) -> None:
        """Keep the first error of the step."""
        if self.error is None:
            self.error = error
            self.error_ubatch = ubatch
            self.world.trace.host(kinds.ERROR, type(error).__name__, type=type(error).__name__, message=str(error))

    def next_in_ring(self, index: int) -> UBatchContext:
        """The context after `index` that has not left; `index`'s own when it is the last one."""
        count = len(self.contexts)
        for distance in range(1, count):
            candidate = self.contexts[(index + distance) % count]
            if not candidate.left:
                return candidate
        return self.contexts[index]


class UBatchContext:
    """One ubatch's place in the ring. Made by `make_ubatch_contexts` only.

    Attributes:
        yields: hand-overs so far. declared_yields: of the whole step, by the schedule. played_yields: those that the
            schedule's player has passed; not equal to `yields` where somebody yields behind its back, or not at all.
    """

    def __init__(self, ring: Ring, index: int, compute: Stream, comm: Stream, forward: ForwardContext, ready: Barrier):
        world = ring.world
        self.ring = ring
        self.index = index
        self.compute_stream = compute
        self.comm_stream = comm
        self.forward_context = forward
        self.ready_barrier = ready
        self.baton = world.host.baton(f"u{index}")
        self.compute_done: Event = world.event(f"u{index}.compute_done")
        self.comm_done: Event = world.event(f"u{index}.comm_done")
        self.left = False
        self.yields = 0
        self.declared_yields = 0
        self.played_yields = 0
        self.recv_hook: tuple[int, int, Callable[[], None], Any] | None = None
        self._token: Token[UBatchContext | None] | None = None
        self._stream: Stream = compute

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> UBatchContext:
        world = self.ring.world
        world.in_ubatch(self.index, step=self.forward_context.step)
        self._token = _context.set(self)
        try:
            self.ready_barrier.wait()
            self.baton.take()
            self._check_cancelled()
        except BaseException as error:
            self._leave(type(error).__name__)
            raise
        world.trace.host(kinds.UBATCH_ENTER)
        set_forward_context(self.forward_context)
        world.set_stream(self.compute_stream)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is None:
                self.run_recv_hook()
        except BaseException as hook_error:
            error = hook_error
            raise
        finally:
            if error is not None and not isinstance(error, Unwinding):
                self.ring.fail(self.index, error)
            self._leave(type(error).__name__ if error is not None else "")

    def _leave(self, error: str = "") -> None:
        world = self.ring.world
        self.left = True
        pending, self.recv_hook = self.recv_hook, None
        if pending is not None:
            world.trace.host(kinds.HOOK_DROP, hook=pending[0], owner=pending[1])
        world.trace.host(
            kinds.UBATCH_EXIT,
            yields=self.yields,
            declared_yields=self.declared_yields,
            played_yields=self.played_yields,
            error=error,
            hook_pending=pending is not None,
        )
        if self._token is not None:
            _context.reset(self._token)
            self._token = None
        set_forward_context(None)
        world.set_stream(self.compute_stream)
        following = self.ring.next_in_ring(self.index)
        if following is not self:
            following.baton.give()

    def start(self) -> None:
        """Give this context the baton for the first time. Called by the starter, after the barrier."""
        self.baton.give()

    def _check_cancelled(self) -> None:
        if self.ring.error is not None:
            raise UBatchCancelled(f"ubatch {self.ring.error_ubatch} raised")

    # -- the baton ----------------------------------------------------------------------------------------------------

    def yield_(self) -> None:
        """Hand the baton on and sleep until it comes back; restore the forward context and the current stream."""
        world = self.ring.world
        index = self.yields
        self.yields += 1
        following = self.ring.next_in_ring(self.index)
        if following is self:
            return
        stream = world.current_stream()
        world.trace.host(kinds.YIELD, to=following.index, index=index)
        following.baton.give()
        self.baton.take()
        world.trace.host(kinds.RESUME, index=index)
        self._check_cancelled()
        set_forward_context(self.forward_context)
        world.set_stream(stream)

    # -- streams ------------------------------------------------------------------------------------------------------

    def switch_to(self, stream: Stream) -> None:
        """Change the current stream only."""
        self.ring.world.set_stream(stream)

    def switch_to_sync(self, stream: Stream) -> None:
        """Record done on the old stream, change, and make the new one wait for it."""
        done = self.record_done()
        self.switch_to(stream)
        stream.wait_event(done)

    def yield_and_switch_to(self, stream: Stream) -> None:
        """Record done *before* the baton is passed; change and wait *after* it has come back.

        Recorded after the yield, the event would also cover what the peer launched: right answers, no overlap.
        """
        done = self.record_done()
        self.yield_()
        self.switch_to(stream)
        stream.wait_event(done)

    def record_done(self) -> Event:
        """Record this context's event of the current stream there, and return it."""
        stream = self.ring.world.current_stream()
        event = self.comm_done if stream is self.comm_stream else self.compute_done
        event.record(stream)
        return event

    # -- receive hooks ------------------------------------------------------------------------------------------------

    def register_recv_hook(self, hook: Callable[[], None]) -> None:
        """Have the next context run `hook`; run it at once when that one has left the ring.

        Raises:
            RingError: the next context still holds a hook.
        """
        world = self.ring.world
        number, self.ring.next_hook = self.ring.next_hook, self.ring.next_hook + 1
        step, layer, ubatch, point = world.tags()
        tags = (step, layer, ubatch, RECV_OF.get(point, point))
        contexts = self.ring.contexts
        aimed = contexts[(self.index + 1) % len(contexts)]
        holder = self if aimed.left else aimed  # not the one after it: that one may hold a hook of its own predecessor
        world.trace.host(kinds.HOOK_REGISTER, hook=number, owner=self.index, holder=holder.index)
        entry = (number, self.index, hook, tags)
        if holder is self:
            self._run(entry)
        elif holder.recv_hook is not None:
            raise RingError.of(
                "one receive hook may be pending on a context",
                fix="call dbo_maybe_run_recv_hook before the next send",
                holder=holder.index,
                pending_of=holder.recv_hook[1],
                registered_by=self.index,
            )
        else:
            holder.recv_hook = entry

    def run_recv_hook(self) -> None:
        """Run the hook that another context left here, if any."""
        entry, self.recv_hook = self.recv_hook, None
        if entry is not None:
            self._run(entry)

    def _run(self, entry: tuple[int, int, Callable[[], None], Any]) -> None:
        number, owner, hook, tags = entry
        world = self.ring.world
        mine = world.tags()
        owner_token = _hook_owner.set(owner)
        world.trace.host(kinds.HOOK_RUN, hook=number, owner=owner, runner=self.index)
        world.restore_tags(tags)
        try:
            hook()
        finally:
            world.restore_tags(mine)
            _hook_owner.reset(owner_token)


def make_ubatch_contexts(
    num_micro_batches: int,
    compute_stream: Stream,
    comm_stream: Stream,
    forward_contexts: Sequence[ForwardContext],
    ready_barrier: Barrier,
    *,
    world: World,
    context_class: type[UBatchContext] = UBatchContext,
) -> list[UBatchContext]:
    """The contexts of one step, in ring order; context i wakes context (i + 1) mod U.

    Args:
        num_micro_batches: U, at least 2.
        compute_stream, comm_stream: shared by all contexts.
        forward_contexts: one a ubatch.
        ready_barrier: U + 1 parties: the ubatch threads and the starter.
        world: gives the batons and events.
        context_class: a subclass, for programs with a planted fault.
    """
    if num_micro_batches < 2 or len(forward_contexts) != num_micro_batches:
        raise RingError.of(
            "a ring has at least two contexts and one forward context each",
            fix="pass num_micro_batches >= 2 and as many forward contexts",
            num_micro_batches=num_micro_batches,
            forward_contexts=len(forward_contexts),
        )
    ring = Ring(world)
    ring.contexts = [
        context_class(ring, index, compute_stream, comm_stream, forward, ready_barrier)
        for index, forward in enumerate(forward_contexts)
    ]
    return ring.contexts


# -- what a layer calls: about the calling task, no-ops outside a ubatch ----------------------------------------------


def dbo_enabled() -> bool:
    """True when the calling task is a ubatch."""
    return _context.get() is not None


def dbo_current_ubatch_id() -> int:
    """The calling task's ubatch; inside a receive hook its owner's; 0 outside a ubatch."""
    owner = _hook_owner.get()
    if owner is not None:
        return owner
    context = _context.get()
    return 0 if context is None else context.index


def dbo_yield() -> None:
    """Pass the baton on and wait for its return. Orders nothing on the device."""
    if (context := _context.get()) is not None:
        context.yield_()


def dbo_switch_to_comm() -> None:
    """Make the comm stream current."""
    if (context := _context.get()) is not None:
        context.switch_to(context.comm_stream)


def dbo_switch_to_compute() -> None:
    """Make the compute stream current."""
    if (context := _context.get()) is not None:
        context.switch_to(context.compute_stream)


def dbo_switch_to_comm_sync() -> None:
    """Make the comm stream current and let it wait for what compute holds."""
    if (context := _context.get()) is not None:
        context.switch_to_sync(context.comm_stream)


def dbo_switch_to_compute_sync() -> None:
    """Make the compute stream current and let it wait for what comm holds."""
    if (context := _context.get()) is not None:
        context.switch_to_sync(context.compute_stream)


def dbo_yield_and_switch_from_compute_to_comm() -> None:
    """Record compute done, yield, then continue on comm behind that event."""
    if (context := _context.get()) is not None:
        context.yield_and_switch_to(context.comm_stream)


def dbo_yield_and_switch_from_comm_to_compute() -> None:
    """Record comm done, yield, then continue on compute behind that event."""
    if (context := _context.get()) is not None:
        context.yield_and_switch_to(context.compute_stream)


def dbo_register_recv_hook(hook: Callable[[], None]) -> None:
    """Have the peer complete this ubatch's receive; outside a ubatch nothing is registered and nothing runs."""
    if (context := _context.get()) is not None:
        context.register_recv_hook(hook)


def dbo_maybe_run_recv_hook() -> None:
    """Run the receive hook that a peer left for this ubatch, if any."""
    if (context := _context.get()) is not None:
        context.run_recv_hook()


def dbo_get_previous_event(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Run `make` with the compute stream current, and return what it returns (None outside a ubatch)."""
    context = _context.get()
    if context is None:
        return None
    world = context.ring.world
    stream = world.current_stream()
    world.set_stream(context.compute_stream)
    try:
        return make(*args, **kwargs)
    finally:
        world.set_stream(stream)
