"""The trace file: a round trip, a viewer's view, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dbo.errors import UsageError
from dbo.export.chrome import read_trace, trace_events, write_trace
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_step import low_latency_run


def test_a_trace_reads_back_equal_and_is_written_by_equal_bytes(tmp_path: Path) -> None:
    trace = low_latency_run(layers=2)
    path = write_trace(trace, tmp_path / "a.json")
    again = read_trace(path)
    assert again.canonical_bytes() == trace.canonical_bytes()
    assert write_trace(again, tmp_path / "b.json").read_bytes() == path.read_bytes()


def test_a_viewer_finds_a_process_a_rank_a_thread_a_line_and_a_slice_a_record(tmp_path: Path) -> None:
    trace = low_latency_run(layers=2)
    events = json.loads(write_trace(trace, tmp_path / "a.json").read_text())["traceEvents"]
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert named == {(r.rank, r.line) for r in trace.records}
    slices = [e for e in events if e["ph"] == "X"]
    assert [e["args"]["id"] for e in slices] == [r.id for r in trace.records]
    assert all(e["ts"] == pytest.approx(r.t_us) for e, r in zip(slices, trace.records, strict=True))
    order = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert sorted(order, key=order.__getitem__) == ["main", "u0", "u1", "compute", "net"]


def test_arrows_start_and_end_in_pairs_for_batons_and_events() -> None:
    b = TraceBuilder()
    given = b.add("yield", "u0", to=1, index=0)
    b.add("resume", "u1", index=0, after=[given])
    work = b.op("A1", dur=3.0, after=[given])
    mark = b.add("record", "compute", event="done")
    b.add("wait", "comm", event="done", after=[mark, given])
    arrows = [e for e in trace_events(b.trace) if e["ph"] in "sf"]
    assert [(e["ph"], e["cat"]) for e in arrows] == [("s", "baton"), ("f", "baton"), ("s", "event"), ("f", "event")]
    assert arrows[0]["id"] == arrows[1]["id"] != arrows[2]["id"] == arrows[3]["id"]
    assert work == 2 and arrows[2]["ts"] == arrows[3]["ts"] == 3.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is JSON"),
        ("[]", "key dbo"),
        ('{"traceEvents": []}', "key dbo"),
        ('{"dbo": {"schema": "dbo.trace/0"}}', "schema=dbo.trace/1"),
        ('{"dbo": {"schema": "dbo.trace/1", "meta": {}, "buffers": [], "records": [[1, 2]]}}', "whole trace"),
        ('{"dbo": {"schema": "dbo.trace/1", "meta": {}}}', "whole trace"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_trace(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="existing file"):
        read_trace(tmp_path / "nowhere.json")
