"""Rows of spans drawn under each other in text, in proportion to time and wide enough for every label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dbo.export.rows import Span

WIDTH = 96


def draw(rows: Mapping[str, Sequence[Span]], *, width: int = WIDTH) -> list[str]:
    """One line a row: `Comp |--A0_0--|--A1_0--|     |`. Equal times stand in equal columns on all lines.

    Spans of one row must not overlap. Those that touch share the bar between them; neighbours with one label, such as
    the operations of one point, are drawn as one.
    """
    rows = {name: _merged(row) for name, row in rows.items()}
    spans = [span for row in rows.values() for span in row]
    if not spans:
        return []
    column = _columns(spans, width)
    label_width = max(map(len, rows))
    end = max(column.values())
    return [f"{name:<{label_width}} {_line(row, column, end)}" for name, row in rows.items()]


def _merged(row: Sequence[Span]) -> list[Span]:
    """The row in order of time, neighbours with one label made one."""
    merged: list[Span] = []
    for span in sorted(row, key=lambda span: (span.start_us, span.end_us)):
        if merged and merged[-1].label == span.label:
            merged[-1] = replace(merged[-1], end_us=max(span.end_us, merged[-1].end_us))
        else:
            merged.append(span)
    return merged


def _columns(spans: Sequence[Span], width: int) -> dict[float, int]:
    """The column of every time at which a span begins or ends."""
    times = sorted({time for span in spans for time in (span.start_us, span.end_us)})
    scale = (width - 1) / ((times[-1] - times[0]) or 1.0)
    column: dict[float, int] = {}
    previous = -1
    for time in times:
        wanted = [previous + 1, round((time - times[0]) * scale)]
        wanted += [
            column[span.start_us] + len(span.label) + 3
            for span in spans
            if span.end_us == time and span.start_us < time
        ]
        column[time] = previous = max(wanted)
    return column


def _line(row: Sequence[Span], column: Mapping[float, int], end: int) -> str:
    cells = [" "] * (end + 1)
    for span in row:
        start, stop = column[span.start_us], column[span.end_us]
        cells[start : stop + 1] = f"|{span.label:-^{max(stop - start - 1, 0)}}|"[: stop - start + 1]
        cells[stop] = "|"
    return "".join(cells).rstrip()
