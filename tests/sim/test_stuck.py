"""What a stuck line is said to wait for, and what a baton that is given twice remembers. Ordering mode."""

from __future__ import annotations

from typing import Any

import pytest

from dbo.trace import Trace
from sim.collectives import SimGroup
from sim.engine import SMS_PER_DEVICE
from sim.work import Work
from sim.world import SimWorld, launch


def traced(program: Any, *, ranks: int = 1) -> Trace:
    launched = launch(program, ranks=ranks, mode="ordering")
    assert launched.errors == [None] * ranks, launched.errors
    return launched.trace


def blocked(trace: Trace, rank: int, line: str) -> dict[str, Any]:
    (record,) = (r for r in trace.of_kind("blocked") if (r.rank, r.line) == (rank, line))
    return record.attrs["waits_for"]


def test_a_transfer_behind_a_send_that_has_not_started_names_the_sends_line() -> None:
    """The send is not at the head of its stream; what the transfer needs is that stream all the same."""

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        if world.rank == 1:
            return
        rows = world.tensors.empty((2, 8), "rows")
        world.group.all_to_all_single(rows, rows, [1, 1], [1, 1])  # rank 1 never comes
        ids = world.tensors.empty((2, 2), "ids")
        world.low_latency.low_latency_dispatch(rows, ids, 2, 4, use_fp8=False, return_recv_hook=True)
        world.compute.synchronize()

    trace = traced(program, ranks=2)
    assert blocked(trace, 0, "compute")["missing"] == [1]
    assert [list(need) for need in blocked(trace, 0, "net")["needs"]] == [[0, "compute"]]


def test_a_kernel_without_room_names_what_it_lacks_and_who_holds_it() -> None:
    def program(world: SimWorld) -> None:
        world.trace.host("point")
        if world.rank == 1:
            return
        for name, stream, sms in (("first", world.comm, 100), ("second", world.compute, SMS_PER_DEVICE)):
            world.set_stream(stream)
            SimGroup(world, name).exchange(
                Work(kind="exchange", name=name, duration_us=1.0, takes_sms=sms),
                signature=([1], "uint8"),
                value=None,
                connect=lambda members, rank: (lambda: None, lambda: None),
            )
        world.compute.synchronize()

    answer = blocked(traced(program, ranks=2), 0, "compute")
    assert answer["what"] == f"{SMS_PER_DEVICE} SMs for second, {SMS_PER_DEVICE - 100} are free"
    assert [list(need) for need in answer["needs"]] == [[0, "comm"]]


@pytest.mark.parametrize("sms", [(100, 32, 0.0), (100, 33, 5.0)])
def test_kernels_run_side_by_side_as_far_as_sms_reach(sms: tuple[int, int, float]) -> None:
    first, second, start_us = sms

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        world.comm.launch(Work(kind="op", name="first", duration_us=5.0, takes_sms=first, frees_sms=first))
        world.compute.launch(Work(kind="op", name="second", duration_us=5.0, takes_sms=second, frees_sms=second))

    starts = {r.name: r.t_us for r in traced(program).of_kind("op")}
    assert starts["second"] == pytest.approx(starts["first"] + start_us, abs=0.2)


def test_a_second_give_keeps_the_first_ones_edge() -> None:
    """The taker follows whoever woke it; the second give wakes nobody and orders nothing."""

    def program(world: SimWorld) -> None:
        baton = world.host.baton("b")
        world.trace.host("point", "first")
        baton.give()
        world.trace.host("point", "second")
        baton.give()
        worker = world.host.worker("u0")
        worker.submit(lambda: (baton.take(), world.trace.host("point", "taken")))
        worker.join()

    trace = traced(program)
    by_name = {r.name: r for r in trace.of_kind("point")}
    assert by_name["first"].id in by_name["taken"].after
