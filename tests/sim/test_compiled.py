"""The compiled form of a schedule against runs of the real ring: the same operations, edges, order, times and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dbo.check import HappensBefore, judge, stream_race
from dbo.errors import ScheduleError, UsageError
from dbo.job.layer import LayerJob, layer_program
from dbo.schedule import Schedule, load_schedule, parse_schedule, presets
from dbo.trace import Record, Trace
from sim.compiled.program import CompiledSchedule, compile_schedule, devices_only
from sim.compiled.race import find_races
from sim.compiled.run import meeting_us
from sim.cost import CostTable
from sim.world import launch

PAIRS = [(name, backend) for name, s in presets().items() for backend in s.backends]
# On it no duration depends on how many rows go to which rank.
BYTES_ARE_FREE = CostTable(
    memory_bytes_per_us=1e18,
    link_bytes_per_us=1e18,
    high_throughput_bytes_per_us_sm={"dispatch": 1e18, "combine": 1e18},
    high_throughput_bytes_per_us={"dispatch": 1e18, "combine": 1e18},
    elastic_bytes_per_us_sm=1e18,
    elastic_bytes_per_us=1e18,
    copy_engine_bytes_per_us=1e18,
    op_us={"experts": 40.0, "attention": 25.0},
)


def _real(
    schedule: Schedule, backend: str, *, ranks: int, layers: int, num_ubatches: int = 2, cost: CostTable | None = None
) -> Trace:
    job = LayerJob(schedule=schedule, backend=backend, ranks=ranks, layers=layers, num_ubatches=num_ubatches)
    run = launch(layer_program(job), ranks=ranks, mode="ordering", cost=devices_only(cost or CostTable()))
    assert not run.deadlocked and not any(run.errors), run.errors
    return run.trace


def _program_of(trace: Trace, rank: int) -> tuple[list[Record], list[Record]]:
    """The device records of one rank in order of issue, and all meetings."""
    records = [r for r in trace.records if r.rank == rank and r.on_device]
    return sorted(records, key=lambda r: r.id), [r for r in trace.records if r.kind == "meet"]


def _said(records: Sequence[Record], meetings: Sequence[Record]) -> list[tuple[object, ...]]:
    """Records with edges in numbers that do not depend on ids: places of operations, names of meetings."""
    place = {r.id: i for i, r in enumerate(records)}
    name = {r.id: r.name for r in meetings}
    said = []
    for r in records:
        after = sorted(str(place.get(id, name.get(id))) for id in r.after if id in place or id in name)
        said.append((r.line, r.kind, r.name, r.point, r.ubatch, max(r.layer, -1), after))
    return said


def _members(records: Sequence[Record], meetings: Sequence[Record]) -> dict[str, int]:
    """Which of the rank's operations joins which meeting."""
    place = {r.id: i for i, r in enumerate(records)}
    return {m.name: place[id] for m in meetings for id in m.after if id in place}


@pytest.mark.parametrize(("name", "backend"), PAIRS)
@pytest.mark.parametrize(("ranks", "cost"), [(2, CostTable()), (4, BYTES_ARE_FREE)], ids=["as recorded", "four ranks"])
def test_a_compiled_schedule_is_what_the_real_ring_issues(name: str, backend: str, ranks: int, cost: CostTable) -> None:
    schedule = load_schedule(name)
    real = _real(schedule, backend, ranks=ranks, layers=2, cost=cost)
    compiled = compile_schedule(schedule, backend=backend, layers=2, cost=cost).replay(ranks).trace()
    for rank in range(ranks):
        ours, our_meetings = _program_of(compiled, rank)
        theirs, their_meetings = _program_of(real, rank)
        assert _said(ours, our_meetings) == _said(theirs, their_meetings)
        assert _members(ours, our_meetings) == _members(theirs, their_meetings)
        assert [r.dur_us for r in ours] == pytest.approx([r.dur_us for r in theirs])
        assert [r.t_us for r in ours] == pytest.approx([r.t_us for r in theirs])
        if ranks == 2:
            _assert_same_arrays(ours, theirs)
    assert _order(compiled) == _order(real)


def _order(trace: Trace) -> list[tuple[int, ...]]:
    """For each device operation, of each rank, those that happen before it."""
    happens = HappensBefore(trace)
    place = {r.id: (rank, i) for rank in range(trace.meta["ranks"]) for i, r in enumerate(_program_of(trace, rank)[0])}
    ids = sorted(place, key=lambda id: place[id])
    return [tuple(i for i, a in enumerate(ids) if happens.ordered(a, b)) for b in ids]


@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_v2"])
def test_what_the_host_launches_after_a_wait_follows_what_it_waited_for(backend: str) -> None:
    """Without the wait, the order is another one than the real ring's: the comparison above sees host waits."""
    schedule = load_schedule("mlp_shared_overlap")
    program = compile_schedule(schedule, backend=backend, layers=1)
    waits = {place for place, op in enumerate(program.ops) if op.line == "main"}
    assert waits
    ops = tuple(replace(op, after=tuple(a for a in op.after if a not in waits)) for op in program.ops)
    assert _order(replace(program, ops=ops).replay(2).trace()) != _order(_real(schedule, backend, ranks=2, layers=1))


def test_three_ubatches_are_compiled_too() -> None:
    schedule = load_schedule("vllm_high_throughput")
    real = _real(schedule, "nccl", ranks=3, layers=2, num_ubatches=3)
    compiled = compile_schedule(schedule, backend="nccl", num_ubatches=3, layers=2).replay(3).trace()
    assert _said(*_program_of(compiled, 2)) == _said(*_program_of(real, 2))


def _assert_same_arrays(ours: Sequence[Record], theirs: Sequence[Record]) -> None:
    """Operations touch arrays in the same pattern: one array there for each here, and the other way round."""
    forth: dict[int, int] = {}
    back: dict[int, int] = {}
    for a, b in zip(ours, theirs, strict=True):
        for mine, real in ((a.reads, b.reads), (a.writes, b.writes)):
            mine_ids, real_ids = {x.buffer for x in mine}, {x.buffer for x in real}
            assert len(mine_ids) == len(real_ids), (a, b)
            for x, y in zip(_in_order(mine), _in_order(real), strict=True):
                assert forth.setdefault(x, y) == y and back.setdefault(y, x) == x, (a, b)


def _in_order(accesses: Sequence) -> list[int]:
    return list(dict.fromkeys(access.buffer for access in accesses))


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_no_preset_races_in_the_compiled_form(name: str, backend: str) -> None:
    program = compile_schedule(load_schedule(name), backend=backend, layers=4)
    assert find_races(program) == ()
    assert not judge(program.replay(3).trace(), detectors=[stream_race]).violations


@pytest.mark.parametrize(("name", "backend"), PAIRS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_collapsed_clocks_agree_with_full_ones_for_every_dropped_edge(name: str, backend: str, ranks: int) -> None:
    """Every wait, every transfer's send and every meeting is dropped in turn; both judges must agree."""
    program = compile_schedule(load_schedule(name), backend=backend, layers=2)
    racy = 0
    for mutant in _without_one_edge(program):
        quick = {(r.first, r.second, r.same_rank) for r in mutant.replay(ranks).races}
        full = judge(mutant.replay(ranks).trace(), detectors=[stream_race]).violations
        assert bool(quick) == bool(full), (quick, [v.sentence for v in full])
        racy += bool(quick)
    assert racy > 0


def _without_one_edge(program: CompiledSchedule) -> list[CompiledSchedule]:
    mutants = []
    for index, op in enumerate(program.ops):
        for change in ({"after": ()} if op.after else None, {"follows": -1} if op.follows >= 0 else None):
            if change is not None:
                ops = (*program.ops[:index], replace(op, **change), *program.ops[index + 1 :])
                mutants.append(replace(program, ops=ops))
    return mutants


def test_a_race_between_two_ranks_is_told_from_one_within_a_rank() -> None:
    program = compile_schedule(load_schedule("mlp_shared_overlap"), backend="deepep_low_latency", layers=1)
    receive = next(i for i, op in enumerate(program.ops) if op.kind == "recv")
    ops = (*program.ops[:receive], replace(program.ops[receive], follows=-1), *program.ops[receive + 1 :])
    races = find_races(replace(program, ops=ops))
    assert (receive, False) in {(race.second, race.same_rank) for race in races}
    assert {race.array for race in races} == {"low_latency.recv0"}


def test_one_rank_has_no_other_rank_to_race_with() -> None:
    program = compile_schedule(load_schedule("mlp_shared_overlap"), backend="deepep_low_latency", layers=1)
    receive = next(i for i, op in enumerate(program.ops) if op.kind == "recv")
    ops = (*program.ops[:receive], replace(program.ops[receive], follows=-1), *program.ops[receive + 1 :])
    alone, two = replace(program, ops=ops).replay(1), replace(program, ops=ops).replay(2)
    assert {race.same_rank for race in alone.races} == {True} and len(alone.races) < len(two.races)


def test_a_straggler_moves_times_and_not_the_order() -> None:
    program = compile_schedule(load_schedule("mlp_shared_overlap"), backend="nccl", layers=2)
    even, late = program.replay(4), program.replay(4, slowdown=[1, 1, 1, 3])
    assert late.makespan_us > even.makespan_us
    assert np.allclose(even.start_us, even.start_us[:, :1])
    # Until the first meeting only the straggler is late; what follows it starts together.
    meeting = next(i for i, op in enumerate(program.ops) if op.follows >= 0)
    assert np.ptp(late.start_us[meeting]) == 0 and np.ptp(late.start_us[1]) > 0
    assert [r.after for r in late.trace().records] == [r.after for r in even.trace().records]


def test_a_thousand_ranks_cost_no_more_operations() -> None:
    program = compile_schedule(load_schedule("mlp_shared_overlap"), backend="deepep_low_latency", layers=1)
    run = program.replay(1024)
    assert run.start_us.shape == (len(program.ops), 1024) and run.races == ()


def test_a_schedule_of_ones_own_is_compiled() -> None:
    text = "schedule late\nbackends nccl\nlayer A0 A1 D.send@comm S | D.recv MLP | C.send@comm | C.recv\n"
    schedule = parse_schedule(text)
    real = _real(schedule, "nccl", ranks=2, layers=2)
    compiled = compile_schedule(schedule, backend="nccl", layers=2).replay(2).trace()
    assert _said(*_program_of(compiled, 0)) == _said(*_program_of(real, 0))


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deepep_low_latency"):
        compile_schedule(load_schedule("sglang_prefill"), backend="deepep_low_latency")
    program = compile_schedule(load_schedule("sglang_prefill"), backend="nccl")
    with pytest.raises(UsageError, match="ranks=0"):
        program.replay(0)
    with pytest.raises(UsageError, match="ranks=3"):
        program.replay(3, slowdown=[1.0])


def test_who_comes_last_to_a_meeting_of_others_waits_for_the_one_before() -> None:
    ends = np.array([1.0, 5.0, 3.0])
    assert np.array_equal(meeting_us(ends, of_others=True), [5.0, 3.0, 5.0])
    assert meeting_us(ends, of_others=False) == 5.0
    assert meeting_us(ends[:1], of_others=True) == [0.0]
