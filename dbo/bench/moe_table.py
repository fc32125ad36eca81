"""The tables of `dbo bench moe`, as text. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dbo.bench.moe_figures import (
    COMM,
    COMM_HALVES,
    COMPUTE,
    DBO,
    HALVES,
    NO_DBO,
    Batch,
    GainVerdict,
    MoERow,
    best_without,
    gain_over_best,
)

HEAD = (
    "backend",
    "SMs",
    "schedule",
    "error",
    "no DBO",
    "DBO",
    "compute",
    "halves",
    "comm",
    "comm halves",
    "comm/compute",
    "no DBO/(c+c)",
    "ideal gain",
    "own gain",
    "realised",
    "hidden",
    "steady",
    "beside",
    "over best",
    "note",
)
UNITS = (
    "ms a layer, median of the slower rank and half its range; compute, halves: exchange replaced by a recording; "
    "beside: of the time in which bytes are under way in steady layers, what kernels run beside; "
    "over best: the fastest run without DBO of this batch, any backend and mode / DBO"
)


@dataclass(kw_only=True)
class Measured:
    """Everything that a run of the benchmark found.

    Attributes:
        machine: hardware and versions, a line each.
        skipped: what was not measured, by name, and why.
        host: microseconds of a step's hand-overs, by how they are done.
        host_ratio: events and new threads over what is used here.
    """

    machine: list[str]
    rows: list[MoERow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    host: dict[str, float] = field(default_factory=dict)
    host_ratio: float | None = None

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() | _over_best(row, self.rows) for row in self.rows]
        return asdict(self) | {"rows": rows}


def _over_best(row: MoERow, rows: Sequence[MoERow]) -> dict[str, Any]:
    if not row.timed:
        return {}
    best = best_without(rows, row.shape, row.tokens)
    return {"gain_over_best": gain_over_best(row, rows), "best_without_dbo": _run_of(best)}


def _run_of(row: MoERow) -> str:
    sms = f" with {row.comm_sms} SMs" if row.comm_sms else ""
    return f"{row.backend}{sms} {row.mode}"


def table(batch: Batch, rows: Sequence[MoERow], known: Sequence[MoERow]) -> str:
    """The rows of one batch; `known`: all rows so far, the best run without DBO among them."""
    shape, tokens, mode = batch
    cells = [HEAD, *(_cells(row, known) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    best = ""
    if any(row.timed for row in known if (row.shape, row.tokens) == (shape, tokens)):
        found = best_without(known, shape, tokens)
        best = f"; best without DBO: {_run_of(found)}, {found.ms(NO_DBO) / found.layers:.3f} ms a layer"
    what = f"{rows[0].what}; {rows[0].layers} layers"
    return "\n".join([f"## {shape}, {tokens} tokens a rank ({what}), {mode}{best}", "", *lines])


def _cells(row: MoERow, known: Sequence[MoERow]) -> tuple[str, ...]:
    error = f"{row.error:.1e}{', same bits' * row.bit_equal}" if row.correct else f"{row.error:.1e} WRONG"
    shown = (row.backend, str(row.comm_sms or "-"), row.schedule, error if row.limit else "-")
    if not row.timed:
        return (*shown, *["-"] * (len(HEAD) - len(shown) - 1), row.note)
    steady = row.steady_hidden
    return (
        *shown,
        _spread(row, NO_DBO),
        _spread(row, DBO),
        *(f"{row.ms(name) / row.layers:.3f}" for name in (COMPUTE, HALVES, COMM, COMM_HALVES)),
        f"{row.ratio:.2f}",
        f"{row.serial_overhead:.3f}",
        f"{row.ideal_gain:.3f}",
        f"{row.own_gain:.3f}",
        f"{row.realised:.0%}",
        f"{row.hidden:.0%}",
        "-" if steady is None else f"{steady:.0%}",
        "-" if row.beside_compute is None else f"{row.beside_compute:.0%}",
        f"{gain_over_best(row, known):.3f}",
        row.note,
    )


def _spread(row: MoERow, variant: str) -> str:
    samples = row.samples_ms[variant]
    spread = (max(samples) - min(samples)) / 2 / row.ms(variant)
    return f"{row.ms(variant) / row.layers:.3f} ±{spread:.0%}"


def head(command: str, measured: Measured) -> str:
    """What stands above all tables."""
    return "\n".join([*measured.machine, f"again: {command}", UNITS])


def page(command: str, measured: Measured, found: Sequence[GainVerdict]) -> str:
    """Everything, in order."""
    blocks = [head(command, measured)]
    batches = dict.fromkeys((row.shape, row.tokens, row.mode) for row in measured.rows)
    for batch in batches:
        rows = [row for row in measured.rows if (row.shape, row.tokens, row.mode) == batch]
        blocks.append(table(batch, rows, measured.rows))
    blocks.append("\n".join(f"skipped: {name}" for name in measured.skipped))
    costs = [f"host, a step of 108 hand-overs: {name} {us:.0f} us" for name, us in measured.host.items()]
    blocks.append("\n".join([*costs, *map(str, found)]))
    return "\n\n".join(block for block in blocks if block)
