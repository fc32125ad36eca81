"""The two-row drawing of a steady state: what computes above what communicates.

    Comp: |-A0₀-A1₀-||-MLP₁-||-S₁-MLP₀-||-S₀-A0₁-A1₁-|
    Comm: |----D₁---||--D₀--||----C₁---||-----C₀-----|

A column is the time of one exchange: its send, the points above it, its receive. A column without an exchange only
computes. Two exchanges that are pending at once do not fit into one Comm row; such an order is printed as a line only.
"""

from __future__ import annotations

from collections.abc import Iterator

from dbo.errors import ScheduleError, ScheduleSyntaxError
from dbo.schedule.model import RECV_OF, Schedule
from dbo.schedule.order import Mark, label, read_marks, steady_steps


def drawing(
    schedule: Schedule, *, backend: str | None = None, num_ubatches: int = 2, leader: int = 0, pretty: bool = True
) -> str:
    """The Comp and Comm rows of `schedule`, two lines; not `pretty`: with ASCII indices.

    Raises:
        ScheduleError: two exchanges are pending at once.
    """
    columns: list[tuple[list[str], str]] = []
    pending = ""
    for step in steady_steps(schedule, backend=backend, num_ubatches=num_ubatches, leader=leader):
        if step.point in RECV_OF:
            if pending:
                raise _undrawable(schedule, pending, step.point)
            pending = RECV_OF[step.point]
            columns.append(([], label(step.point[0], step.ubatch, pretty=pretty)))
        elif step.point in RECV_OF.values():
            if step.point != pending or columns[-1][1] != label(step.point[0], step.ubatch, pretty=pretty):
                raise _undrawable(schedule, pending, step.point)
            pending = ""
        else:
            if not pending and columns[-1][1]:
                columns.append(([], ""))
            columns[-1][0].append(label(step.point, step.ubatch, pretty=pretty))
    if pending:
        raise _undrawable(schedule, pending, "D.send")
    cells = [(_comp_cell(points, exchange), exchange) for points, exchange in columns]
    comp = "||".join(cell for cell, _ in cells)
    comm = "||".join(_centred(exchange, len(cell)) for cell, exchange in cells)
    return f"Comp: |{comp}|\nComm: |{comm}|"


def _undrawable(schedule: Schedule, pending: str, point: str) -> ScheduleError:
    return ScheduleError.of(
        "a drawing has one exchange at a time",
        fix="print the order line",
        schedule=schedule.name,
        pending=pending or "none",
        point=point,
    )


def _comp_cell(points: list[str], exchange: str) -> str:
    return "-" + "-".join(points) + "-" if points else "-" * (len(exchange) + 2)


def _centred(text: str, width: int) -> str:
    left = (width - len(text) + 1) // 2
    return "-" * left + text + "-" * (width - len(text) - left)


def read_drawing(
    comp: str, comm: str, *, comp_at: tuple[int, int], comm_at: tuple[int, int], source: str
) -> list[Mark]:
    """The order that two rows draw. `comp_at`, `comm_at`: line and column of the first character of each row.

    Raises:
        ScheduleSyntaxError: a row without bars, another number of columns, a label that does not fit its row.
    """
    comp_cells = list(_cells(comp, comp_at, source))
    comm_cells = list(_cells(comm, comm_at, source))
    if len(comp_cells) != len(comm_cells):
        raise ScheduleSyntaxError(
            f"both rows have the same columns: comp={len(comp_cells)}, comm={len(comm_cells)}; align them",
            line=comm_at[0],
            column=comm_at[1],
            source=source,
        )
    marks: list[Mark] = []
    for points, exchanges in zip(comp_cells, comm_cells, strict=True):
        for mark in points:
            if mark.point[0] in "DC":
                raise _misplaced(mark, "the Comp row has compute points only", source)
        for mark in exchanges:
            if mark.point not in ("D", "C"):
                raise _misplaced(mark, "the Comm row has D and C only", source)
        if len(exchanges) > 1:
            raise _misplaced(exchanges[1], "a column has one exchange", source)
        marks += [_half(mark, "send") for mark in exchanges]
        marks += points
        marks += [_half(mark, "recv") for mark in exchanges]
    return marks


def _misplaced(mark: Mark, rule: str, source: str) -> ScheduleSyntaxError:
    return ScheduleSyntaxError(
        f"{rule}: point={mark.point}; move it", line=mark.line, column=mark.column, source=source
    )


def _half(mark: Mark, half: str) -> Mark:
    return Mark(point=f"{mark.point}.{half}", ubatch=mark.ubatch, line=mark.line, column=mark.column)


def _cells(row: str, at: tuple[int, int], source: str) -> Iterator[list[Mark]]:
    line, column = at
    body = row.rstrip()
    if len(body) < 2 or body[0] != "|" or body[-1] != "|":
        raise ScheduleSyntaxError(
            f"a row stands between bars: row={body[:20]!r}; write |-A0_0-…-|", line=line, column=column, source=source
        )
    start = 1
    for cell in body[1:-1].split("||"):
        yield read_marks(cell.replace("-", " "), line=line, column=column + start, source=source)
        start += len(cell) + 2
