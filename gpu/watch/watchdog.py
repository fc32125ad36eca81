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
from dbo.contract.patience import Patience
from gpu.watch import flight_recorder as board
from gpu.watch.flight_recorder import Board, is_alive
from gpu.watch.stuck import Differing, differing_exchange, text_of, waiters_of

POLL_S = 0.02
SLOW = 5
"""A line that computes and does not move may be slow: it gets so many times the patience, unless told otherwise."""
GRACE_S = 0.3
"""What cannot end well stays so: this long, in case what others still write says more."""
FAILED_GRACE_S = 1.0
"""After an error the peers notice by themselves and leave their own word, which takes a little longer."""
HEAR_S, ANSWER_S = 0.5, 5.0
"""A rank that holds its interpreter's lock does not hear the watchdog; one that does may have a long trace to write."""


@dataclass(kw_only=True)
class StuckReport:
    """Why a run was ended.

    Attributes:
        reason: "stalled" | "died" | "failed" | "differing" | "unequal-yields" | "launcher gone".
        rank, ubatch, point, step, layer: where it began, as far as the board tells.
        text: the wait-for report, and what was found beside it.
        waiters: what every blocked line waits for.
        ended: process ids that the watchdog ended.
        moved_s, reported_s: when the board moved last, and when this was written, by `time.monotonic`.
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
    moved_s: float = 0.0
    reported_s: float = 0.0


def watch(folder: Path, patience: Patience) -> None:
    """Watch until every rank of the run in `folder` has ended; end them when they cannot go on.

    Exits 0, or 1 with `report.json` written.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what an interrupt means
    watched = Board.open(folder / "board")
    parent = os.getppid()
    stall_s = patience.stall_s
    slow_s = SLOW * stall_s if patience.slow_s is None else patience.slow_s
    last, since = -1, time.monotonic()
    trouble: tuple[str, float] | None = None
    agreed: dict[str, int] = {}
    while not all(part.state in (board.ENDED, board.FAILED) for _, part in watched.parts()):
        time.sleep(POLL_S)
        if os.getppid() != parent:
            _end(watched, StuckReport(reason="launcher gone", text="the launcher is gone"))
            os._exit(1)
        now = time.monotonic()
        moved = sum(line.seq for _, part in watched.parts() for line in part.lines())
        if moved != last:
            last, since = moved, now
        report = _trouble(watched, agreed)
        if report is None:
            trouble = None
            if now - since < min(stall_s, slow_s) or not (report := _stalled(watched, now - since, stall_s, slow_s)):
                continue
        else:
            if trouble is None or trouble[0] != report.reason:
                trouble = report.reason, now
            grace = FAILED_GRACE_S if report.reason == "failed" else GRACE_S
            if now - trouble[1] < grace or (report.reason == "unequal-yields" and now - since < grace):
                continue
        _conclude(folder, watched, report, moved_s=since)
        os._exit(1)
    report = _trouble(watched, agreed)
    if report is not None and report.reason != "failed" and any(p.state == board.FAILED for _, p in watched.parts()):
        # All have ended by themselves, some with an error that is only the effect of this.
        _conclude(folder, watched, report, moved_s=since)
        os._exit(1)
    os._exit(0)


def _trouble(watched: Board, agreed: dict[str, int]) -> StuckReport | None:
    """What cannot end well, however long one waits: causes before effects. `agreed`: see `differing_exchange`."""
    for rank, part in watched.parts():
        found = part.finding()
        if found is not None and found.kind == "unequal-yields":
            at = _place(found)
            text = f"rank {rank} ubatch {found.ubatch} {found.text} {_spot(at)}"
            return StuckReport(reason="unequal-yields", rank=rank, text=text, **at)
    differing = differing_exchange(watched, agreed)
    if differing is not None:
        return _differing(differing)
    for rank, part in watched.parts():
        if part.state == board.RUNNING and not is_alive(part.pid):
            at = _where(part)
            return StuckReport(
                reason="died", rank=rank, text=f"rank {rank} (process {part.pid}) is gone {_spot(at)}", **at
            )
    for rank, part in watched.parts():
        if part.state == board.FAILED:
            found = part.finding()
            at = _where(part) if found is None else _place(found)
            what = found.text if found is not None else "its program raised"
            return StuckReport(reason="failed", rank=rank, text=f"rank {rank} failed {_spot(at)}: {what}", **at)
    return None


def _differing(found: Differing) -> StuckReport:
    entry = found.entry
    return StuckReport(
        reason="differing",
        rank=found.rank,
        ubatch=entry.ubatch,
        point=entry.point,
        step=entry.step,
        layer=entry.layer,
        text=found.text,
    )


def _stalled(watched: Board, still_s: float, stall_s: float, slow_s: float) -> StuckReport | None:
    """Nothing has moved for `still_s`: the report, if lines wait for each other, or too long for one that computes."""
    waiters, running = waiters_of(watched)
    stuck = text_of(waiters, running)
    if stuck is None and still_s >= slow_s and waiters:
        return _slow(watched, waiters, running)
    if stuck is None or still_s < stall_s:
        return None
    core, text = stuck
    missing = [rank for waiter in core for rank in waiter.missing]
    first = core[0]
    rank = missing[0] if missing else first.rank
    return StuckReport(
        reason="stalled",
        text=text,
        rank=rank,
        ubatch=first.ubatch,
        point=first.point,
        step=first.step,
        layer=first.layer,
    )


def _slow(watched: Board, waiters: list[Waiter], running: list[Node]) -> StuckReport:
    """Lines wait for one that runs and does not come to its next point."""
    needed = {need for waiter in waiters for need in waiter.needs}
    rank, line = min(needed & set(running), default=min(running))
    at = _where(watched.rank(rank))
    lines = [f"rank {rank} {line} runs {_spot(at)} and has come to no further point", *map(describe, waiters)]
    return StuckReport(reason="stalled", rank=rank, text="\n  ".join(lines), **at)


def _conclude(folder: Path, watched: Board, report: StuckReport, *, moved_s: float) -> None:
    """Write the report with every rank's wait, let ranks leave their traces, end them."""
    waiters, running = waiters_of(watched)
    stuck = text_of(waiters, running)
    if report.reason != "stalled":
        found = [report.text, *([stuck[1]] if stuck is not None else [])]
        report.text = "\n".join(found)
    report.waiters = [_jsonable(w) for w in waiters]
    _ask_for_traces(folder, watched)
    _end(watched, report)
    report.moved_s, report.reported_s = moved_s, time.monotonic()
    partial = folder / "report.partial"
    partial.write_text(json.dumps(asdict(report)))
    os.replace(partial, folder / "report.json")


def _ask_for_traces(folder: Path, watched: Board) -> None:
    """Have every living rank write what it has recorded; one that cannot hear is not waited for."""
    asked = []
    for rank, part in watched.parts():
        fifo = folder / f"rank{rank}.ask"
        if part.state == board.RUNNING and is_alive(part.pid) and fifo.exists():
            handle = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
            os.write(handle, b"?")
            asked.append((rank, part.pid, handle))
    start = time.monotonic()
    while time.monotonic() < start + ANSWER_S:
        patient = time.monotonic() < start + HEAR_S
        waiting = [
            pid
            for rank, pid, _ in asked
            if not (folder / f"rank{rank}.part").exists() and (patient or (folder / f"rank{rank}.heard").exists())
        ]
        if not any(map(is_alive, waiting)):
            break
        time.sleep(POLL_S)
    for _, _, handle in asked:
        os.close(handle)


def _end(watched: Board, report: StuckReport) -> None:
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


def _place(found: board.RankFinding) -> dict[str, Any]:
    return {"step": found.step, "layer": found.layer, "ubatch": found.ubatch, "point": found.point}


def _spot(at: dict[str, Any]) -> str:
    words = [f"step {at['step']}", f"layer {at['layer']}", f"ubatch {at['ubatch']}"]
    known = [w for w, name in zip(words, ("step", "layer", "ubatch"), strict=True) if at[name] >= 0]
    known += [f"at {at['point']}"] if at["point"] else []
    return f"({' '.join(known)})"


def _jsonable(waiter: Waiter) -> dict[str, Any]:
    return {**asdict(waiter), "needs": [list(node) for node in waiter.needs], "missing": list(waiter.missing)}
