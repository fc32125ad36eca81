"""The two rows of a layer and the long timeline."""

from __future__ import annotations

import pytest

from dbo.errors import UsageError
from dbo.export.rows import layer_spans, timeline
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_step import low_latency_run


def test_spans_follow_the_clock_and_keep_to_their_row() -> None:
    comp, comm = layer_spans(low_latency_run())
    assert [s.label for s in comm] == ["D₀", "D₁", "C₀", "C₁"]
    assert {"A0₁", "MLP₀", "S₁"} <= {s.label for s in comp}
    assert all(a.end_us <= b.start_us for a, b in zip(comp, comp[1:], strict=False)), "one stream, no overlap"


def test_the_timeline_has_a_column_a_line_and_a_row_a_record() -> None:
    trace = low_latency_run(layers=1)
    head, *rows = timeline(trace, 1)
    assert head.split() == ["us", "#", "main", "u0", "u1", "compute", "net"]
    mine = [r for r in trace.records if r.rank == 1]
    assert len(rows) == len(mine) and all(str(r.id) in row for r, row in zip(mine, rows, strict=True))


def test_the_timeline_can_be_cut_to_one_step() -> None:
    trace = low_latency_run(layers=1, steps=2)
    second = [r.id for r in trace.records if r.rank == 1 and r.step == 1]
    assert [int(row.split()[1]) for row in list(timeline(trace, 1, step=1))[1:]] == second


def test_no_split_step_is_refused_by_name() -> None:
    b = TraceBuilder()
    b.op("A0", point="A0", ubatch=0)
    with pytest.raises(UsageError, match="at least two MoE layers"):
        layer_spans(b.trace)
