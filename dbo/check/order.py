"""The steady order of a layer, read back from a trace in the spelling of the overlap schedule's own listing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dbo.check.overlap import split_steps
from dbo.errors import UsageError
from dbo.trace import Record, Trace, kinds

SEED_ORDER: tuple[str, ...] = tuple(
    "D1.send A0_0 A1_0 D1.recv D0.send MLP1 D0.recv C1.send S1 MLP0 C1.recv C0.send S0 A0_1 A1_1 C0.recv".split()
)
"""`mlp_shared_overlap` as it was asked for; there ubatch 1 leads, in our ring ubatch 0 does."""

_MARKERS = frozenset((kinds.RECORD, kinds.WAIT, kinds.FREE, kinds.BLOCKED))
_LABEL = re.compile(r"^(A\d+_|[A-Za-z]+)(\d+)((?:\..*)?)$")


def steady_order(trace: Trace, rank: int = 0) -> list[str]:
    """Labels in issue order, from the leading ubatch's D.send in a middle MoE layer up to before its next one.

    Raises:
        UsageError: no split step of `rank` dispatches in two layers or more.
    """
    return [label(r.point, r.ubatch) for r in steady_records(trace, rank)]


def steady_records(trace: Trace, rank: int = 0) -> list[Record]:
    """The device records behind `steady_order`; neighbours of one point, ubatch and layer are represented by the first.

    Raises:
        UsageError: as `steady_order`.
    """
    issued = steady_window(trace, rank)
    return [
        r for before, r in zip([None, *issued], issued, strict=False) if before is None or _place(before) != _place(r)
    ]


def steady_window(trace: Trace, rank: int = 0) -> list[Record]:
    """All device records at points within the steady layer, in issue order.

    Raises:
        UsageError: as `steady_order`.
    """
    steps: dict[int, list[Record]] = {}
    split = split_steps(trace)
    for record in trace.records:
        if record.rank == rank and record.on_device and record.point and record.ubatch >= 0:
            if (rank, record.step) in split and record.kind not in _MARKERS:
                steps.setdefault(record.step, []).append(record)
    best: list[Record] = []
    most_layers = 1
    for step in sorted(steps):
        issued = sorted(steps[step], key=lambda r: r.id)
        sends = _leading_sends(issued)
        if len(sends) > most_layers:
            most_layers = len(sends)
            middle = (len(sends) - 1) // 2
            best = [r for r in issued if sends[middle].id <= r.id < sends[middle + 1].id]
    if not best:
        raise UsageError.of(
            "a steady order needs a split step with at least two MoE layers",
            fix="run a longer model, or lower the threshold so that a step is split",
            rank=rank,
            split_steps=len(steps),
        )
    return best


def label(point: str, ubatch: int) -> str:
    """`D.send` of ubatch 1 is D1.send, A0 of ubatch 0 is A0_0, MLP of ubatch 1 is MLP1."""
    head, dot, half = point.partition(".")
    return f"{head}{'_' if head[-1:].isdigit() else ''}{ubatch}{dot}{half}"


def exchanged(order: Sequence[str]) -> list[str]:
    """The same order with ubatches 0 and 1 swapped."""
    swapped = []
    for text in order:
        match = _LABEL.match(text)
        if match is None:
            raise UsageError.of("a label is a point with a ubatch", fix="use dbo.check.order.label", label=text)
        head, ubatch, half = match.groups()
        swapped.append(f"{head}{ {'0': '1', '1': '0'}.get(ubatch, ubatch) }{half}")
    return swapped


def matches_seed(order: Sequence[str]) -> str | None:
    """ "same" when it is the seed's order, "exchanged" when it is with the ubatches swapped, else None."""
    if tuple(order) == SEED_ORDER:
        return "same"
    return "exchanged" if list(order) == exchanged(SEED_ORDER) else None


def _leading_sends(issued: Sequence[Record]) -> list[Record]:
    """The first D.send of each layer by the ubatch that dispatches first."""
    first: dict[int, Record] = {}
    leading = next((r.ubatch for r in issued if r.point == "D.send"), None)
    for record in issued:
        if record.point == "D.send" and record.ubatch == leading:
            first.setdefault(record.layer, record)
    return sorted(first.values(), key=lambda r: r.id)


def _place(record: Record) -> tuple[str, int, int]:
    return record.point, record.ubatch, record.layer
