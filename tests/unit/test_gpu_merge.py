"""One trace of what ranks left: ids, meetings, order."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

from dbo.check import HappensBefore
from dbo.errors import PeerFailed, StepDrift, UBatchError
from dbo.trace import Access, BufferInfo, Record
from gpu.launch import transport
from gpu.launch.merge import merge


@dataclass
class Part:
    records: list[Record]
    buffers: dict[int, BufferInfo] = field(default_factory=dict)
    meets: list[tuple[str, int]] = field(default_factory=list)


def part(rank, t_us, *, comes=True):
    """A rank that comes to one collective and goes on after it."""
    attrs = {"group": "dp.cpu", "index": 0, "op": "all_reduce"}
    first = Record(0, rank, "main", "collective", "all_reduce", t_us=t_us, attrs=attrs)
    after = Record(1, rank, "main", "step.end", "", t_us=t_us + 5, after=(-1,))
    return Part([first, after] if comes else [after], meets=[("dp.cpu", 0)])


def test_what_follows_a_meeting_follows_every_member():
    trace = merge([part(0, 10.0), part(1, 30.0), part(2, 20.0)], {"ranks": 3})
    happens = HappensBefore(trace)
    members = list(trace.of_kind("collective"))
    (meet,) = trace.of_kind("meet")
    assert meet.t_us == 30.0 and len({r.id for r in trace.records}) == 7
    for end in trace.of_kind("step.end"):
        assert all(happens.ordered(m.id, end.id) for m in members)
    assert trace.meta == {"ranks": 3}


def test_a_meeting_of_some_ranks_waits_for_no_other():
    parts = [part(rank, 10.0 * rank) for rank in range(4)]
    for rank, one in enumerate(parts):
        name = f"dcp{rank // 2}"
        one.records[0].attrs |= {"group": name, "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}
        one.meets[0] = (name, 0)
    trace = merge(parts, {})
    meets = {m.line: (m.t_us, m.attrs["members"]) for m in trace.of_kind("meet")}
    assert meets == {"dcp0": (10.0, [0, 1]), "dcp1": (30.0, [2, 3])}
    happens = HappensBefore(trace)
    by_rank = {r.rank: r.id for r in trace.of_kind("collective")}
    ends = {r.rank: r.id for r in trace.of_kind("step.end")}
    assert happens.ordered(by_rank[1], ends[0]) and not happens.ordered(by_rank[2], ends[0])


def test_a_meeting_that_somebody_missed_is_none():
    trace = merge([part(0, 10.0), part(1, 30.0, comes=False)], {})
    assert list(trace.of_kind("meet")) == [] and all(r.after == () for r in trace.records)
    HappensBefore(trace)


def test_a_rank_that_left_nothing_has_no_records():
    trace = merge([None, part(1, 30.0)], {})
    assert {r.rank for r in trace.records} == {1}


def test_buffers_keep_their_rank():
    parts = [part(0, 1.0), part(1, 2.0)]
    for rank, one in enumerate(parts):
        one.buffers[0] = BufferInfo(0, rank, "result", 8)
        one.records[1].writes = (Access.interval(0, 0, 8),)
    trace = merge(parts, {})
    ends = {r.rank: r.writes[0].buffer for r in trace.of_kind("step.end")}
    assert {trace.buffers[number].rank for number in ends.values()} == {0, 1}
    assert trace.buffers[ends[1]].rank == 1


def test_errors_travel_whatever_their_arguments(tmp_path):
    cause = ValueError("planted")
    error = UBatchError(rank=1, ubatch=0, cause=cause)
    drift = StepDrift([3, 4])
    transport.write(tmp_path / "left", {"errors": [error, drift, PeerFailed(2, "gone")]})
    first, second, third = transport.read(tmp_path / "left")["errors"]
    assert isinstance(first, UBatchError) and (first.rank, first.ubatch, str(first)) == (1, 0, str(error))
    assert isinstance(first.__cause__, ValueError) and first.__cause__.args == ("planted",)
    assert isinstance(second, StepDrift) and second.steps == [3, 4]
    assert isinstance(third, PeerFailed) and third.rank == 2
    assert transport.read(tmp_path / "nothing") is None


def test_an_error_that_cannot_travel_leaves_its_text():
    class Local(Exception):
        pass

    sent = transport.sendable(Local("of this function"))
    assert isinstance(sent, transport.RankError) and str(sent) == "Local: of this function"
    assert isinstance(pickle.loads(transport.dumps(sent)), transport.RankError)


@dataclass
class Leaves:
    """What a rank leaves, as far as sending it goes."""

    value: object = None
    error: BaseException | None = None


def test_a_value_that_cannot_be_sent_is_an_error_that_says_so():
    sent = transport.sendable_left(Leaves(value=lambda: None))
    assert sent.value is None and "is pickled for the launcher: type=function" in str(sent.error)
    pickle.loads(transport.dumps(sent))
    assert transport.sendable_left(Leaves(value=3)) == Leaves(value=3)
