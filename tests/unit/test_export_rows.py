"""The two rows of a layer and the long timeline."""

from __future__ import annotations

import pytest

from dbo.check.order import SEED_ORDER
from dbo.errors import UsageError
from dbo.export.rows import Cell, cells, draw, draw_layer, layer_spans, timeline
from dbo.trace import Record
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_step import low_latency_run

SEED_COMP = "Comp: |-A0₀-A1₀-||-MLP₁-||-S₁-MLP₀-||-S₀-A0₁-A1₁-|"
SEED_COMM = "Comm: |----D₁---||--D₀--||----C₁---||-----C₀-----|"


def record_of(label: str) -> Record:
    """The device record that a label of the seed's listing stands for."""
    head, _, half = label.partition(".")
    head, ubatch = (head[:-2], head[-1]) if "_" in head else (head[:-1], head[-1])
    return Record(
        id=0,
        rank=0,
        line="compute",
        kind="op",
        name=head,
        ubatch=int(ubatch),
        point=head + (f".{half}" if half else ""),
    )


def test_the_seed_order_draws_the_seed_picture() -> None:
    assert draw(cells([record_of(label) for label in SEED_ORDER])) == (SEED_COMP, SEED_COMM)


def test_a_run_draws_it_with_the_ubatches_exchanged() -> None:
    swap = str.maketrans("₀₁", "₁₀")
    assert draw_layer(low_latency_run()) == (SEED_COMP.translate(swap), SEED_COMM.translate(swap))


def test_cells_without_communication_and_with_two_exchanges() -> None:
    rows = draw([Cell(comp=("A0₀",), comm=()), Cell(comp=("S₀",), comm=("D₀", "D₁"))])
    assert rows == ("Comp: |-A0₀-||-S₀----|", "Comm: |-----||-D₀+D₁-|")
    assert len(set(map(len, rows))) == 1


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
        draw_layer(b.trace)
