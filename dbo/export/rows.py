"""Timelines: the spans of one steady layer, in two rows, and a plain list of a rank's records in text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from dbo.check.order import steady_window
from dbo.check.overlap import is_communication
from dbo.trace import Record, Trace, kinds

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A point on one row of a layer; times in microseconds of the world's clock."""

    label: str
    start_us: float
    end_us: float


def layer_spans(trace: Trace, rank: int = 0) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The steady layer's compute and communication by time: spans of the Comp and of the Comm row.

    Raises:
        UsageError: no split step with two MoE layers.
    """
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
    name = record.point if record.kind == kinds.POINT else record.name or record.kind
    who = f" u{record.ubatch}" if record.on_device and record.ubatch >= 0 else ""
    layer = f" L{record.layer}" if record.layer >= 0 else ""
    mark = {"record": "record ", "wait": "wait "}.get(record.kind, "")
    return f"{mark}{name}{who}{layer}"
