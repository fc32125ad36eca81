"""The Order line: the steady state of all ubatches in one line.

    D₁ send, A0₀, A1₀, D₁ recv, D₀ send, MLP₁, …        subscripts, commas
    D1.send A0_0 A1_0 D1.recv D0.send MLP1 …            the same in ASCII

Printing plays the ring and cuts one period out of it; reading gives `Mark`s, of which `dbo.schedule.period` makes a
program again. The two differ only in names and separators, so reading takes them mixed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dbo.errors import ScheduleError, ScheduleSyntaxError
from dbo.schedule.model import POINTS, Schedule
from dbo.schedule.ring import Step, ring_order, steady_window

SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
FROM_SUBSCRIPTS = str.maketrans(SUBSCRIPTS, "0123456789")
TO_SUBSCRIPTS = str.maketrans("0123456789", SUBSCRIPTS)
_LABEL = re.compile(r"(A[01]|MLP|S|copy|[DC])_?(\d{1,3})(?:[. ](send|recv))?(?!\w)")
_GAP = re.compile(r"[\s,]*")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point of a ubatch at its place in the text; `point` is "D" or "C" where the text names no half.

    `ubatch` is the text's number; `dbo.schedule.period` counts from the leader.
    """

    point: str
    ubatch: int
    line: int
    column: int

    @property
    def name(self) -> str:
        return label(self.point, self.ubatch, pretty=False)


def order_line(
    schedule: Schedule, *, backend: str | None = None, num_ubatches: int = 2, leader: int = 0, pretty: bool = False
) -> str:
    """The steady state of `schedule` as one line; `leader` is the index that the leading ubatch gets.

    Raises:
        ScheduleError: what `ring_order` raises; a leader that is no ubatch.
    """
    window = steady_steps(schedule, backend=backend, num_ubatches=num_ubatches, leader=leader)
    return (", " if pretty else " ").join(label(step.point, step.ubatch, pretty=pretty) for step in window)


def steady_steps(schedule: Schedule, *, backend: str | None, num_ubatches: int, leader: int) -> tuple[Step, ...]:
    """One period of the ring, renumbered so that the leading ubatch is `leader`."""
    if not 0 <= leader < num_ubatches:
        raise ScheduleError.of("the leader is a ubatch", fix=f"use 0 to {num_ubatches - 1}", leader=leader)
    window = steady_window(ring_order(schedule, backend=backend, num_ubatches=num_ubatches))
    return tuple(replace(step, ubatch=(step.ubatch + leader) % num_ubatches) for step in window)


def label(point: str, ubatch: int, *, pretty: bool) -> str:
    """`A0_0`, `D0.send`, `MLP0`; pretty: `A0₀`, `D₀ send`, `MLP₀`."""
    kind, _, half = point.partition(".")
    if pretty:
        return kind + str(ubatch).translate(TO_SUBSCRIPTS) + (f" {half}" if half else "")
    return kind + ("_" if kind[-1].isdigit() else "") + str(ubatch) + (f".{half}" if half else "")


def read_marks(text: str, *, line: int, column: int, source: str) -> list[Mark]:
    """The labels of one physical line whose first character is at `line`, `column`."""
    text = text.translate(FROM_SUBSCRIPTS)
    end = len(text.rstrip(" \t\r.,"))
    marks = []
    at = _GAP.match(text).end()  # type: ignore[union-attr]  # it matches the empty text too
    while at < end:
        found = _LABEL.match(text, at)
        if found is None:
            word = re.split(r"[\s,]", text[at:], maxsplit=1)[0]
            raise ScheduleSyntaxError(
                f"expected a point of a ubatch, such as A0_0, D1.send or MLP1: text={word!r}; write one of "
                f"{' '.join(POINTS)} with the ubatch's number",
                line=line,
                column=column + at,
                source=source,
            )
        kind, ubatch, half = found.groups()
        marks.append(Mark(point=f"{kind}.{half}" if half else kind, ubatch=int(ubatch), line=line, column=column + at))
        at = _GAP.match(text, found.end()).end()  # type: ignore[union-attr]
    return marks
