"""Show a trace: which ubatch computes while which communicates, in text, as a Chrome trace or as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dbo.check import measure
from dbo.cli.answer import Answer
from dbo.cli.parser import Parser, integer
from dbo.cli.progress import Reached
from dbo.cli.rows import draw
from dbo.errors import UsageError
from dbo.export.chrome import write_trace
from dbo.export.picture import write_picture
from dbo.export.profile import read_any
from dbo.export.rows import Span, timeline
from dbo.export.window import Bar, Window, window
from dbo.trace import Trace

HELP = "show a trace in text, as Chrome JSON or as a picture"


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "trace",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="a file that `dbo check --trace` wrote, or the profiles of torch.profiler, one a rank",
    )
    parser.add_argument("--rank", type=integer(0), default=0, metavar="R", help="whose lines (default 0)")
    parser.add_argument("--step", type=integer(0), metavar="S", help="of this engine step (default: a steady one)")
    parser.add_argument("--layer", type=integer(0), metavar="L", help="this layer (default: a steady one)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--text", action="store_true", help="the layer as rows and the step as a list; the default has rows"
    )
    form.add_argument("--chrome", type=Path, metavar="FILE", help="write Chrome JSON, opens in Perfetto")
    form.add_argument("--png", type=Path, metavar="FILE", help="draw the layer (needs the extra plot)")


def run(args: argparse.Namespace, reached: Reached) -> Answer:
    """Read the trace and show it."""
    trace = read_any(args.trace)
    if args.chrome is not None:
        try:
            path = write_trace(trace, args.chrome)
        except OSError as error:
            rule = "a trace is written to a folder that exists"
            raise UsageError.of(rule, fix="name another file", chrome=args.chrome, why=error.strerror) from error
        return Answer(text=f"written: {path} (open it in Perfetto or chrome://tracing)", data={"chrome": str(path)})
    shown = window(trace, rank=args.rank, step=args.step, layer=args.layer)
    data = _data(shown)
    if args.png is not None:
        path = write_picture(shown, args.png, title=_title(trace, shown))
        return Answer(text=f"written: {path}", data=data | {"png": str(path)})
    text = _rows(trace, shown)
    if trace.meta.get("world") == "profile":
        text += f"\n{_overall(trace, shown.rank)}"
    if args.text:
        text += "\n\n" + "\n".join(timeline(trace, shown.rank, step=shown.step))
    return Answer(text=text, data=data)


def _title(trace: Trace, shown: Window) -> str:
    """Where the window lies, of what run, and how much is hidden."""
    lines = str(trace.meta.get("schedule", "")).splitlines()
    name = next((line.partition(" ")[2] for line in lines if line.startswith("schedule ")), "")
    parts = [f"rank {shown.rank}, step {shown.step}, layer {shown.layer}", str(trace.meta.get("backend", "")), name]
    if shown.hidden_share is not None:
        parts.append(f"{shown.hidden_share:.0%} of communication hidden")
    return " · ".join(part for part in parts if part)


def _overall(trace: Trace, rank: int) -> str:
    """The figures over all split steps of a rank, which a recorded run has from `dbo check`."""
    said = measure(trace, rank)
    if said.hidden_share is None:
        return f"Over all split steps of rank {rank} nothing communicates beside the compute stream."
    share, exposed = (
        f"{said.hidden_share:.0%} of communication is hidden",
        f"{said.exposed_us:.0f} of {said.comm_us:.0f} µs",
    )
    return f"Over all split steps of rank {rank} {share}; {exposed} are exposed."


def _rows(trace: Trace, shown: Window) -> str:
    spans = {"Comp": _spans(shown.comp, shown)}
    for index, row in enumerate(shown.comm):
        spans["Comm" if index == 0 else "    " + " " * index] = _spans(row, shown)
    ubatches = sorted({bar.ubatch for bar in shown.comp if bar.ubatch >= 0})
    lines = [_title(trace, shown), "", *draw(spans), ""]
    if ubatches:
        named = ", ".join(f"{'₀₁₂₃₄₅₆₇₈₉'[u % 10]} is ubatch {u}" for u in ubatches)
        lines.append(f"Comp: the compute stream. Comm: bytes between ranks under way. {named}; ' is another layer.")
    else:
        lines.append("Comp: the compute stream. Comm: bytes between ranks under way. The step is not split.")
    lines += [
        f"From {shown.start_us:.1f} to {shown.end_us:.1f} µs; what stands in one column happens at the same time.",
        *(
            f"Nothing computes from {start:.1f} to {end:.1f} µs while bytes are under way."
            for start, end in shown.exposed
        ),
    ]
    return "\n".join(lines)


def _spans(bars: tuple[Bar, ...], shown: Window) -> list[Span]:
    return [
        Span(label=bar.label + ("'" if bar.layer != shown.layer else ""), start_us=bar.start_us, end_us=bar.end_us)
        for bar in bars
        if bar.label
    ]


def _data(shown: Window) -> dict[str, Any]:
    def plain(bars: tuple[Bar, ...]) -> list[dict[str, Any]]:
        return [
            {"label": b.label, "ubatch": b.ubatch, "layer": b.layer, "start_us": b.start_us, "end_us": b.end_us}
            for b in bars
        ]

    return {
        "rank": shown.rank,
        "step": shown.step,
        "layer": shown.layer,
        "start_us": shown.start_us,
        "end_us": shown.end_us,
        "hidden_share": shown.hidden_share,
        "comp": plain(shown.comp),
        "comm": [plain(row) for row in shown.comm],
        "exposed_us": [list(stretch) for stretch in shown.exposed],
    }
