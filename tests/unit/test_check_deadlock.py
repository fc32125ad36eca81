"""deadlock and the wait-for report."""

from __future__ import annotations

import pytest

from dbo.check import deadlock
from dbo.check.happens import HappensBefore
from dbo.check.waitfor import Waiter, minimal_stuck_set, report
from dbo.errors import UsageError
from tests.unit.trace_builder import TraceBuilder


def wait(rank: int, line: str, *needs: tuple[int, str], any_of: bool = False, **rest: object) -> Waiter:
    return Waiter(rank=rank, line=line, what="something", needs=needs, any_of=any_of, **rest)  # type: ignore[arg-type]


def nodes(waiters: list[Waiter]) -> list[tuple[int, str]]:
    return [w.node for w in minimal_stuck_set(waiters)]


def test_a_cycle_is_the_stuck_set_and_those_behind_it_are_left_out() -> None:
    a, b = wait(0, "u0", (0, "u1")), wait(0, "u1", (0, "u0"))
    behind = wait(0, "main", (0, "u0"), (0, "u1"))
    assert nodes([behind, a, b]) == [(0, "u0"), (0, "u1")]


def test_a_need_that_has_ended_makes_one_waiter_stuck() -> None:
    a, b = wait(0, "comm", (1, "main")), wait(0, "main", (0, "comm"))
    assert nodes([a, b]) == [(0, "comm")]


def test_any_of_is_stuck_only_when_all_of_its_needs_are() -> None:
    x = wait(0, "x", (0, "y"), (0, "z"), any_of=True)
    y, z = wait(0, "y", (0, "x")), wait(0, "z", (0, "x"))
    assert nodes([x, y, z]) == [(0, "x"), (0, "y"), (0, "z")]
    assert minimal_stuck_set([x, y], running=[(0, "z")]) == (), "z still runs and can serve x"
    assert nodes([x, y]) == [(0, "x"), (0, "y")], "z has ended"


def test_all_of_is_stuck_although_another_need_still_runs() -> None:
    x, y = wait(0, "x", (0, "y"), (0, "z")), wait(0, "y", (0, "x"))
    core = minimal_stuck_set([x, y], running=[(0, "z")])
    assert [w.line for w in core] == ["x", "y"]
    assert "no line is stuck" in report([wait(0, "x", (0, "z"))], running=[(0, "z")])


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_set_is_minimal_in_a_ring_with_a_shortcut(size: int) -> None:
    ring = [wait(r, "main", ((r + 1) % size, "main")) for r in range(size)]
    assert len(nodes(ring)) == size
    short = [*ring[1:], wait(0, "main", (1, "main"), (size - 1, "main"))]
    assert nodes(short) == ([(0, "main"), (size - 1, "main")] if size > 2 else [(0, "main"), (1, "main")])


def test_a_report_names_ranks_ubatch_point_group_and_who_is_missing() -> None:
    text = report(
        [
            wait(
                0,
                "comm",
                (1, "main"),
                ubatch=1,
                point="D.send",
                layer=3,
                step=2,
                head="dispatch",
                group="ep",
                index=17,
                missing=(1,),
                mismatch="SIZE_OR_SHAPE_MISMATCH",
            ),
            wait(0, "u1", (0, "comm"), ubatch=1),
        ]
    )
    for word in ("rank 0 comm (u1)", "missing rank 1", "D.send", "layer 3", "stream head dispatch", "group ep #17"):
        assert word in text
    assert "main of rank 1 ended and will not act" in text
    assert "SIZE_OR_SHAPE_MISMATCH" in text and "1 more line waits behind" in text


def test_a_trace_without_blocked_records_is_silent_and_counts_its_stops() -> None:
    b = TraceBuilder()
    b.add("yield", "u0", to=1, index=0)
    b.add("resume", "u1", index=0)
    found = deadlock.detect(b.trace, HappensBefore(b.trace))
    assert (found.checked, found.violations) == (2, [])


def test_blocked_records_become_one_violation_at_the_culprit() -> None:
    b = TraceBuilder(ranks=2, complete=False)
    b.add("blocked", "main", waits_for={"what": "the step", "needs": [[0, "u0"]]})
    stuck = b.add(
        "blocked",
        "u0",
        ubatch=0,
        step=4,
        point="D.recv",
        rank=0,
        waits_for={"what": "dispatch", "needs": [[1, "u0"]], "missing": [1], "group": "ep", "index": 3},
    )
    (violation,) = deadlock.detect(b.trace, HappensBefore(b.trace)).violations
    assert (violation.id, violation.rank, violation.ubatch, violation.step) == ("deadlock", 0, 0, 4)
    assert violation.records == (stuck,) and "missing rank 1" in violation.sentence


@pytest.mark.parametrize("waits_for", [{"needs": []}, {"what": "x"}, {"what": "x", "needs": [], "colour": 1}])
def test_a_blocked_record_without_its_fields_is_refused(waits_for: dict[str, object]) -> None:
    b = TraceBuilder(complete=False)
    b.add("blocked", "main", waits_for=waits_for)
    with pytest.raises(UsageError, match="waits_for holds"):
        deadlock.detect(b.trace, HappensBefore(b.trace))
