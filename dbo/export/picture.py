"""A layer as a PNG (needs matplotlib, the extra `plot`): what computes above what communicates, a colour a ubatch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbo.errors import NotAvailable, UsageError
from dbo.export.window import Bar, Window

# Told apart by colour-blind readers too; grey is a step that is not split.
_COLOURS = ("#3b7dd8", "#f2a33a", "#4aa564", "#b565c2", "#c94f4f", "#7a6a58", "#2fb5b5", "#8c8c2c")
_PLAIN = "#9a9a9a"
_BAR = 0.8
_INCHES = (14.0, 1.5)


def write_picture(window: Window, path: str | Path, *, title: str = "") -> Path:
    """Draw `window` to `path`; returns it.

    Raises:
        NotAvailable: matplotlib is not installed.
        UsageError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        rule = "a picture needs matplotlib"
        fix = "install the extra, pip install 'dual-batch-overlap[plot]', or take --text or --chrome"
        raise NotAvailable.of(rule, fix=fix, missing=error.name) from error
    rows = [("Comp", window.comp), *(("Comm" if i == 0 else "", row) for i, row in enumerate(window.comm))]
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] + 0.7 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for height, (_, bars) in enumerate(rows):
        _draw_row(axes, bars, height, window)
    for start, end in window.exposed:
        axes.axvspan(start - window.start_us, end - window.start_us, color="#d62728", alpha=0.12, linewidth=0, zorder=0)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, window.end_us - window.start_us)
    axes.set_xlabel("µs of the layer")
    axes.set_title(title or f"rank {window.rank}, step {window.step}, layer {window.layer}", loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    ubatches = sorted({bar.ubatch for _, bars in rows for bar in bars})
    patches = [Patch(facecolor=_colour(u), label=f"ubatch {u}" if u >= 0 else "whole batch") for u in ubatches]
    patches.append(Patch(facecolor="white", edgecolor="#888888", hatch="///", label="another layer"))
    if window.exposed:
        patches.append(Patch(facecolor="#d62728", alpha=0.12, label="exposed: nothing computes"))
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=len(patches), frameon=False)
    path = Path(path)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        rule = "a picture is written to a folder that exists"
        raise UsageError.of(rule, fix="name another file", png=path, why=error.strerror) from error
    return path


def _draw_row(axes: Any, bars: Sequence[Bar], height: int, window: Window) -> None:
    scale = (window.end_us - window.start_us) / (_INCHES[0] * 9)  # µs a letter of text
    for bar in bars:
        start, width = bar.start_us - window.start_us, bar.end_us - bar.start_us
        other = bar.layer != window.layer
        axes.broken_barh(
            [(start, width)],
            (height - _BAR / 2, _BAR),
            facecolor=_colour(bar.ubatch),
            alpha=0.45 if other else 1.0,
            edgecolor="white",
            linewidth=1,
            hatch="///" if other else None,
            zorder=2,
        )
        if not bar.label:
            continue
        if width > scale * len(bar.label):
            axes.text(start + width / 2, height, bar.label, ha="center", va="center", fontsize=10, color="black")
        elif width > scale * 1.2:
            axes.text(
                start + width / 2, height, bar.label, ha="center", va="center", fontsize=8, color="black", rotation=90
            )


def _colour(ubatch: int) -> str:
    return _PLAIN if ubatch < 0 else _COLOURS[ubatch % len(_COLOURS)]
