"""Events too early, too late, on the wrong stream; a fill that races with what it makes room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dbo.check import measure
from dbo.moe.nccl import NcclPrepareAndFinalize
from dbo.trace import Record, Trace
from dbo.ubatching.forward_context import ForwardContext, override_forward_context
from dbo.ubatching.ring import (
    UBatchContext,
    dbo_get_previous_event,
    dbo_switch_to_comm,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_compute_to_comm,
)
from sim.symbols import Symbol, SymbolRowOps
from sim.world import SimWorld
from tests.faults.pair import Pair, check_pair, hand_over, op, ring_step, run, yields


def named(trace: Trace, name: str) -> Record:
    (record,) = (r for r in trace.records if r.name == name and r.kind != "meet")
    return record


# -- the event that an exchange waits for: vllm#38451, and vllm#27666 as its mirror image -----------------------------


class RecordsAfterTheYield(UBatchContext):
    """The event also covers what the peer has queued on compute meanwhile."""

    def yield_and_switch_to(self, stream: Any) -> None:
        self.yield_()
        done = self.record_done()
        self.switch_to(stream)
        stream.wait_event(done)


class RecordsElsewhere(UBatchContext):
    """The event is recorded on the stream that is about to wait for it."""

    def yield_and_switch_to(self, stream: Any) -> None:
        self.comm_done.record(self.comm_stream)
        self.yield_()
        self.switch_to(stream)
        stream.wait_event(self.comm_done)


def exchange_after_a(context: type[UBatchContext]) -> Trace:
    """compute: u0 A (5 us), yield, u1 B (20 us); u0's exchange needs A only."""

    def u0(world: SimWorld) -> None:
        x, got = (world.tensors.empty((4, 8), name) for name in ("x", "got"))
        op(world, "A", us=5, writes=[x])
        hand_over(dbo_yield_and_switch_from_compute_to_comm)
        op(world, "dispatch", us=10, reads=[x], writes=[got], kind="exchange")
        dbo_switch_to_compute_sync()
        op(world, "C", us=5, reads=[got])

    def u1(world: SimWorld) -> None:
        op(world, "B", us=20, writes=[world.tensors.empty((4, 8), "b")])
        yields(1)(world)

    return run(lambda world: ring_step(world, [u0, u1], declared=[1, 1], context=context))


# -- the event handed to the communication library: vllm#27666 --------------------------------------------------------


def whatever_is_current(make: Callable[[], Any]) -> Any:
    """The event is captured on the stream that happens to be current."""
    return make()


def dispatch_with(previous_event: Callable[..., Any]) -> Trace:
    """compute writes x (5 us); the dependency event is captured while another stream is current."""

    def u0(world: SimWorld) -> None:
        x = world.tensors.empty((4, 8), "x")
        op(world, "write x", us=5, writes=[x])
        dbo_switch_to_comm()
        event = previous_event(lambda: world.current_stream().record_event())
        world.comm.wait_event(event)
        op(world, "dispatch", us=10, reads=[x], kind="exchange")
        dbo_switch_to_compute_sync()

    return run(lambda world: ring_step(world, [u0, yields(0)]))


# -- a fill that comes with an allocation: DeepEP#589 -----------------------------------------------------------------


class DeterministicFill(SymbolRowOps):
    """Fresh rows are filled with NaN, on the stream that the rows belong to: where they are allocated, or compute."""

    on_compute = False

    def empty_rows(self, like: Symbol, rows: int) -> Symbol:
        made = super().empty_rows(like, rows)
        stream = self.world.current_stream()
        self.world.set_stream(self.world.compute if self.on_compute else stream)
        op(self.world, "fill_nan", us=4, writes=[made])
        self.world.set_stream(stream)
        return made


class FillOnCompute(DeterministicFill):
    on_compute = True


def combine_with(row_ops: type[DeterministicFill]) -> Trace:
    """comm has waited for compute; then the output is allocated, filled (4 us) and written by combine."""

    def program(world: SimWorld) -> None:
        world.row_ops = row_ops(world)
        backend = NcclPrepareAndFinalize(world, num_experts=2)
        expert_out = world.tensors.op("experts", [], (4, 8))
        ids = world.tensors.empty((4, 2), "topk_ids")
        world.comm.wait_stream(world.compute)
        world.set_stream(world.comm)
        with override_forward_context(ForwardContext(attn_metadata=None, num_tokens_across_ranks=[4])):
            backend.finalize_async(expert_out, ids, ids)()

    return run(program)


PAIRS = [
    Pair(
        case="vllm-project/vllm#38451",
        id="no-overlap",
        uses="dbo.ubatching.ring.UBatchContext",
        buggy=lambda: exchange_after_a(RecordsAfterTheYield),
        fixed=lambda: exchange_after_a(UBatchContext),
        culprit={"rank": 0, "ubatch": 0},
        says=("dispatch of ubatch 0", "waits for B of ubatch 1"),
    ),
    Pair(
        case="vllm-project/vllm#38451",
        name="mirror",
        id="stream-race",
        uses="dbo.ubatching.ring.UBatchContext",
        buggy=lambda: exchange_after_a(RecordsElsewhere),
        fixed=lambda: exchange_after_a(UBatchContext),
        culprit={"rank": 0, "ubatch": 0},
        says=("x of rank 0", "u0 A", "u0 dispatch"),
    ),
    Pair(
        case="vllm-project/vllm#27666",
        id="stream-race",
        uses="dbo.ubatching.ring.dbo_get_previous_event",
        buggy=lambda: dispatch_with(whatever_is_current),
        fixed=lambda: dispatch_with(dbo_get_previous_event),
        culprit={"rank": 0, "ubatch": 0},
        says=("x of rank 0", "a write by u0 write x", "a read by u0 dispatch"),
    ),
    Pair(
        case="deepseek-ai/DeepEP#589",
        id="stream-race",
        uses="dbo.moe.nccl.NcclPrepareAndFinalize",
        buggy=lambda: combine_with(FillOnCompute),
        fixed=lambda: combine_with(DeterministicFill),
        culprit={"rank": 0},
        says=("a write by fill_nan", "a write by all_to_all_single"),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


@pytest.mark.parametrize(
    ("context", "starts_after"), [(UBatchContext, "A"), (RecordsAfterTheYield, "B"), (RecordsElsewhere, "")]
)
def test_an_exchange_starts_when_its_own_producer_ends(context: type[UBatchContext], starts_after: str) -> None:
    """5 us is right, 25 hides nothing, 0 is a race: one test that looks both ways."""
    trace = exchange_after_a(context)
    dispatch, a = named(trace, "dispatch"), named(trace, "A")
    if starts_after:
        assert dispatch.t_us == pytest.approx(named(trace, starts_after).end_us)
    else:
        assert dispatch.t_us < a.end_us
    hidden = measure(trace).hidden_share
    assert hidden == (0.0 if starts_after == "B" else pytest.approx(1.0))


def test_the_early_read_starts_before_its_write_has_ended() -> None:
    buggy, fixed = dispatch_with(whatever_is_current), dispatch_with(dbo_get_previous_event)
    assert named(buggy, "dispatch").t_us < named(buggy, "write x").end_us
    assert named(fixed, "dispatch").t_us >= named(fixed, "write x").end_us
