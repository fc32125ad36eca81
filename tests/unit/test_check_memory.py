"""Detectors of collectives and of memory: collective-mismatch, stream-race, buffer-reuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from dbo.check import buffer_reuse, stream_race
from dbo.check.happens import HappensBefore
from dbo.trace import Access, Trace
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_queries import found, named, only
from tests.unit.trace_step import low_latency_run

GOOD = low_latency_run(ranks=2, layers=3)


@pytest.fixture
def run() -> Trace:
    return copy.deepcopy(GOOD)


# -- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [("op", "all_gather"), ("shape", [7, 3]), ("dtype", "int64"), ("tag", 4)])
def test_the_first_field_that_differs_is_named(run: Trace, field: str, value: Any) -> None:
    only(run, "collective", rank=1).attrs[field] = value
    violation = named(run, "collective-mismatch")
    assert violation.rank == 1 and f"differs in {field}" in violation.sentence and "control #0" in violation.sentence


def test_swapped_collectives_are_reported_once_at_the_first_index_with_the_odd_rank() -> None:
    b = TraceBuilder(ranks=3)
    for rank in range(3):
        for index, op in enumerate(["a", "b"] if rank != 1 else ["b", "a"]):
            b.add(
                "collective",
                "comm",
                op,
                rank=rank,
                group="ep",
                index=index,
                op=op,
                shape=[1],
                dtype="f",
                tag=0,
                ranks=3,
            )
    (violation,) = found(b.trace, "collective-mismatch")
    assert violation.rank == 1 and "ep #0 differs in op" in violation.sentence


@pytest.mark.parametrize("ranks", [3, [0, 1, 2]])
def test_a_member_that_never_comes_is_named_unless_the_run_was_cut(ranks: Any) -> None:
    b = TraceBuilder(ranks=3)
    for rank in (0, 2):
        b.add("collective", "main", rank=rank, group="ep", index=0, op="a", shape=[1], dtype="f", tag=0, ranks=ranks)
    (violation,) = found(b.trace, "collective-mismatch")
    assert violation.rank == 1 and "never sees rank 1" in violation.sentence
    b.trace.meta["complete"] = False
    assert found(b.trace, "collective-mismatch") == [], "the deadlock report names who is missing"


@pytest.mark.parametrize("named_epoch", [True, False])
def test_a_new_epoch_counts_from_zero_again(named_epoch: bool) -> None:
    """Rank 1 failed before its second call; both restart."""
    b = TraceBuilder(ranks=2)
    for epoch, rank, index, op in [
        (0, 0, 0, "a"),
        (0, 1, 0, "a"),
        (0, 0, 1, "b"),
        (1, 0, 0, "c"),
        (1, 1, 0, "c"),
        (1, 1, 1, "d"),
        (1, 0, 1, "d"),
    ]:
        extra = {"epoch": epoch} if named_epoch else {}
        b.add(
            "collective",
            "main",
            rank=rank,
            group="ep",
            index=index,
            op=op,
            shape=[1],
            dtype="f",
            tag=0,
            ranks=2,
            **extra,
        )
    b.trace.meta["complete"] = False
    assert found(b.trace, "collective-mismatch") == []


# -- memory ---------------------------------------------------------------------------------------------------------


def two_streams(wait: bool = True, *, read: Access | None = None) -> Trace:
    b = TraceBuilder()
    x = b.buffer("x", 64)
    host = b.add("point", "main")
    b.op("A1", writes=[x], src="model.py:12", after=[host])
    mark = b.add("record", "compute", event="compute_done", after=[host])
    if wait:
        b.add("wait", "comm", event="compute_done", after=[host, mark])
    b.op("dispatch", line="comm", reads=[read._replace(buffer=x) if read else x], src="ep.py:7", after=[host])
    return b.trace


def test_a_missing_wait_is_a_race_with_both_lines_and_the_missing_edge() -> None:
    assert found(two_streams(), "stream-race") == []
    violation = named(two_streams(wait=False), "stream-race")
    for words in ("model.py:12", "ep.py:7", "no wait on event compute_done", "x of rank 0"):
        assert words in violation.sentence
    assert violation.records == (3, 1)


def test_a_race_needs_common_bytes() -> None:
    columns = Access(0, 0, (4, 4), (16, 1))
    assert len(found(two_streams(wait=False, read=columns), "stream-race")) == 1
    assert found(two_streams(wait=False, read=Access.interval(0, 64, 70)), "stream-race") == []


def test_a_write_after_a_read_races_too_although_a_later_read_is_ordered() -> None:
    b = TraceBuilder()
    x = b.buffer("x")
    b.op("read early", line="comm", reads=[x])
    b.op("read", line="compute", reads=[x])
    b.op("write", line="compute", writes=[x])
    (violation,) = found(b.trace, "stream-race")
    assert violation.records == (2, 0)


def test_every_wait_of_a_run_is_needed() -> None:
    """Remove each edge into a receive or an op of another line in turn: the race shows where the bytes do."""
    meets = [r for r in GOOD.records if r.kind == "recv"]
    for recv in meets:
        run = copy.deepcopy(GOOD)
        (mine,) = [r for r in run.records if r.id == recv.id]
        mine.after = mine.after[1:]
        assert any(recv.id in v.records for v in stream_race.detect(run, HappensBefore(run)).violations)


def test_low_latency_calls_alternate_buffers_and_leave_one_receive_pending(run: Trace) -> None:
    only(run, "send", rank=1, call=2).attrs["buffer"] = 1
    (violation,) = found(run, "buffer-reuse")
    assert violation.rank == 1 and "call 2" in violation.sentence and "uses buffer 1" in violation.sentence


def calls(*halves: str) -> Trace:
    b = TraceBuilder()
    for half in halves:
        kind, call = ("send", int(half[1:])) if half[0] == "s" else ("recv", int(half[1:]))
        b.add(kind, "compute", call=call, buffer=call % 2, op="dispatch", ubatch=call % 2, rows=1, real=1)
    return b.trace


def test_a_send_before_the_pending_receive_is_named() -> None:
    assert found(calls("s0", "r0", "s1", "r1", "s2", "r2"), "buffer-reuse") == []
    (violation,) = found(calls("s0", "s1", "r0", "r1"), "buffer-reuse")
    assert violation.ubatch == 1 and "call 1" in violation.sentence and "2 calls outstanding" in violation.sentence
    restart = found(calls("s0", "r0", "s0", "r0"), "buffer-reuse")
    assert restart == [], "a new epoch begins at buffer 0"


def test_a_third_result_held_is_named() -> None:
    b = TraceBuilder()
    out = [b.buffer(f"out{k}") for k in range(3)]
    for call in range(3):
        common = {"call": call, "buffer": call % 2, "op": "dispatch"}
        b.add("send", "compute", ubatch=call % 2, rows=1, real=1, **common)
        b.add("recv", "compute", ubatch=call % 2, writes=[out[call]], **common)
    b.op("MLP", reads=[out[1]], ubatch=1)
    assert found(b.trace, "buffer-reuse") == []
    b.op("MLP", reads=[out[0]], ubatch=0)
    (violation,) = found(b.trace, "buffer-reuse")
    assert violation.ubatch == 0 and "at most two results" in violation.sentence


def workspace(order: str, *, key: Callable[[int], Any] = lambda b: b) -> Trace:
    """W written by u0 and u1, read by u0; `order` says in which order on one stream."""
    b = TraceBuilder()
    w = b.buffer("W")
    for step in order.split():
        if step == "r0":
            b.op("experts", ubatch=0, reads=[w], expects={key(w): ["u0", 3]})
        else:
            b.op("dispatch", ubatch=int(step[1]), writes=[w], tags={key(w): [f"u{step[1]}", 3]})
    return b.trace


@pytest.mark.parametrize("key", [int, str], ids=["live", "read back"])
def test_a_read_of_somebody_elses_bytes_is_named_although_ordered(key: Callable[[int], Any]) -> None:
    assert found(workspace("w0 r0 w1", key=key), "buffer-reuse") == []
    violation = named(workspace("w0 w1 r0", key=key), "buffer-reuse")
    assert violation.ubatch == 0 and "expects u0/3 in W and finds u1/3" in violation.sentence


def test_a_missing_wait_on_tagged_bytes_is_a_race_and_nothing_else() -> None:
    b = TraceBuilder()
    w = b.buffer("W")
    b.op("dispatch", writes=[w], tags={w: 1})
    b.op("dispatch", writes=[w], tags={w: 2})
    b.op("experts", line="comm", reads=[w], expects={w: 2}, after=[0])
    assert found(b.trace, "buffer-reuse") == [] and len(found(b.trace, "stream-race")) == 1


def test_a_buffer_of_one_ubatch_is_not_for_the_other() -> None:
    b = TraceBuilder()
    slot = b.buffer("slot0", owner="u0")
    b.op("build", ubatch=0, writes=[slot])
    assert found(b.trace, "buffer-reuse") == []
    b.op("build", ubatch=1, writes=[slot])
    (violation,) = found(b.trace, "buffer-reuse")
    assert violation.ubatch == 1 and "belongs to u0" in violation.sentence


def test_work_launched_after_a_free_is_named_and_work_queued_before_is_not() -> None:
    b = TraceBuilder()
    x = b.buffer("x")
    host = b.add("point", "main")
    b.op("queued before", reads=[x], after=[host], id=b.skip_ids(1))
    freed = b.add("free", "main", buffer=x)
    b.op("also queued before", reads=[x], after=[host])
    assert found(b.trace, "buffer-reuse") == []
    b.op("replay", reads=[x], after=[freed], ubatch=1)
    (violation,) = found(b.trace, "buffer-reuse")
    assert violation.ubatch == 1 and "which was freed" in violation.sentence
    assert buffer_reuse.detect(b.trace, HappensBefore(b.trace)).checked == 3


def test_a_free_on_a_stream_parts_what_was_launched_before_from_what_comes_after() -> None:
    b = TraceBuilder()
    x = b.buffer("x")
    host = b.add("point", "main")
    b.op("before", reads=[x], after=[host])
    b.add("free", "compute", buffer=x, writes=[x], after=[host])
    assert found(b.trace, "buffer-reuse") == []
    b.op("after", reads=[x], after=[host])
    (violation,) = found(b.trace, "buffer-reuse")
    assert violation.records == (3, 2)
