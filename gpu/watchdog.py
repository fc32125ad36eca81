"""The watchdog: a process that reads the board, says who is stuck on what, and ends the ranks by id.

It has to be a process: a rank that waits inside a communication library may hold its interpreter's lock, so no thread
of it can speak. It acts when nothing on the board moves for a set time and some line waits, when a rank's process is
gone, when a rank has ended with an error and its peers have not followed, or when ranks come to one exchange with
different ones in mind.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dbo.check.waitfor import Node, Waiter, describe
from gpu import board
from gpu.board import Board, is_alive
from gpu.stuck import Differing, differing_exchange, text_of, waiters_of

POLL_S = 0.05
SLOW = 5
"""A line that computes and does not move may be slow: it gets so many times the patience before its peers are told."""


@dataclass(kw_only=True)
class Report:
    """Why a run was ended.

    Attributes:
        reason: "stalled" | "died" | "failed" | "differing" | "unequal-yields".
        rank, ubatch, point, step, layer: where it began, as far as the board tells.
        text: the wait-for report, and what was found beside it.
        waiters: what every blocked line waits for.
        ended: process ids that the watchdog ended.
    """

    reason: str
    text: str
    rank: int = -1
    ubatch: int = -1
    point: str = ""
    step: int = -1
    layer: int = -1
    waiters: list[dict[str, Any]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


def watch(folder: Path, stall_s: float) -> None:
    """Watch until every rank has ended; end them when they cannot go on. Exits 0, or 1 with `report.json` written."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what an interrupt means
    watched = Board.open(folder / "board")
    parent = os.getppid()
    last, since = -1, time.monotonic()
    trouble_since: float | None = None
    while not all(part.state in (board.ENDED, board.FAILED) for _, part in watched.parts()):
        time.sleep(POLL_S)
        if os.getppid() != parent:
            _end(watched, Report(reason="launcher gone", text="the launcher is gone"))
            os._exit(1)
        now = time.monotonic()
        moved = sum(line.seq for _, part in watched.parts() for line in part.lines())
        if moved != last:
            last, since = moved, now
        report = _trouble(watched)
        if report is not None:
            # The others may end by themselves, and what they still write says more than what they had written.
            trouble_since = trouble_since or now
            grace = min(stall_s, 1.0)
            if now - trouble_since < grace or (report.reason == "unequal-yields" and now - since < grace):
                continue
        elif now - since < stall_s or not (report := _stalled(watched, slow=now - since >= SLOW * stall_s)):
            continue
        _conclude(folder, watched, report)
        os._exit(1)
    report = _trouble(watched)
    if report is not None and report.reason != "failed" and any(p.state == board.FAILED for _, p in watched.parts()):
        # All have ended by themselves, some with an error that is only the effect of this.
        _conclude(folder, watched, report)
        os._exit(1)
    os._exit(0)


def _trouble(watched: Board) -> Report | None:
    """What cannot end well, however long one waits: causes before effects."""
    for rank, part in watched.parts():
        found = part.finding()
        if found is not None and found.kind == "unequal-yields":
            at = _place(found)
            text = f"rank {rank} ubatch {found.ubatch} {found.text} {_spot(at)}"
            return Report(reason="unequal-yields", rank=rank, text=text, **at)
    differing = differing_exchange(watched)
    if differing is not None:
        return _differing(differing)
    for rank, part in watched.parts():
        if part.state == board.RUNNING and not is_alive(part.pid):
            at = _where(part)
            return Report(reason="died", rank=rank, text=f"rank {rank} (process {part.pid}) is gone {_spot(at)}", **at)
    for rank, part in watched.parts():
        if part.state == board.FAILED:
            found = part.finding()
            at = _where(part) if found is None else _place(found)
            what = found.text if found is not None else "its program raised"
            return Report(reason="failed", rank=rank, text=f"rank {rank} failed {_spot(at)}: {what}", **at)
    return None


def _differing(found: Differing) -> Report:
    entry = found.entry
    return Report(
        reason="differing", rank=found.rank, ubatch=entry.ubatch, point=entry.point, step=entry.step, layer=entry.layer,
        text=found.text,
    )  # fmt: skip


def _stalled(watched: Board, *, slow: bool) -> Report | None:
    """Nothing has moved: the report, if lines wait for each other (`slow`: or for one that computes)."""
    waiters, running = waiters_of(watched)
    stuck = text_of(waiters, running)
    if stuck is None and slow and waiters:
        return _slow(watched, waiters, running)
    if stuck is None:
        return None
    core, text = stuck
    missing = [rank for waiter in core for rank in waiter.missing]
    first = core[0]
    rank = missing[0] if missing else first.rank
    return Report(
        reason="stalled", text=text, rank=rank, ubatch=first.ubatch, point=first.point, step=first.step,
        layer=first.layer,
    )  # fmt: skip


def _slow(watched: Board, waiters: list[Waiter], running: list[Node]) -> Report:
    """Lines wait for one that runs and does not come to its next point."""
    needed = {need for waiter in waiters for need in waiter.needs}
    rank, line = min(needed & set(running), default=min(running))
    at = _where(watched.rank(rank))
    lines = [f"rank {rank} {line} runs {_spot(at)} and has come to no further point", *map(describe, waiters)]
    return Report(reason="stalled", rank=rank, text="\n  ".join(lines), **at)


def _conclude(folder: Path, watched: Board, report: Report) -> None:
    """Write the report with every rank's wait, let ranks leave their traces, end them."""
    waiters, running = waiters_of(watched)
    stuck = text_of(waiters, running)
    if report.reason != "stalled":
        found = [report.text, *([stuck[1]] if stuck is not None else [])]
        report.text = "\n".join(found)
    report.waiters = [_jsonable(w) for w in waiters]
    _ask_for_traces(folder, watched)
    _end(watched, report)
    partial = folder / "report.partial"
    partial.write_text(json.dumps(asdict(report)))
    os.replace(partial, folder / "report.json")


def _ask_for_traces(folder: Path, watched: Board, wait_s: float = 2.0) -> None:
    """Have every living rank write what it has recorded; one that cannot answer is not waited for beyond `wait_s`."""
    asked = []
    for rank, part in watched.parts():
        fifo = folder / f"rank{rank}.ask"
        if part.state == board.RUNNING and is_alive(part.pid) and fifo.exists():
            handle = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
            os.write(handle, b"?")
            asked.append((folder / f"rank{rank}.part", handle))
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and not all(path.exists() for path, _ in asked):
        time.sleep(POLL_S)
    for _, handle in asked:
        os.close(handle)


def _end(watched: Board, report: Report) -> None:
    for _, part in watched.parts():
        if part.state == board.RUNNING and is_alive(part.pid):
            os.kill(part.pid, signal.SIGKILL)
            report.ended.append(part.pid)


def _where(part: board.RankBoard) -> dict[str, Any]:
    """Where a rank stands: its ubatch line that moved last, else its main line."""
    lines = part.lines()
    ubatches = [line for line in lines if line.ubatch >= 0 and line.state not in (board.IDLE, board.BATON)]
    if not lines:
        return {"step": -1, "layer": -1, "ubatch": -1, "point": ""}
    line = (ubatches or lines)[0]
    return {"step": line.step, "layer": line.layer, "ubatch": line.ubatch, "point": line.point}


def _place(found: board.Finding) -> dict[str, Any]:
    return {"step": found.step, "layer": found.layer, "ubatch": found.ubatch, "point": found.point}


def _spot(at: dict[str, Any]) -> str:
    words = [f"step {at['step']}", f"layer {at['layer']}", f"ubatch {at['ubatch']}"]
    known = [w for w, name in zip(words, ("step", "layer", "ubatch"), strict=True) if at[name] >= 0]
    known += [f"at {at['point']}"] if at["point"] else []
    return f"({' '.join(known)})"


def _jsonable(waiter: Waiter) -> dict[str, Any]:
    return {**asdict(waiter), "needs": [list(node) for node in waiter.needs], "missing": list(waiter.missing)}
