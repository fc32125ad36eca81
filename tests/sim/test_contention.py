"""What compute costs beside an exchange of its own rank: SMs that kernels hold, bandwidth that copies take. No torch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from dbo.job.layer import LayerJob, layer_program
from dbo.schedule import load_schedule
from dbo.trace import Record, Trace
from sim.collectives import SimGroup
from sim.compiled.program import compile_schedule
from sim.cost import CostTable
from sim.engine import SMS_PER_DEVICE
from sim.work import Work
from sim.world import SimRun, SimWorld, launch
from tests.sim.backend_harness import ALL_BACKENDS, DECLARED, Case
from tests.sim.job_harness import ordering_job, run, verdict_of

OFF = CostTable(contention=False)
WORK_US = 100.0


def exchange(world: SimWorld, sms: int, duration_us: float, name: str = "exchange") -> None:
    """A kernel-based exchange of one member; without `sms` it is NCCL's, which reserves none."""
    SimGroup(world, name, members=(world.rank,)).exchange(
        Work(kind="exchange", name=name, duration_us=duration_us, takes_sms=sms),
        signature=([1], "uint8"),
        value=None,
        connect=lambda members, rank: (lambda: None, lambda: None),
    )


def beside(sms: int, *, before_us: float, lasts_us: float, cost: CostTable | None = None) -> Trace:
    """`WORK_US` of compute on one rank, and an exchange of `sms` SMs that begins `before_us` earlier or later."""

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        world.set_stream(world.comm)
        if before_us < 0:
            world.comm.launch(Work(kind="op", name="pause", duration_us=-before_us))
        exchange(world, sms, lasts_us)
        if before_us > 0:
            world.compute.launch(Work(kind="op", name="pause", duration_us=before_us))
        world.compute.launch(Work(kind="op", name="product", duration_us=WORK_US))

    cost = replace(cost or CostTable(), host_launch_us=0.0)
    launched = launch(program, ranks=1, mode="ordering", cost=cost)
    assert launched.errors == [None]
    return launched.trace


def product(trace: Trace) -> Record:
    (found,) = (r for r in trace.of_kind("op") if r.name == "product")
    return found


@pytest.mark.parametrize("sms", [8, 20, 24, 66, 130])
def test_beside_an_exchange_that_holds_sms_all_the_while_it_takes_as_much_longer_as_there_are_fewer(sms: int) -> None:
    slowed = product(beside(sms, before_us=0.0, lasts_us=1e6))
    assert slowed.dur_us == pytest.approx(WORK_US * SMS_PER_DEVICE / (SMS_PER_DEVICE - sms), abs=1e-3)


@pytest.mark.parametrize("begins", ["at once", "half way"])
def test_beside_half_of_it_it_takes_half_of_that_longer(begins: str) -> None:
    sms = SMS_PER_DEVICE // 3  # two thirds of the speed
    half_us = WORK_US / 2
    if begins == "at once":  # the exchange ends when half of the work is done
        trace = beside(sms, before_us=0.0, lasts_us=half_us * 1.5)
    else:
        trace = beside(sms, before_us=-half_us, lasts_us=1e6)
    assert product(trace).dur_us == pytest.approx(half_us + half_us * 1.5)


def test_what_was_done_before_the_operation_costs_nothing() -> None:
    """An exchange that ends as the operation starts, and one that starts as it ends."""
    assert product(beside(66, before_us=2 * WORK_US, lasts_us=50.0)).dur_us == WORK_US
    assert product(beside(66, before_us=-WORK_US, lasts_us=1e6)).dur_us == WORK_US


def test_an_exchange_within_the_operation_slows_it_only_for_so_long() -> None:
    """At half of the speed for 40 us, 20 us of work are left over."""
    assert product(beside(66, before_us=-10.0, lasts_us=40.0)).dur_us == pytest.approx(WORK_US + 20.0)


def test_a_second_exchange_slows_what_the_first_one_has_made_late() -> None:
    """20 us are left when the operation would have ended alone; half of them run beside the second exchange."""

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        world.comm.launch(Work(kind="op", name="pause", duration_us=10.0))
        world.set_stream(world.comm)
        exchange(world, 66, 40.0, "first")
        world.comm.launch(Work(kind="op", name="pause", duration_us=60.0))  # to 110 us
        exchange(world, 66, 1e6, "second")
        world.compute.launch(Work(kind="op", name="product", duration_us=WORK_US))

    pause = CostTable(host_launch_us=0.0)
    trace = launch(program, ranks=1, mode="ordering", cost=pause).trace
    pauses = [r for r in trace.of_kind("op") if r.name == "pause"]
    assert [round(r.end_us, 6) for r in pauses] == [10.0, 110.0]
    assert product(trace).dur_us == pytest.approx(WORK_US + 20.0 + 10.0)


def test_a_kernel_that_is_launched_with_its_sms_holds_them_until_its_end() -> None:
    """Captured, without reserving them: two of them together occupy more than there are, and run at once."""

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        graph = world.new_graph("graph")
        with graph.capture():
            for stream, lasts_us in ((world.comm, 50.0), (world.side, 50.0)):
                stream.wait_stream(world.compute)
                stream.launch(
                    Work(
                        kind="exchange", name="kernel", duration_us=lasts_us, takes_sms=70, frees_sms=70, reserves=False
                    )
                )
            world.compute.launch(Work(kind="op", name="product", duration_us=WORK_US))
            for stream in (world.comm, world.side):
                world.compute.wait_stream(stream)
        graph.replay()

    trace = launch(program, ranks=1, mode="ordering", cost=CostTable(host_launch_us=0.0)).trace
    assert len({r.t_us for r in trace.of_kind("exchange")}) == 1
    left_us = WORK_US - 50.0 / SMS_PER_DEVICE  # one SM's worth was done meanwhile
    assert product(trace).dur_us == pytest.approx(50.0 + left_us, abs=1e-3)


def test_compute_that_acts_at_its_end_is_written_once_and_then() -> None:
    done: list[str] = []

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        world.set_stream(world.comm)
        exchange(world, 66, 150.0)
        world.compute.launch(
            Work(kind="op", name="product", duration_us=WORK_US, finish=lambda: done.append("product"))
        )

    trace = launch(program, ranks=1, mode="ordering", cost=CostTable(host_launch_us=0.0)).trace
    assert product(trace).dur_us == pytest.approx(150.0 + 25.0) and done == ["product"]
    assert [r.kind for r in trace.records if r.on_device and r.dur_us] == ["exchange", "op"]


def test_exchanges_side_by_side_add_up() -> None:
    def program(world: SimWorld) -> None:
        world.trace.host("point")
        for stream, name in ((world.comm, "one"), (world.side, "other")):
            world.set_stream(stream)
            exchange(world, 33, 1e6, name)
        world.compute.launch(Work(kind="op", name="product", duration_us=WORK_US))

    trace = launch(program, ranks=1, mode="ordering", cost=CostTable(host_launch_us=0.0)).trace
    assert product(trace).dur_us == pytest.approx(2 * WORK_US)


def test_a_kernel_that_takes_every_sm_leaves_the_work_of_one() -> None:
    """So that no order depends on the price."""
    slowed = product(beside(SMS_PER_DEVICE, before_us=0.0, lasts_us=1e6))
    assert slowed.dur_us == pytest.approx(WORK_US * SMS_PER_DEVICE)


def test_sms_are_held_while_a_kernel_spins_for_its_peers() -> None:
    """Rank 1 comes 300 us late; rank 0's kernel is there from the start."""

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        world.set_stream(world.comm)
        if world.rank == 1:
            world.comm.launch(Work(kind="op", name="late", duration_us=300.0))
        SimGroup(world, "both").exchange(
            Work(kind="exchange", name="exchange", duration_us=1.0, takes_sms=66),
            signature=([1], "uint8"),
            value=None,
            connect=lambda members, rank: (lambda: None, lambda: None),
        )
        if world.rank == 0:
            world.compute.launch(Work(kind="op", name="product", duration_us=WORK_US))

    trace = launch(program, ranks=2, mode="ordering", cost=CostTable(host_launch_us=0.0)).trace
    assert product(trace).dur_us == pytest.approx(2 * WORK_US)


def test_kernels_of_nccl_slow_as_much_as_the_cost_table_says_and_reserve_nothing() -> None:
    cost = CostTable(collective_sms=44)
    trace = beside(0, before_us=0.0, lasts_us=1e6, cost=cost)
    assert product(trace).dur_us == pytest.approx(1.5 * WORK_US)
    assert not any("sms" in r.attrs for r in trace.records)
    assert product(beside(0, before_us=0.0, lasts_us=1e6, cost=CostTable(collective_sms=0))).dur_us == WORK_US


def copying(cost: CostTable) -> Trace:
    """One layer's worth of two ranks that copy while they compute."""

    def program(world: SimWorld) -> None:
        rows = world.tensors.empty((1024, 7168), "rows")
        table = [[512, 512], [512, 512]]
        world.set_stream(world.comm)
        world.symmetric.send([rows], table, channel=(0, "dispatch"))
        world.compute.launch(Work(kind="op", name="product", duration_us=10.0))

    launched = launch(program, ranks=2, mode="ordering", cost=cost)
    assert launched.errors == [None, None]
    return launched.trace


def test_beside_a_copy_engine_it_takes_the_measured_factor_longer() -> None:
    cost = CostTable(host_launch_us=0.0)
    trace = copying(cost)
    products = [r for r in trace.of_kind("op") if r.name == "product"]
    assert [r.dur_us for r in products] == pytest.approx([10.0 * cost.copy_engine_slowdown] * 2)
    assert all(t.dur_us > 20.0 for t in trace.of_kind("transfer"))
    assert 1.045 <= cost.copy_engine_slowdown <= 1.06


def test_the_switch_turns_it_off() -> None:
    assert product(beside(66, before_us=0.0, lasts_us=1e6, cost=OFF)).dur_us == WORK_US
    assert {r.dur_us for r in copying(OFF).of_kind("op") if r.name == "product"} == {10.0}


def test_low_latency_kernels_are_not_priced() -> None:
    """How many SMs its halves take nobody has measured."""
    job = ordering_job(((8,), (8,)), backend="deepep_low_latency", new_tokens=1)
    assert run(job).trace.canonical_bytes() == run(job, cost=OFF).trace.canonical_bytes()


def test_after_a_failed_step_nothing_is_held() -> None:
    """Rank 1 never comes to the exchange, and both go on in a new epoch."""

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        if world.rank == 0:
            world.set_stream(world.comm)
            SimGroup(world, "both").exchange(
                Work(kind="exchange", name="exchange", duration_us=1.0, takes_sms=66),
                signature=([1], "uint8"),
                value=None,
                connect=lambda members, rank: (lambda: None, lambda: None),
            )
            world.compute.launch(Work(kind="op", name="before", duration_us=WORK_US))
        world.recover(0)
        if world.rank == 0:
            world.compute.launch(Work(kind="op", name="product", duration_us=WORK_US))

    launched = launch(program, ranks=2, mode="ordering", cost=CostTable(host_launch_us=0.0))
    assert launched.errors == [None, None] and not launched.deadlocked
    lasts = {r.name: r.dur_us for r in launched.trace.of_kind("op")}
    assert lasts == {"before": pytest.approx(2 * WORK_US), "product": WORK_US}


def test_in_a_replayed_graph_it_is_as_in_an_eager_step() -> None:
    def program(world: SimWorld) -> None:
        world.trace.host("point")
        graph = world.new_graph("graph")
        with graph.capture():
            world.comm.wait_stream(world.compute)
            world.set_stream(world.comm)
            exchange(world, 66, 1e6)
            world.set_stream(world.compute)
            world.compute.launch(Work(kind="op", name="product", duration_us=WORK_US))
            world.compute.wait_stream(world.comm)
        graph.replay()

    launched = launch(program, ranks=1, mode="ordering", cost=CostTable(host_launch_us=0.0))
    assert launched.errors == [None]
    assert product(launched.trace).dur_us == pytest.approx(2 * WORK_US)


@pytest.mark.parametrize("captured", [False, True])
def test_collectives_that_reserve_no_sms_wait_for_none(captured: bool) -> None:
    """Two that together occupy more than a device has start at once, in a graph too."""

    def program(world: SimWorld) -> None:
        world.trace.host("point")
        graph = world.new_graph("graph")
        with graph.capture() if captured else nullcontext():
            for stream in (world.comm, world.side):
                stream.wait_stream(world.compute)
                world.set_stream(stream)
                exchange(world, 0, 50.0, stream.name)
            world.set_stream(world.compute)
            for stream in (world.comm, world.side):
                world.compute.wait_stream(stream)
        if captured:
            graph.replay()

    cost = CostTable(host_launch_us=0.0, collective_sms=100)
    launched = launch(program, ranks=1, mode="ordering", cost=cost)
    assert launched.errors == [None]
    first, second = launched.trace.of_kind("exchange")
    assert first.t_us == second.t_us and first.line != second.line


@pytest.mark.parametrize("backend", ["nccl", "deepep_low_latency"])
def test_the_compiled_form_has_the_times_of_a_machine_without_it(backend: str) -> None:
    cost = CostTable(memory_bytes_per_us=1e18, link_bytes_per_us=1e18, op_us={"experts": 40.0})
    schedule = load_schedule("mlp_shared_overlap")
    compiled = compile_schedule(schedule, backend=backend, layers=2, cost=cost).replay(2).trace()
    job = LayerJob(schedule=schedule, backend=backend, ranks=2, layers=2)

    def times(trace: Trace) -> list[tuple[str, str, float]]:
        mine = [r for r in trace.records if r.rank == 0 and r.on_device and r.ubatch >= 0]
        return [(r.line, r.name, round(r.dur_us, 6)) for r in sorted(mine, key=lambda r: r.id)]

    plain, priced = (
        times(launch(layer_program(job), ranks=2, mode="ordering", cost=replace(cost, contention=on)).trace)
        for on in (False, True)
    )
    assert times(compiled) == plain
    longer = [name for (_, name, slow), (_, _, alone) in zip(priced, plain, strict=True) if slow > alone]
    assert bool(longer) is (backend == "nccl")


# -- only times ---------------------------------------------------------------------------------------------------------


def by_line(launched: SimRun) -> dict[tuple[int, str], list[tuple[Any, ...]]]:
    """What every line did, in order, with its edges in places on lines: numbers that no other line's speed changes."""
    place: dict[int, tuple[int, str, int]] = {}
    lines: dict[tuple[int, str], list[Record]] = {}
    for record in sorted(launched.trace.records, key=lambda r: r.id):
        line = lines.setdefault((record.rank, record.line), [])
        # A meeting's number is that of its first member, whoever that is.
        place[record.id] = (record.rank, record.line, -1 if record.kind == "meet" else len(line))
        line.append(record)
    return {
        key: [
            (r.kind, r.name, r.step, r.layer, r.ubatch, r.point, sorted(place[id] for id in r.after))
            for r in sorted(records, key=lambda r: (r.name if r.kind == "meet" else "", r.id))
        ]
        for key, records in lines.items()
    }


def but_times(launched: SimRun) -> list[tuple[Any, ...]]:
    """Every record in order of issue, with its edges and its bytes."""
    return [
        (r.id, r.rank, r.line, r.kind, r.name, r.step, r.layer, r.ubatch, r.point, r.after, r.reads, r.writes, r.src)
        for r in sorted(launched.trace.records, key=lambda r: r.id)
    ]


@pytest.mark.parametrize(("preset", "backend"), DECLARED)
def test_orders_edges_and_verdicts_are_those_of_a_run_without_it(preset: str, backend: str) -> None:
    job = Case(preset, backend).job()
    slowed, plain = run(job), run(job, cost=OFF)
    assert but_times(slowed) == but_times(plain)
    report = verdict_of(slowed)
    assert report == verdict_of(plain) and str(report.verdict) == "proved"
    priced = slowed.trace.canonical_bytes() != plain.trace.canonical_bytes()
    assert priced is (backend != "deepep_low_latency")


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_every_line_does_the_same_where_ranks_differ(backend: str) -> None:
    """Ranks may then issue in another order among each other, as they do under any other timing."""
    job = ordering_job(((9, 5), (7, 6), (3,)), backend=backend)
    slowed, plain = run(job), run(job, cost=OFF)
    assert by_line(slowed) == by_line(plain)
    assert str(verdict_of(slowed).verdict) == str(verdict_of(plain).verdict) == "proved"


def test_the_trace_stays_topological_and_its_lines_do_not_overlap() -> None:
    trace = run(ordering_job(backend="deepep_high_throughput", schedule="ascend_d0d1c0c1")).trace
    seen: set[int] = set()
    ends: dict[tuple[int, str], float] = {}
    slowed = 0
    for record in trace.records:
        assert seen >= set(record.after)
        seen.add(record.id)
        if record.on_device:
            assert record.t_us >= ends.get((record.rank, record.line), 0.0)
            ends[record.rank, record.line] = record.end_us
            slowed += record.kind == "op"
    assert slowed > 100


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_more_comm_sms_cost_the_compute_beside_them(backend: str) -> None:
    """What `--dbo-comm-sms` trades: the same split step, its compute longer with every SM that it loses."""
    spent = []
    for sms in (8, 20, 64):
        job = ordering_job(((8,), (8,)), backend=backend, new_tokens=1, dbo_comm_sms=sms)
        spent.append(sum(r.dur_us for r in run(job).trace.of_kind("op") if r.line == "compute" and r.ubatch >= 0))
    assert spent == sorted(spent) and spent[0] < spent[-1]
