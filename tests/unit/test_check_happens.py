"""Vector clocks against the transitive closure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.check.happens import HappensBefore
from dbo.errors import UsageError
from dbo.trace import Record, Trace
from tests.unit.trace_builder import TraceBuilder


def closure(trace: Trace) -> dict[int, set[int]]:
    """Everything before each record: slow and obvious."""
    before: dict[int, set[int]] = {}
    last: dict[tuple[int, str], int] = {}
    for record in trace.records:
        direct = set(record.after)
        if record.rank >= 0 and (record.rank, record.line) in last:
            direct.add(last[record.rank, record.line])
        before[record.id] = direct.union(*(before[x] for x in direct))
        last[record.rank, record.line] = record.id
    return before


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    ranks = draw(st.integers(1, 4))
    lines = draw(st.integers(1, 4))
    size = draw(st.integers(0, 30))
    ids = draw(st.permutations(range(size)))
    trace = Trace()
    for at in range(size):
        count = draw(st.sampled_from([0, 0, 1, 1, 2, 4, 12]))
        after = draw(st.lists(st.sampled_from(ids[:at]), max_size=count)) if at else []
        rank, line = draw(st.integers(-1, ranks - 1)), draw(st.integers(0, lines - 1))
        name = ("compute", "comm", "u0", "u1")[line]
        trace.records.append(Record(id=ids[at], rank=rank, line=name, kind="op", name="x", after=tuple(after)))
    return trace


@settings(max_examples=150, deadline=None)
@given(traces())
def test_clocks_equal_the_transitive_closure(trace: Trace) -> None:
    happens, before = HappensBefore(trace), closure(trace)
    for a in before:
        for b in before:
            assert happens.ordered(a, b) == (a in before[b]), (a, b)


def test_members_of_a_collective_share_one_clock() -> None:
    b = TraceBuilder(ranks=8)
    arrivals = [b.op("arrive", rank=r) for r in range(8)]
    hosts = [b.add("point", "u0", rank=r) for r in range(8)]
    leaves = [b.op("leave", rank=r, after=[hosts[r], *arrivals]) for r in range(8)]
    happens = HappensBefore(b.trace)
    assert len(happens._arrays) == 2, "the empty clock and one join for all members"
    assert all(happens.ordered(a, leave) for a in arrivals for leave in leaves)
    assert not happens.ordered(hosts[0], leaves[1])


def test_missing_edge_names_the_event_that_nobody_waited_for() -> None:
    b = TraceBuilder()
    write = b.op("A1", ubatch=0)
    b.add("record", "compute", event="compute_done")
    read = b.op("D.send", line="comm", ubatch=0)
    words = HappensBefore(b.trace).missing_edge(write, read)
    for word in ("no wait on event compute_done", "A1", "D.send", "comm of rank 0"):
        assert word in words


def test_issuer_is_the_host_record_and_not_a_stream() -> None:
    b = TraceBuilder()
    host = b.add("point", "u0")
    mark = b.add("record", "comm")
    op = b.op("x", after=[host, mark])
    happens = HappensBefore(b.trace)
    found = happens.issuer(happens.record(op))
    assert found is not None and found.id == host
    assert happens.issuer(happens.record(mark)) is None


@pytest.mark.parametrize("after", [[5], [0]])
def test_an_edge_that_does_not_point_backwards_is_refused(after: list[int]) -> None:
    trace = Trace(records=[Record(id=0, rank=0, line="main", kind="op", name="x", after=tuple(after))])
    with pytest.raises(UsageError, match="earlier record"):
        HappensBefore(trace)
