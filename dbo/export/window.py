"""What one layer of one rank looks like in time: everything that runs while the layer does, on two rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dbo.check.order import steady_window
from dbo.check.overlap import is_communication, split_steps
from dbo.errors import UsageError
from dbo.trace import Record, Trace, kinds

_BLINK_US = 0.5
"""A gap between two kernels that is not worth a mark."""

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of one row.

    Attributes:
        label: the point and, as a subscript, the ubatch: `MLP₁`; empty for work between two points, such as sums.
        ubatch: -1 in a step that is not split.
        layer: of the work; neighbours of the layer asked for show at the edges.
    """

    label: str
    ubatch: int
    layer: int
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """A layer's time on one rank.

    Attributes:
        comp: what the compute stream does.
        comm: bytes between ranks under way, one tuple of bars for each row: exchanges that overlap do not fit into one.
        exposed: stretches of communication (start, end) under which nothing computes.
    """

    rank: int
    step: int
    layer: int
    start_us: float
    end_us: float
    comp: tuple[Bar, ...]
    comm: tuple[tuple[Bar, ...], ...]
    exposed: tuple[tuple[float, float], ...]

    @property
    def hidden_share(self) -> float | None:
        """Time with communication under compute / time with communication; None: there is none."""
        under_way = sum(end - start for start, end in _union([bar for row in self.comm for bar in row]))
        return None if under_way == 0 else 1 - sum(end - start for start, end in self.exposed) / under_way


def window(trace: Trace, *, rank: int = 0, step: int | None = None, layer: int | None = None) -> Window:
    """The window of a layer: of a steady one without `step` and `layer`, else of the first or middle one that fits.

    Raises:
        UsageError: no such rank, step or layer in the trace, or nothing at a point in it.
    """
    step, layer = _choose(trace, rank, step, layer)
    records = [r for r in trace.records if r.rank == rank and r.step == step and r.on_device and r.dur_us > 0]
    own = [r for r in records if r.layer == layer and r.point]
    start_us, end_us = min(r.t_us for r in own), max(r.end_us for r in own)
    seen = [r for r in records if r.end_us > start_us and r.t_us < end_us]
    comp = _bars([r for r in seen if r.line == "compute"], start_us, end_us)
    comm = _bars([r for r in seen if is_communication(r)], start_us, end_us)
    # As in `dbo.check.overlap`: the halves of an exchange that run on the compute stream hide nothing.
    busy = _union(_bars([r for r in seen if r.line == "compute" and r.kind == kinds.OP], start_us, end_us))
    return Window(
        rank=rank,
        step=step,
        layer=layer,
        start_us=start_us,
        end_us=end_us,
        comp=tuple(comp),
        comm=_rows(comm),
        exposed=tuple(_without(_union(comm), busy)),
    )


def _choose(trace: Trace, rank: int, step: int | None, layer: int | None) -> tuple[int, int]:
    if step is None and layer is None:
        try:
            middle = steady_window(trace, rank)[0]
            return middle.step, middle.layer
        except UsageError:
            pass  # nothing is split, or there are too few layers: any layer will do
    places = {
        (r.step, r.layer)
        for r in trace.records
        if r.rank == rank and r.on_device and r.layer >= 0 and r.point and r.dur_us > 0
    }
    fitting = [p for p in places if step in (None, p[0]) and layer in (None, p[1])]
    if not fitting:
        rule = "a layer is shown where the trace has one"
        ranks = sorted({r.rank for r in trace.records if r.rank >= 0})
        steps, layers = _span([s for s, _ in places]), _span([y for _, y in places])
        fix = f"choose from ranks {_span(ranks)}; of rank {rank}: steps {steps}, layers {layers}"
        raise UsageError.of(rule, fix=fix, rank=rank, step=step, layer=layer)
    split = [p for p in fitting if (rank, p[0]) in split_steps(trace)] or fitting
    first = min(s for s, _ in split)
    of_step = sorted(y for s, y in split if s == first)
    return first, of_step[(len(of_step) - 1) // 2]


def _span(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if values else "none"


def _bars(records: Sequence[Record], start_us: float, end_us: float) -> list[Bar]:
    """In order of time, cut to the window; neighbours of one point become one bar."""
    bars: list[Bar] = []
    for r in sorted(records, key=lambda r: (r.t_us, r.end_us)):
        head, _, half = r.point.partition(".")
        label = head + (str(r.ubatch).translate(_SUBSCRIPTS) if head and r.ubatch >= 0 else "")
        if half and not is_communication(r):
            label += f".{half}"
        bar = Bar(
            label=label, ubatch=r.ubatch, layer=r.layer, start_us=max(r.t_us, start_us), end_us=min(r.end_us, end_us)
        )
        last = bars[-1] if bars else None
        if last is not None and _who(last) == _who(bar) and not is_communication(r):
            bars[-1] = Bar(
                label=bar.label, ubatch=bar.ubatch, layer=bar.layer, start_us=last.start_us, end_us=bar.end_us
            )
        else:
            bars.append(bar)
    return bars


def _who(bar: Bar) -> tuple[str, int, int]:
    return bar.label, bar.ubatch, bar.layer


def _rows(bars: Sequence[Bar]) -> tuple[tuple[Bar, ...], ...]:
    """As few rows as hold all bars without overlap."""
    rows: list[list[Bar]] = []
    for bar in bars:
        row = next((row for row in rows if row[-1].end_us <= bar.start_us + 1e-9), None)
        if row is None:
            rows.append([bar])
        elif row[-1].label == bar.label and bar.start_us - row[-1].end_us < _BLINK_US:
            row[-1] = Bar(
                label=bar.label, ubatch=bar.ubatch, layer=bar.layer, start_us=row[-1].start_us, end_us=bar.end_us
            )
        else:
            row.append(bar)
    return tuple(tuple(row) for row in rows)


def _union(bars: Sequence[Bar]) -> list[tuple[float, float]]:
    """The time covered by bars, as disjoint stretches in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted((bar.start_us, bar.end_us) for bar in bars):
        if union and start <= union[-1][1] + 1e-9:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def _without(
    stretches: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The parts of `stretches` that no stretch of `others` covers."""
    left: list[tuple[float, float]] = []
    for start, end in stretches:
        at = start
        for other_start, other_end in others:
            if other_end > at and other_start < end:
                if other_start > at + _BLINK_US:
                    left.append((at, other_start))
                at = max(at, other_end)
        if end > at + _BLINK_US:
            left.append((at, end))
    return left
