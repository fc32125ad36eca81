"""From the board to the wait-for report: who waits for whom, and where ranks first came to different exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from dbo.check.waitfor import Node, Waiter, minimal_stuck_set, report
from gpu.watch import flight_recorder as board
from gpu.watch.flight_recorder import GROUPS, Board, Entry, LineState

POINT_ORDER = {name: at for at, name in enumerate(("A0", "A1", "D.send", "D.recv", "MLP", "C.send", "S", "C.recv"))}

_KINDS = {board.BATON: "baton", board.BARRIER: "barrier", board.JOIN: "join", board.DEVICE: "device"}


def waiters_of(watched: Board) -> tuple[list[Waiter], list[Node]]:
    """Every line that waits, and the lines that run.

    Three things run beside lines that say so. A rank that has come to nothing yet is on its way. A communicator is at work
    for an exchange that all have come to: its first one may set up connections or compile kernels for seconds. And a
    device may be at work, or wait for what a peer has announced, as long as some host of a peer does not wait.
    """
    lines = {rank: part.lines() for rank, part in watched.parts() if _lives(part)}
    logs = {rank: {group: part.entries(group) for group in GROUPS} for rank, part in watched.parts()}
    waiters = [
        _waiter(rank, line, lines, _as_seen_by(rank, logs, watched))
        for rank, own in lines.items()
        for line in own
        if line.waits
    ]
    running = [(rank, line.name) for rank, own in lines.items() for line in own if line.state == board.BUSY]
    running += [(rank, "main") for rank, own in lines.items() if not own]
    running += [need for waiter in waiters for need in waiter.needs if need[1] in GROUPS]
    acting = {rank for rank, _ in running}
    running += [(w.rank, "compute") for w in waiters if (w.rank, "compute") in w.needs and acting - {w.rank}]
    return waiters, running


def _as_seen_by(
    rank: int, logs: dict[int, dict[str, dict[int, Entry]]], watched: Board
) -> dict[int, dict[str, dict[int, Entry]]]:
    """The logs without those that `rank` has no part in: ranks of other DCP groups look as if they had come along."""
    peers = next((circle for circle in watched.circles("dcp") if rank in circle), ())
    return {r: own if r in peers else own | {"dcp": logs[rank]["dcp"]} for r, own in logs.items()}


def text_of(waiters: list[Waiter], running: list[Node]) -> tuple[tuple[Waiter, ...], str] | None:
    """The stuck set and the report, or None when every waiter can still be served."""
    core = minimal_stuck_set(waiters, running=running)
    return (core, report(waiters, running=running)) if core else None


def _waiter(
    rank: int, line: LineState, lines: dict[int, list[LineState]], logs: dict[int, dict[str, dict[int, Entry]]]
) -> Waiter:
    needs: list[Node] = []
    missing: tuple[int, ...] = ()
    group, index, mismatch = line.group, line.index, ""
    if line.state == board.DEVICE:
        # What keeps the device busy is the first exchange that a peer has not come to.
        group, index, missing = _unanswered(rank, logs)
        needs = [(rank, "compute")] if not missing else []
    elif line.state == board.COLLECTIVE:
        missing = tuple(r for r in sorted(logs) if index not in logs[r][group] and _behind(logs[r][group], index))
        mismatch = _mismatch(group, index, logs)
        if mismatch:
            needs = [(r, _line_of(r, lines)) for r in sorted(lines) if r != rank]
        elif not missing:
            needs = [(rank, group)]
    else:
        wanted = "u" if line.state == board.JOIN else ""
        needs = [(rank, o.name) for o in lines[rank] if o.name != line.name and o.name.startswith(wanted)]
        needs = [n for n in needs if _in_step(n[1], lines[rank])]
        if line.state == board.BATON:  # who has started the ring and waits for its end gives no baton
            joining = [(rank, o.name) for o in lines[rank] if o.state == board.JOIN]
            needs = [n for n in needs if n not in joining]
    needs += [(r, _line_of(r, lines)) for r in missing]
    return Waiter(
        rank=rank,
        line=line.name,
        what=line.what,
        needs=tuple(needs),
        any_of=line.state == board.BATON,
        ubatch=line.ubatch,
        point=line.point,
        layer=line.layer,
        step=line.step,
        group=group,
        index=index,
        missing=missing,
        mismatch=mismatch,
    )


def _lives(part: board.RankBoard) -> bool:
    return part.state == board.RUNNING and board.is_alive(part.pid)


def _in_step(name: str, lines: list[LineState]) -> bool:
    return any(line.name == name and line.state != board.IDLE for line in lines)


def _behind(entries: dict[int, Entry], index: int) -> bool:
    """Whether a rank has not come as far as exchange `index`; one passed long ago is forgotten, not missing."""
    return max(entries, default=-1) < index


def _unanswered(rank: int, logs: dict[int, dict[str, dict[int, Entry]]]) -> tuple[str, int, tuple[int, ...]]:
    for group in GROUPS:
        for index in sorted(logs[rank][group]):
            missing = tuple(r for r in sorted(logs) if _behind(logs[r][group], index))
            if missing:
                return group, index, missing
    return "", -1, ()


def _line_of(rank: int, lines: dict[int, list[LineState]]) -> str:
    """The host line of `rank` that ought to come: the ubatch that is not waiting for its turn, else its main line."""
    off = (board.IDLE, board.BATON)
    names = [line.name for line in lines.get(rank, []) if line.name != "main" and line.state not in off]
    return names[0] if names else "main"


def _mismatch(group: str, index: int, logs: dict[int, dict[str, dict[int, Entry]]]) -> str:
    ops = {entry.op for entry in (logs[r][group].get(index) for r in logs) if entry is not None}
    if len(ops) > 1:
        return "COLLECTIVE_TYPE_MISMATCH"
    tags = {entry.tag for entry in (logs[r][group].get(index) for r in logs) if entry is not None}
    return "COLLECTIVE_TAG_MISMATCH" if len(tags) > 1 else ""


@dataclass(frozen=True, kw_only=True)
class Differing:
    """The first exchange to which ranks came with different ones in mind.

    Attributes:
        rank: the one that left something out or came too early. entry: what it ought to have come with.
        text: one sentence.
    """

    rank: int
    entry: Entry
    text: str


def differing_exchange(watched: Board, agreed: dict[str, int] | None = None) -> Differing | None:
    """The first sequence number of a communicator at which what ranks are doing differs.

    Args:
        watched: the board.
        agreed: by communicator and first rank, a number below which all exchanges are known to be alike; raised here, so
            that one who asks again and again looks at each exchange once.
    """
    agreed = {} if agreed is None else agreed
    apart = [(group, circle) for group in GROUPS for circle in watched.circles(group)]
    for group, circle in apart:
        if group == "dp.cpu":
            continue  # host-level: steps that drift are the coordination's own finding
        key, parts = f"{group}/{circle[0]}", [(rank, watched.rank(rank)) for rank in circle]
        known = {rank: part.entries(group, agreed.get(key, 0)) for rank, part in parts}
        settled = True
        for index in sorted(set().union(*known.values())):
            came = {rank: entries[index] for rank, entries in known.items() if index in entries}
            if len({entry.signature for entry in came.values()}) > 1:
                logs = {rank: part.entries(group) for rank, part in parts}
                return _blame(group, index, came, logs, {rank: part.lines() for rank, part in parts})
            settled = settled and len(came) == len(circle)
            if settled:
                agreed[key] = index + 1
    return None


def _blame(
    group: str, index: int, came: dict[int, Entry], logs: dict[int, dict[int, Entry]], lines: dict[int, list[LineState]]
) -> Differing:
    """Who skipped: a rank that stands beyond an exchange that a peer is in, and never came to it."""
    shown = ", ".join(f"rank {r} at {_show(entry)}" for r, entry in came.items())
    for entry in came.values():
        for rank, own in came.items():
            if own.tag != entry.tag and _passed(lines[rank], entry) and not _came(logs[rank], entry):
                text = f"group {group} #{index}: {shown}; rank {rank} skipped {_show(entry)}"
                return Differing(rank=rank, entry=entry, text=text)
    counts = [entry.signature for entry in came.values()]
    odd = min(came, key=lambda r: (counts.count(came[r].signature), -r))
    return Differing(rank=odd, entry=came[odd], text=f"group {group} #{index}: {shown}")


def _passed(lines: list[LineState], entry: Entry) -> bool:
    """Whether the ubatch of `entry` stands beyond it in its own program."""
    wanted = "main" if entry.ubatch < 0 else f"u{entry.ubatch}"
    there = (entry.step, entry.layer, POINT_ORDER.get(entry.point, len(POINT_ORDER)))
    for line in lines:
        if line.name == wanted:
            here = (line.step, line.own_layer, POINT_ORDER.get(line.own_point, len(POINT_ORDER)))
            # A line that stands there and has handed the baton on has done what it had to do there.
            return here > there or (here == there and line.state == board.BATON)
    return False


def _came(entries: dict[int, Entry], entry: Entry) -> bool:
    return any(own.tag == entry.tag for own in entries.values())


def _show(entry: Entry) -> str:
    who = f" of ubatch {entry.ubatch}" if entry.ubatch >= 0 else ""
    return f"{entry.point or entry.op}{who} (step {entry.step} layer {entry.layer})"
