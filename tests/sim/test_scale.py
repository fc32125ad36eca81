"""Many ranks: the real code in ordering mode, and every input of the coordination. Times are for `dbo bench sim`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dbo.batch.coordinate import decide
from dbo.bench.coordination import CLASSES, COMMON, MIXED, SMALL, UNIFORM, cases, judge, judge_all
from dbo.check import HappensBefore, stream_race
from dbo.check import judge as judge_trace
from dbo.check.phases import in_phases
from dbo.errors import DBOError
from dbo.job.layer import LayerJob, layer_program
from dbo.schedule import load_schedule
from dbo.trace import Access, Record, Trace
from sim.world import launch


@pytest.mark.parametrize(("ranks", "backend"), [(256, "deepep_low_latency"), (96, "nccl")])
def test_hundreds_of_ranks_run_and_are_race_checked(ranks: int, backend: str) -> None:
    job = LayerJob(schedule=load_schedule("mlp_shared_overlap"), backend=backend, ranks=ranks)
    run = launch(layer_program(job), ranks=ranks, mode="ordering")
    assert not any(run.errors) and not run.deadlocked
    report = judge_trace(run.trace, detectors=[stream_race])
    assert report.violations == () and report.checked["stream-race"] > 20 * ranks


def test_tasks_that_start_each_other_do_not_add_up_their_depth() -> None:
    """Each of many greenlets makes its successor run: with nested starts this passes the recursion limit."""
    ranks = 400

    def program(world):
        world.control.all_gather_object(world.rank)
        return _deep(20)

    run = launch(program, ranks=ranks, mode="ordering")
    assert run.values == [20] * ranks


def _deep(levels: int) -> int:
    return 0 if levels == 0 else 1 + _deep(levels - 1)


@pytest.mark.parametrize(("ranks", "count"), [(2, 10), (8, 165), (16, 969)])
def test_every_input_of_the_coordination_keeps_its_promises(ranks: int, count: int) -> None:
    assert judge_all(ranks) == count


def test_the_inputs_reach_every_kind_of_decision() -> None:
    kinds = set()
    for columns in cases(4):
        decision = decide(np.stack([c.to_array() for c in columns], axis=1), COMMON)
        kinds.add((decision.split, decision.cudagraph_mode, decision.all_idle))
    assert kinds == {
        (True, "NONE", False),
        (True, "FULL", False),
        (False, "NONE", False),
        (False, "FULL", False),
        (False, "NONE", True),
    }


def test_renamed_ranks_get_the_same_decision() -> None:
    """What makes one table a multiset enough."""
    for columns in cases(4):
        table = np.stack([c.to_array() for c in columns], axis=1)
        first = decide(table, COMMON)
        for shift in range(1, 4):
            renamed = decide(np.roll(table, shift, axis=1), COMMON)
            turned = tuple(np.roll(first.num_tokens_padded, shift).tolist())
            assert replace(renamed, reason="", num_tokens_padded=turned) == replace(
                first, reason="", num_tokens_padded=turned
            )
            assert renamed.num_tokens_padded == turned and bool(renamed.reason) == bool(first.reason)


@pytest.mark.parametrize(
    ("columns", "change", "rule"),
    [
        ((MIXED, SMALL), {"split": True, "split_points": (20,), "num_tokens_padded": (40, 40)}, "every rank votes"),
        ((MIXED, MIXED), {"split_points": (40,), "num_tokens_padded": (48, 48)}, "no ubatch is empty"),
        ((MIXED, MIXED), {"num_tokens_padded": (40, 48)}, "equally many rows"),
        ((MIXED, UNIFORM), {"num_tokens_padded": (24, 24)}, "padding never drops a token"),
        ((MIXED, UNIFORM), {"cudagraph_mode": "FULL"}, "where every busy rank wants one"),
        ((UNIFORM, UNIFORM), {"num_tokens_padded": (24, 24)}, "a captured size"),
        ((SMALL, SMALL), {"reason": ""}, "has a reason"),
        ((SMALL, SMALL), {"all_idle": True}, "exactly when nobody has work"),
    ],
)
def test_a_wrong_decision_is_noticed(columns: tuple, change: dict, rule: str) -> None:
    decision = decide(np.stack([c.to_array() for c in columns], axis=1), COMMON)
    judge(columns, decision, COMMON)
    with pytest.raises(DBOError, match=rule):
        judge(columns, replace(decision, **change), COMMON)


def test_the_classes_are_four() -> None:
    assert len(set(CLASSES)) == 4


# -- phases: the quick way to see that nothing races ------------------------------------------------------------------


def _window_trace(ranks: int, *, meets: bool = True, wide: bool = False) -> Trace:
    """Twice: every rank writes its region of every buffer, all meet, every rank reads its own buffer, all meet."""
    trace = Trace(meta={"complete": True})
    last: list[int] = [-1] * ranks

    def add(rank: int, line: str, kind: str, after: tuple[int, ...], **accesses) -> int:
        id = len(trace.records)
        trace.records.append(Record(id, rank, line, kind, kind, after=tuple(a for a in after if a >= 0), **accesses))
        return id

    for _ in range(2):
        writes = []
        for rank in range(ranks):
            region = Access(0, rank * 8, (ranks, 16 if wide and rank == 2 else 8), (ranks * 8, 1))
            writes.append(add(rank, "net", "transfer", (last[rank],), writes=(region,)))
        meet = add(-1, "g", "meet", tuple(writes) if meets else tuple(writes[:-1]))
        reads = [
            add(rank, "compute", "recv", (meet,), reads=(Access.interval(0, rank * ranks * 8, (rank + 1) * ranks * 8),))
            for rank in range(ranks)
        ]
        second = add(-1, "g", "meet", tuple(reads))
        last = [second] * ranks
    return trace


def test_a_window_of_many_ranks_falls_into_phases() -> None:
    trace = _window_trace(12)
    assert in_phases(_uses(trace), HappensBefore(trace))
    assert not judge_trace(trace, detectors=[stream_race]).violations


@pytest.mark.parametrize("change", [{"meets": False}, {"wide": True}])
def test_a_race_in_a_window_is_not_hidden_by_phases(change: dict) -> None:
    """One writer that the meeting forgot; one region that is too wide."""
    trace = _window_trace(12, **change)
    assert not in_phases(_uses(trace), HappensBefore(trace))
    assert judge_trace(trace, detectors=[stream_race]).violations


def _uses(trace: Trace) -> list:
    return [
        stream_race._use(access, writes, record)
        for record in trace.records
        for writes, accesses in ((False, record.reads), (True, record.writes))
        for access in accesses
    ]
