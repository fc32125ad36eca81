"""Buffers that belong to somebody else by the time they are read. Needs torch, for the workspace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dbo.check import judge, measure
from dbo.dcp.workspace import Slot, WorkspaceManager
from dbo.moe.deepep_low_latency import DeepEPLowLatencyPrepareAndFinalize
from dbo.trace import Access, Trace
from dbo.ubatching.ring import (
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
)
from sim.engine import Node
from sim.work import Work
from sim.world import SimWorld
from tests.faults.pair import MODEL_ONLY, Body, Pair, check_pair, hand_over, op, ring_step, run
from tests.faults.storages import Storages

ROWS = ((4, 8), torch.float32)


# -- one workspace under two ubatches: vllm#46990 ---------------------------------------------------------------------


def two_in_flight(slot_of: Callable[[int], Slot], *, waits: bool = False) -> Trace:
    """Both ubatches dispatch into a workspace (6 us) and let their experts read it.

    Args:
        waits: nothing else runs between a ubatch's dispatch and its experts.
    """

    def program(world: SimWorld) -> None:
        workspace, bytes_of = WorkspaceManager(recorder=world.trace), Storages(world)

        def body(ubatch: int) -> Body:
            def layer(world: SimWorld) -> None:
                x = world.tensors.empty((4, 8), f"x.u{ubatch}")
                op(world, "attention", us=5, writes=[x])
                dbo_switch_to_comm_sync()
                (rows,) = workspace.get_simultaneous(ROWS, slot=slot_of(ubatch), caller="dispatch")
                w = bytes_of(rows, "workspace")
                op(world, "dispatch", us=6, reads=[x], writes=[w], kind="exchange", tags={w.buffer: f"u{ubatch}"})
                if waits:
                    dbo_switch_to_compute_sync()
                else:
                    hand_over(dbo_yield_and_switch_from_comm_to_compute)
                op(world, "experts", us=8, reads=[w], expects={w.buffer: f"u{ubatch}"})
                if waits:
                    hand_over()

            return layer

        ring_step(world, [body(0), body(1)], declared=[1, 1])

    return run(program)


def per_ubatch(ubatch: int) -> Slot:
    return Slot(ubatch, "exchange")


def one_for_all(ubatch: int) -> Slot:
    return Slot(0, "exchange")


# -- metadata builders in one scratch slot: vllm#58161 ----------------------------------------------------------------


def built(names_slot: bool, seen: dict[str, list[int]] | None = None) -> Trace:
    """Metadata of both ubatches is built before their threads run, in the thread of the step."""

    def program(world: SimWorld) -> None:
        workspace, bytes_of = WorkspaceManager(recorder=world.trace), Storages(world)
        views = []
        for ubatch, value in enumerate((5, 9)):
            slot = Slot(ubatch, "metadata") if names_slot else None
            (view,) = workspace.get_simultaneous(((1,), torch.int32), slot=slot, lane="metadata", caller="build")
            view.fill_(value)
            made = bytes_of(view, "metadata")
            op(world, f"build u{ubatch}", us=1, writes=[made], tags={made.buffer: f"u{ubatch}"})
            views.append((view, made))
        for ubatch, (view, made) in enumerate(views):
            op(world, f"attention u{ubatch}", us=1, reads=[made], expects={made.buffer: f"u{ubatch}"})
            if seen is not None:
                seen[f"u{ubatch}"] = view.tolist()

    return run(program)


# -- two receive buffers: DeepEP#513 ----------------------------------------------------------------------------------


def outstanding(count: int) -> Trace:
    """Six low-latency calls on two ranks; `count` of them are sent before the first of these is received."""

    def program(world: SimWorld) -> None:
        backend = DeepEPLowLatencyPrepareAndFinalize(world, world.low_latency, num_experts=4, max_tokens_per_rank=4)
        x, ids = world.tensors.op("x", [], (4, 8)), world.tensors.op("ids", [], (4, 2))
        world.set_real_tokens(4)
        for _ in range(6 // count):
            hooks = [backend.prepare_async(x, ids, ids)[0] for _ in range(count)]
            for hook in hooks:
                hook()

    return run(program, ranks=2)


def loses_a_flag(count: int, *, clears_at_send: bool) -> bool:
    """The same by hand: call k sets the flags of buffer k mod 2 and clears those of the other one."""
    pending: set[int] = set()
    for first in range(0, 6, count):
        calls = range(first, first + count)
        for call in calls:
            if clears_at_send and any(p % 2 != call % 2 for p in pending):
                return True
            pending.add(call)
        for call in calls:
            pending.discard(call)
            if not clears_at_send and any(p % 2 != call % 2 for p in pending):
                return True
    return False


# -- flags between ranks: uccl#993, uccl#986 --------------------------------------------------------------------------


def cleaned(*, barrier: bool) -> Trace:
    """Cleaning takes 1 us on r0 and 5 on r1; then r0 sets the flag of r1, which waits for it."""
    flags: dict[int, Access] = {}
    sets: list[Node] = []

    def meet(world: SimWorld) -> None:
        world.control.all_reduce(np.zeros(1, dtype=np.int32), tag=0)

    def program(world: SimWorld) -> None:
        flags[world.rank] = Access.interval(world.engine.new_buffer(world.rank, "flag", 8), 0, 8)
        meet(world)  # addresses are exchanged
        world.compute.launch(Work(kind="op", name="clean", duration_us=(1, 5)[world.rank], writes=(flags[world.rank],)))
        if barrier:
            world.compute.synchronize()
            meet(world)
        if world.rank == 0:
            sets.append(world.compute.launch(Work(kind="op", name="set flag", duration_us=1, writes=(flags[1],))))
        meet(world)
        if world.rank == 1:
            world.compute.launch(Work(kind="wait", name="flag", after=tuple(sets), attrs={"event": "flag"}))

    return run(program, ranks=2)


def counted(*, shared: bool) -> Trace:
    """Rounds A and B of two child batches announce themselves to r1, whose queues of A and of B look into their cells."""
    cells: dict[str, Access] = {}

    def program(world: SimWorld) -> None:
        if world.rank == 0:
            for child in "AB":
                name = "cell" if shared else f"cell of {child}"
                if name not in cells:
                    cells[name] = Access.interval(world.engine.new_buffer(1, name, 8), 0, 8)
                cells[child] = cells[name]
                tags = {cells[child].buffer: child}
                world.compute.launch(
                    Work(
                        kind="op", name=f"announce {child}", duration_us=1, writes=(cells[child],), attrs={"tags": tags}
                    )
                )
            world.compute.synchronize()
        world.control.all_reduce(np.zeros(1, dtype=np.int32), tag=0)
        if world.rank == 1:
            for child in "AB":
                expects = {cells[child].buffer: child}
                world.compute.launch(
                    Work(
                        kind="op",
                        name=f"look for {child}",
                        duration_us=1,
                        reads=(cells[child],),
                        attrs={"expects": expects},
                    )
                )

    return run(program, ranks=2)


PAIRS = [
    Pair(
        case="vllm-project/vllm#46990",
        id="buffer-reuse",
        uses="dbo.dcp.workspace.WorkspaceManager",
        buggy=lambda: two_in_flight(one_for_all),
        fixed=lambda: two_in_flight(per_ubatch),
        culprit={"rank": 0, "ubatch": 0},
        says=("expects u0 in workspace and can find u1",),
        also=frozenset({"stream-race"}),
    ),
    Pair(
        case="vllm-project/vllm#46990",
        name="strict wait",
        id="buffer-reuse",
        uses="dbo.dcp.workspace.WorkspaceManager",
        buggy=lambda: two_in_flight(one_for_all),
        fixed=lambda: two_in_flight(one_for_all, waits=True),
        culprit={"rank": 0, "ubatch": 0},
        says=("written by dispatch",),
        also=frozenset({"stream-race"}),
    ),
    Pair(
        case="vllm-project/vllm#58161",
        id="buffer-reuse",
        uses="dbo.dcp.workspace.WorkspaceManager",
        buggy=lambda: built(names_slot=False),
        fixed=lambda: built(names_slot=True),
        culprit={"rank": 0},
        says=("attention u0", "expects u0 in metadata and finds u1", "build u1"),
    ),
    Pair(
        case="deepseek-ai/DeepEP#513",
        id="buffer-reuse",
        uses="dbo.moe.deepep_low_latency.DeepEPLowLatencyPrepareAndFinalize",
        buggy=lambda: outstanding(3),
        fixed=lambda: outstanding(1),
        culprit={"rank": 0},
        says=("call 1", "clears the flags of buffer 0 before call 0", "2 calls outstanding"),
        also=frozenset({"stream-race"}),
    ),
    Pair(
        case="uccl-project/uccl#993",
        id="stream-race",
        uses=MODEL_ONLY,
        buggy=lambda: cleaned(barrier=False),
        fixed=lambda: cleaned(barrier=True),
        culprit={"rank": 0},
        says=("clean", "set flag"),
    ),
    Pair(
        case="uccl-project/uccl#986",
        id="buffer-reuse",
        uses=MODEL_ONLY,
        buggy=lambda: counted(shared=True),
        fixed=lambda: counted(shared=False),
        culprit={"rank": 1},
        says=("expects A in cell and finds B",),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


def test_waiting_for_safety_costs_the_overlap() -> None:
    fast, slow = measure(two_in_flight(per_ubatch)), measure(two_in_flight(one_for_all, waits=True))
    assert fast.hidden_share is not None and slow.hidden_share is not None
    assert fast.hidden_share > 0.4 and slow.hidden_share == 0.0


def test_the_named_slot_wins_over_the_threads() -> None:
    wrong: dict[str, list[int]] = {}
    right: dict[str, list[int]] = {}
    built(names_slot=False, seen=wrong)
    built(names_slot=True, seen=right)
    assert (wrong, right) == ({"u0": [9], "u1": [9]}, {"u0": [5], "u1": [9]})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_how_many_calls_may_be_outstanding_follows_from_the_clear_rule(count: int) -> None:
    flagged = bool(judge(outstanding(count)).failed["buffer-reuse"])
    assert flagged == loses_a_flag(count, clears_at_send=True) == (count > 1)
    assert loses_a_flag(count, clears_at_send=False) == (count > 1)


def test_the_wiped_flag_and_the_clear_that_wiped_it_are_both_named() -> None:
    (violation,) = judge(cleaned(barrier=False)).violations
    assert "clean on compute of rank 1" in violation.sentence
    assert "set flag on compute of rank 0" in violation.sentence
