"""Timelines in text: one steady layer as two rows, drawn as schedules are drawn, and a plain list of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dbo.check.order import steady_records, steady_window
from dbo.check.overlap import is_communication
from dbo.trace import Record, Trace

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A stretch of the layer in which the same exchanges are under way: what computes, what communicates."""

    comp: tuple[str, ...]
    comm: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A point on one row of a layer; times in microseconds of the world's clock."""

    label: str
    start_us: float
    end_us: float


def draw_layer(trace: Trace, rank: int = 0) -> tuple[str, str]:
    """The Comp and the Comm row of a steady layer, by issue order, for example:

        Comp: |-A0₀-A1₀-||-MLP₁-||-S₁-MLP₀-||-S₀-A0₁-A1₁-|
        Comm: |----D₁---||--D₀--||----C₁---||-----C₀-----|

    Raises:
        UsageError: no split step with two MoE layers.
    """
    return draw(cells(steady_records(trace, rank)))


def cells(records: Sequence[Record]) -> list[Cell]:
    """Cut an issue order where an exchange begins (X.send) or ends (X.recv); stretches without compute are left out."""
    under_way: list[str] = []
    comp: list[str] = []
    found: list[Cell] = []

    def close() -> None:
        if comp:
            found.append(Cell(comp=tuple(comp), comm=tuple(under_way)))
            comp.clear()

    for record in records:
        head, _, half = record.point.partition(".")
        name = head + str(record.ubatch).translate(_SUBSCRIPTS)
        if half == "send":
            close()
            under_way.append(name)
        elif half == "recv":
            close()
            if name in under_way:
                under_way.remove(name)
        else:
            comp.append(name + (f".{half}" if half else ""))
    close()
    return found


def draw(layer: Sequence[Cell]) -> tuple[str, str]:
    """Two rows of equal width, one box a cell."""
    comp_row, comm_row = "Comp: ", "Comm: "
    for cell in layer:
        comp, comm = f"-{'-'.join(cell.comp)}-", "+".join(cell.comm)
        width = max(len(comp), len(comm) + 2)
        left = (width - len(comm) + 1) // 2 if comm else 0
        comp_row += f"|{comp.ljust(width, '-')}|"
        comm_row += f"|{comm.rjust(left + len(comm), '-').ljust(width, '-')}|"
    return comp_row, comm_row


def layer_spans(trace: Trace, rank: int = 0) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The steady layer's compute and communication by time: spans of the Comp and of the Comm row."""
    comp: list[Span] = []
    comm: list[Span] = []
    for record in steady_window(trace, rank):
        if record.dur_us <= 0:
            continue
        head, _, half = record.point.partition(".")
        name = head + str(record.ubatch).translate(_SUBSCRIPTS)
        label = name if is_communication(record) else name + (f".{half}" if half else "")
        span = Span(label=label, start_us=record.t_us, end_us=record.end_us)
        (comp if record.line == "compute" else comm).append(span)
    return tuple(_merged(comp)), tuple(_merged(comm))


def _merged(spans: list[Span]) -> Iterator[Span]:
    """In order of time; neighbours of one label become one span."""
    for label, run in groupby(sorted(spans, key=lambda s: s.start_us), key=lambda s: s.label):
        parts = list(run)
        yield Span(label=label, start_us=parts[0].start_us, end_us=max(s.end_us for s in parts))


def timeline(trace: Trace, rank: int = 0, *, step: int | None = None) -> Iterator[str]:
    """One line of text a record of `rank`, in the order in which things took effect; one column a line of the trace.

    Args:
        step: only this engine step.
    """
    records = [r for r in trace.records if r.rank == rank and (step is None or r.step == step)]
    lines = sorted({r.line for r in records}, key=_column)
    widths = {line: max(len(line), *(len(_cell(r)) for r in records if r.line == line)) for line in lines}
    yield f"{'us':>10}  {'#':>6}  " + "  ".join(line.ljust(widths[line]) for line in lines).rstrip()
    for record in records:
        row = "  ".join((_cell(record) if line == record.line else "").ljust(widths[line]) for line in lines)
        yield f"{record.t_us:>10.2f}  {record.id:>6}  {row}".rstrip()


def _column(line: str) -> tuple[int, str]:
    order = {"main": 0, "compute": 2, "comm": 3, "net": 4}
    return order.get(line, 1), line


def _cell(record: Record) -> str:
    """What happened, in one column's words."""
    name = record.point if record.kind == "point" else record.name or record.kind
    who = f" u{record.ubatch}" if record.on_device and record.ubatch >= 0 else ""
    layer = f" L{record.layer}" if record.layer >= 0 else ""
    mark = {"record": "record ", "wait": "wait "}.get(record.kind, "")
    return f"{mark}{name}{who}{layer}"
