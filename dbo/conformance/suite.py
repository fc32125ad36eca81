"""One suite for every world: does it keep `dbo.contract.world`? No torch; cases with numbers import it when they run.

    results = run_suite(lambda program, **options: launch(program, ranks=2, **options), backends=("nccl",))
    assert all(r.problem == "" for r in results)

A case is a function of the rank's world; all ranks run all cases one after another in one launch. Cases that end a run
(a rank that raises, a rank that never comes) have a launch each. A world's launcher returns what `sim.world.launch`
returns.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dbo.check import HappensBefore
from dbo.errors import DBOError, RingError
from dbo.trace import kinds
from dbo.trace.kind import Kind
from dbo.ubatching.forward_context import ForwardContext
from dbo.ubatching.ring import (
    UBatchContext,
    dbo_current_ubatch_id,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield,
    make_ubatch_contexts,
)


class RunResult(Protocol):
    """What a world's `launch` returns, as far as this suite reads it."""

    trace: Any
    values: list[Any]
    errors: list[BaseException | None]
    deadlocked: bool


Launch = Callable[..., RunResult]
"""`launch(program)`: on every rank, numbers or not as the caller chose."""


class ConformanceError(DBOError):
    """A world did not do what the contract says."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case: its name and what went wrong, "" when nothing did."""

    name: str
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem


def require(condition: object, text: str) -> None:
    """The contract says so.

    Raises:
        ConformanceError: the world does not.
    """
    if not condition:
        raise ConformanceError(text)


# -- cases: host side -----------------------------------------------------------------------------------------------


def batons_hand_over_in_turn(world: Any) -> None:
    """Two workers write by turns: a give lets exactly one take return."""
    batons = [world.host.baton(f"turn{i}") for i in range(2)]
    workers = [world.host.worker(f"u{i}") for i in range(2)]
    written: list[int] = []

    def work(me: int) -> Callable[[], None]:
        def turns() -> None:
            for turn in range(3):
                batons[me].take()
                written.append(10 * turn + me)
                batons[1 - me].give()

        return turns

    for me, worker in enumerate(workers):
        worker.submit(work(me))
    batons[0].give()
    for worker in workers:
        worker.join()
    require(written == [0, 1, 10, 11, 20, 21], f"batons alternate: {written}")
    batons[0].take()  # the last give is still there, and only once


def a_barrier_opens_for_all(world: Any) -> None:
    """Nobody passes before the last party has come."""
    barrier = world.host.barrier(3, "all")
    passed: list[str] = []
    workers = [world.host.worker(f"u{i}") for i in range(2)]
    for worker in workers:
        worker.submit(lambda: (barrier.wait(), passed.append("worker")))  # type: ignore[func-returns-value]
    require(passed == [], f"two of three have come: {passed}")
    barrier.wait()
    for worker in workers:
        worker.join()
    require(len(passed) == 2 and not barrier.aborted, f"three of three have come: {passed}")


def an_aborted_barrier_raises(world: Any) -> None:
    """`abort` wakes those who wait and refuses those who come later."""
    barrier = world.host.barrier(3, "aborted")
    raised: list[str] = []

    def wait() -> None:
        try:
            barrier.wait()
        except RingError:
            raised.append("waiter")

    worker = world.host.worker("u0")
    worker.submit(wait)
    barrier.abort()
    worker.join()
    require(raised == ["waiter"] and barrier.aborted, f"the waiter was woken with RingError: {raised}")
    try:
        barrier.wait()
    except RingError:
        return
    raise ConformanceError("a party that comes after the abort is refused")


_VARIABLE: ContextVar[str] = ContextVar("dbo_conformance", default="unset")


def a_worker_outlives_its_work(world: Any) -> None:
    """Several pieces of work, one with an error inside; each sees the state of who started it, only then."""
    worker = world.host.worker("u0")
    seen: list[str] = []

    def fail() -> None:
        seen.append("raises")
        raise_quietly()

    def raise_quietly() -> None:
        try:
            raise ValueError("planted")
        except ValueError:
            seen.append("caught")

    worker.submit(lambda: seen.append(_VARIABLE.get()))
    worker.join()
    token = _VARIABLE.set("set")
    state = world.task_state()
    _VARIABLE.reset(token)
    worker.submit(lambda: state.run(lambda: seen.append(_VARIABLE.get())))
    worker.join()
    worker.submit(fail)
    worker.join()
    worker.submit(lambda: seen.append(_VARIABLE.get()))
    worker.join()
    require(seen == ["unset", "set", "raises", "caught", "unset"], f"state is installed for its work only: {seen}")


def streams_and_tags_are_the_tasks_own(world: Any) -> None:
    """Current stream and tags of one task are not another's."""
    world.in_ubatch(-1, step=7)
    world.set_stream(world.comm)
    seen: list[Any] = []

    def work() -> None:
        world.set_stream(world.compute)
        world.in_ubatch(1, step=8)
        world.at_point("A0", layer=3)
        seen.append((world.current_stream().name, tuple(world.tags())))

    worker = world.host.worker("u1")
    worker.submit(work)
    worker.join()
    require(seen == [("compute", (8, 3, 1, "A0"))], f"the worker's own: {seen}")
    require(world.current_stream() is world.comm, "the starter's stream is as it was")
    require(tuple(world.tags()) == (7, -1, -1, ""), f"the starter's tags are as they were: {world.tags()}")
    tags = world.tags()
    world.at_point("MLP", layer=1)
    world.restore_tags(tags)
    require(tuple(world.tags()) == (7, -1, -1, ""), f"restored: {world.tags()}")
    world.set_stream(world.compute)


def events_order_streams(world: Any) -> None:
    """An event that was never recorded orders nothing; a wait refers to the last record made before it.

    What `query` answers at once depends on how far the work is: yes or no. After a wait it is yes.
    """
    never = world.event("never")
    require(never.query() is True, "no work stands before an event that was never recorded")
    world.comm.wait_event(never)
    event = world.event("again")
    event.record(world.compute)
    event.wait(world.comm)
    event.record(world.compute)
    world.comm.wait_stream(world.compute)
    last = world.compute.record_event()
    answer = last.query()
    require(isinstance(answer, bool), f"query answers yes or no behind queued work: {answer!r}")
    world.comm.synchronize()
    event.synchronize()
    require(event.query() is True, "an event that was waited for has happened")
    last.synchronize()
    require(last.query() is True, "an event that was queried first can be waited for")


def host_collectives_add_and_gather(world: Any) -> None:
    """`all_reduce` sums int32 tables without touching its input; objects are gathered by rank."""
    table = np.arange(6, dtype=np.int32).reshape(2, 3) + world.rank
    total = world.control.all_reduce(table, tag=0)
    ranks = world.size
    expected = ranks * np.arange(6).reshape(2, 3) + ranks * (ranks - 1) // 2
    require(total.dtype == np.int32 and np.array_equal(total, expected), f"the sum over ranks: {total.tolist()}")
    require(table[0, 0] == world.rank, "the input is unchanged")
    gathered = world.control.all_gather_object({"rank": world.rank})
    require(gathered == [{"rank": r} for r in range(ranks)], f"objects by rank: {gathered}")


def a_ring_hands_the_baton_round(world: Any) -> None:
    """Two ubatch contexts yield by turns, and each runs the receive hook that the other left: the ring's own records."""
    ran: list[tuple[str, int]] = []
    ready = world.host.barrier(3, "ring")
    forwards = [ForwardContext(attn_metadata=None, ubatch=ubatch, step=9) for ubatch in range(2)]
    contexts = make_ubatch_contexts(2, world.compute, world.comm, forwards, ready, world=world)

    def ubatch(context: UBatchContext) -> Callable[[], None]:
        def work() -> None:
            with context:
                ran.append(("before", context.index))
                dbo_register_recv_hook(lambda: ran.append(("hook", dbo_current_ubatch_id())))
                dbo_yield()
                dbo_maybe_run_recv_hook()
                ran.append(("after", context.index))

        return work

    workers = [world.host.worker(f"u{i}") for i in range(2)]
    for worker, context in zip(workers, contexts, strict=True):
        worker.submit(ubatch(context))
    ready.wait()
    contexts[0].start()
    for worker in workers:
        worker.join()
    require(contexts[0].ring.error is None, f"no ubatch raised: {contexts[0].ring.error!r}")
    expected = [("before", 0), ("before", 1), ("hook", 1), ("after", 0), ("hook", 0), ("after", 1)]
    require(ran == expected, f"ubatch 0 leads, hooks run in the peer's thread as their owner: {ran}")


_EXAMPLES: dict[type, Any] = {str: "conformance", int: 0, bool: False, dict: {}, list: []}
_OF_THE_ENGINE = (
    kinds.CONFIG,
    kinds.STEP_BEGIN,
    kinds.DECIDE,
    kinds.SLICES,
    kinds.STEP_END,
    kinds.JOIN,
    kinds.RESERVE,
    kinds.USE,
)


def what_the_engine_writes_arrives(world: Any) -> None:
    """A record of each kind that the engine writes comes through; that it does write them is a matter of whole runs."""
    world.in_ubatch(-1, step=9)
    for kind in _OF_THE_ENGINE:
        attrs = {name: _example(attr.type) for name, attr in kind.attrs.items() if attr.required}
        world.trace.host(kind, "conformance", **attrs)
    world.in_ubatch(-1, step=-1)


def _example(types: Any) -> Any:
    return _EXAMPLES[types[0] if isinstance(types, tuple) else types]


HOST_CASES: tuple[Callable[[Any], None], ...] = (
    batons_hand_over_in_turn,
    a_barrier_opens_for_all,
    an_aborted_barrier_raises,
    a_worker_outlives_its_work,
    streams_and_tags_are_the_tasks_own,
    events_order_streams,
    host_collectives_add_and_gather,
    a_ring_hands_the_baton_round,
    what_the_engine_writes_arrives,
)


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunCases:
    """The program of the common launch: every case in turn; it returns (name, problem) for each."""

    numbers: bool
    backends: tuple[str, ...]

    def __call__(self, world: Any) -> list[tuple[str, str]]:
        cases: list[tuple[str, Callable[[Any], None]]] = [(case.__name__, case) for case in HOST_CASES]
        if self.numbers:
            from dbo.conformance.exchange import exchange_cases

            cases += exchange_cases(self.backends)
        return [(name, _run(case, world)) for name, case in cases]


def _run(case: Callable[[Any], None], world: Any) -> str:
    try:
        case(world)
    except ConformanceError as error:
        return str(error)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


@dataclass(frozen=True)
class RaisesOnOneRank:
    """Rank 1 raises; the others wait for it."""

    def __call__(self, world: Any) -> str:
        if world.rank == 1:
            raise ValueError("planted")
        world.control.all_gather_object(world.rank)
        return "returned"


@dataclass(frozen=True)
class StaysAway:
    """Rank 1 leaves without coming to a collective."""

    def __call__(self, world: Any) -> str:
        world.control.all_gather_object(world.rank)
        if world.rank == 1:
            return "left"
        world.control.all_reduce(np.zeros((1, 1), dtype=np.int32), tag=1)
        return "returned"


def run_suite(launch: Launch, *, ranks: int, numbers: bool = True, backends: Sequence[str] = ()) -> list[CaseResult]:
    """Run all cases in the world behind `launch` and say which passed.

    Args:
        launch: `launch(program)` on `ranks` ranks, at least 2.
        numbers: the world computes with numbers.
        backends: all-to-all backends whose exchanges are tried; needs numbers.
    """
    launched = launch(RunCases(numbers, tuple(backends)))
    results = _common(launched, ranks)
    results.append(_guarded("the_trace_is_ordered", lambda: _trace_is_ordered(launched)))
    owed = [kind for kind in kinds.KINDS.values() if kind is not kinds.EXCHANGE or (numbers and "nccl" in backends)]
    results.append(_guarded("records_keep_their_contract", lambda: _records_keep_their_contract(launched, owed)))
    results.append(_guarded("an_error_hangs_nobody", lambda: _error_hangs_nobody(launch(RaisesOnOneRank()))))
    results.append(_guarded("who_stays_away_is_named", lambda: _absence_is_named(launch(StaysAway()))))
    return results


def _common(launched: RunResult, ranks: int) -> list[CaseResult]:
    problems: dict[str, list[str]] = {}
    for rank in range(ranks):
        if launched.values[rank] is None:
            problems.setdefault("all_cases_end", []).append(f"rank {rank}: {launched.errors[rank]}")
            continue
        for name, problem in launched.values[rank]:
            problems.setdefault(name, []).extend([f"rank {rank}: {problem}"] if problem else [])
    return [CaseResult(name=name, problem="\n".join(found)) for name, found in problems.items()]


def _guarded(name: str, judge: Callable[[], None]) -> CaseResult:
    try:
        judge()
    except Exception as error:
        text = str(error) if isinstance(error, ConformanceError) else "".join(traceback.format_exception(error))
        return CaseResult(name=name, problem=text)
    return CaseResult(name=name)


def _trace_is_ordered(launched: RunResult) -> None:
    """Every edge points backwards, and what a baton or a barrier orders is ordered in the trace."""
    happens = HappensBefore(launched.trace)
    barriers = [r for r in launched.trace.of_kind(kinds.BARRIER) if r.rank == 0 and r.name == "all"]
    require(len(barriers) == 3, f"three parties came: {len(barriers)} barrier records")
    following = [happens.next_on_line(r.id) for r in barriers if r.line == "main"]
    after = following[0]
    require(after is not None, "the starter goes on after the barrier")
    if after is not None:
        unordered = [r.id for r in barriers if not happens.ordered(r.id, after.id)]
        require(not unordered, f"all arrivals come before what follows the barrier: {unordered}")
    meets = [r for r in launched.trace.of_kind(kinds.MEET) if r.attrs["group"] == "dp.cpu"]
    require(bool(meets), "host collectives leave a meeting in the trace")
    members = [r for r in launched.trace.of_kind(kinds.COLLECTIVE) if r.attrs["group"] == "dp.cpu"]
    for meet in meets:
        came = [m for m in members if m.attrs["index"] == meet.attrs["index"]]
        require(all(happens.ordered(m.id, meet.id) for m in came), f"members come before their meeting: {meet.name}")


def _records_keep_their_contract(launched: RunResult, owed: Sequence[Kind]) -> None:
    """Each record carries what its kind says, and every kind that the world owes is there."""
    world = launched.trace.meta["world"]
    written: set[str] = set()
    wrong: dict[str, str] = {}
    for record in launched.trace.records:
        written.add(record.kind)
        kind = kinds.KINDS.get(record.kind)
        problems = ["is of a kind that dbo.trace.kinds does not have"] if kind is None else kind.faults_of(record.attrs)
        for problem in problems:
            wrong.setdefault(f"{record.kind} {problem}", f"a record of kind {record.kind} (#{record.id}) {problem}")
    wrong |= {
        kind: f"no record of kind {kind}: {kind.when}" for kind in owed if world in kind.worlds and kind not in written
    }
    require(not wrong, "; ".join(wrong.values()))


def _error_hangs_nobody(launched: RunResult) -> None:
    require(isinstance(launched.errors[1], ValueError), f"rank 1 ends with its own error: {launched.errors[1]!r}")
    require(launched.values[0] is None, f"rank 0 cannot end normally: {launched.values[0]!r}")


def _absence_is_named(launched: RunResult) -> None:
    require(launched.deadlocked, "the run is ended and reported as stuck")
    blocked = [r for r in launched.trace.of_kind(kinds.BLOCKED) if r.rank == 0]
    require(bool(blocked), "rank 0 is reported as blocked")
    missing = [tuple(r.attrs["waits_for"].get("missing", ())) for r in blocked]
    require((1,) in missing, f"the report names the missing rank: {missing}")
