"""The wait-for report: who is stuck, on what, and who could still have helped.

Its input is a list of plain `Waiter`s, whoever makes them: the deadlock detector from a trace, the device watchdog from
its board, the reader of flight-recorder dumps. A waiter needs all of its `needs` to move on, or any one of them. A need
that neither waits itself nor is named as running has ended and will never help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

Node = tuple[int, str]
"""(rank, line): a host line such as "u0", or a stream."""


@dataclass(frozen=True, kw_only=True)
class Waiter:
    """A line that cannot go on.

    Attributes:
        rank, line: who waits; a stream waits with the operation at its head.
        what: what it waits for, in a few words ("the baton", "collective dispatch", "event comm_done").
        needs: lines that would have to act.
        any_of: True when one of `needs` is enough, False when all are needed.
        ubatch, point, layer, step: where it stands; -1 and "" where that does not apply.
        head: the operation at a stream's head.
        group, index: the collective it waits in, by communicator and sequence number.
        missing: ranks that have not joined that collective.
        mismatch: how the members differ, in the words of PyTorch's flight recorder ("COLLECTIVE_TYPE_MISMATCH", …).
        src: source line of the wait.
    """

    rank: int
    line: str
    what: str
    needs: tuple[Node, ...] = ()
    any_of: bool = False
    ubatch: int = -1
    point: str = ""
    layer: int = -1
    step: int = -1
    head: str = ""
    group: str = ""
    index: int = -1
    missing: tuple[int, ...] = ()
    mismatch: str = ""
    src: str = ""

    @property
    def node(self) -> Node:
        return self.rank, self.line

    def stuck_in(self, stuck: Set[Node], alive: Set[Node]) -> bool:
        """Whether it cannot move while `stuck` do not; needs that are not `alive` have ended."""
        hopeless = [need in stuck or need not in alive for need in self.needs]
        if not hopeless:
            return True
        return all(hopeless) if self.any_of else any(hopeless)


def minimal_stuck_set(waiters: Iterable[Waiter], *, running: Iterable[Node] = ()) -> tuple[Waiter, ...]:
    """A smallest set that keeps itself stuck: nobody in it can move unless another of it does, or somebody gone does.

    Waiters behind it are left out. Empty when the waiters can all move (then it was no deadlock).

    Args:
        running: lines that do not wait and have not ended, as a watchdog sees them; none in a deadlock.
    """
    waiting = {w.node: w for w in waiters}
    alive = waiting.keys() | set(running)
    stuck = _greatest(set(waiting), waiting, alive)
    if not stuck:
        return ()
    alone = [node for node in stuck if waiting[node].stuck_in(frozenset(), alive)]
    if alone:  # rather one that names what it needs than one that does not
        return (waiting[min(alone, key=lambda node: (not waiting[node].missing, not waiting[node].needs, node))],)
    core = _cycle(stuck, waiting)
    core = core if _greatest(core, waiting, alive) == core else stuck
    for node in sorted(core, reverse=True):
        if node in core:
            core = _greatest(core - {node}, waiting, alive) or core
    return tuple(waiting[node] for node in sorted(core))


def report(waiters: Sequence[Waiter], *, running: Iterable[Node] = ()) -> str:
    """The report as lines of text: a headline, the minimal stuck set, how many wait behind it."""
    running = frozenset(running)
    core = minimal_stuck_set(waiters, running=running)
    if not core:
        return "no line is stuck: every waiter can still be served"
    waiting = {w.node for w in waiters}
    lines = [headline(core)]
    lines += [f"  {describe(w)}{_gone(w, waiting | running)}" for w in core]
    behind = len(waiting) - len(core)
    if behind:
        lines.append(f"  {behind} more {'line waits' if behind == 1 else 'lines wait'} behind")
    return "\n".join(lines)


def headline(core: Sequence[Waiter]) -> str:
    """Who is stuck, in one sentence."""
    missing = sorted({rank for w in core for rank in w.missing})
    names = ", ".join(_name(w) for w in core)
    if missing:
        return f"{names}: stuck, missing {_ranks(missing)}"
    if len(core) == 1:
        return f"{names}: stuck on {core[0].what}, and nobody is left to provide it"
    return f"{names}: stuck, each waits for another of them"


def describe(waiter: Waiter) -> str:
    """One waiter in one line: where it stands, what it waits for, who is missing."""
    parts = [f"{_name(waiter)}"]
    spot = [f"step {waiter.step}"] if waiter.step >= 0 else []
    spot += [f"layer {waiter.layer}"] if waiter.layer >= 0 else []
    spot += [f"at {waiter.point}"] if waiter.point else []
    if spot:
        parts.append(f"({' '.join(spot)})")
    if waiter.head:
        parts.append(f"stream head {waiter.head}")
    parts.append(f"waits for {waiter.what}")
    if waiter.group:
        parts.append(f"[group {waiter.group} #{waiter.index}]")
    if waiter.missing:
        parts.append(f"missing {_ranks(waiter.missing)}")
    if waiter.mismatch:
        parts.append(f"{waiter.mismatch}")
    if waiter.needs:
        joined = (" or " if waiter.any_of else " and ").join(f"{line} of rank {rank}" for rank, line in waiter.needs)
        parts.append(f"needs {joined}")
    if waiter.src:
        parts.append(f"({waiter.src})")
    return " ".join(parts)


def _greatest(nodes: set[Node], waiting: Mapping[Node, Waiter], alive: Set[Node]) -> set[Node]:
    """The largest subset of `nodes` that keeps itself stuck."""
    stuck = set(nodes)
    changed = True
    while changed:
        movers = {node for node in stuck if not waiting[node].stuck_in(stuck, alive)}
        stuck -= movers
        changed = bool(movers)
    return stuck


def _cycle(stuck: set[Node], waiting: Mapping[Node, Waiter]) -> set[Node]:
    """The shortest cycle through the first stuck node that has one; any-of waiters count with every need."""
    best: set[Node] = set()
    for start in sorted(stuck):
        came: dict[Node, Node] = {}
        frontier = [start]
        while frontier and start not in came:
            reached: list[Node] = []
            for node in frontier:
                for need in waiting[node].needs:
                    if need in stuck and need not in came:
                        came[need] = node
                        reached.append(need)
            frontier = reached
        if start in came:
            cycle, node = {start}, came[start]
            while node != start:
                cycle.add(node)
                node = came[node]
            if not best or len(cycle) < len(best):
                best = cycle
            if len(best) <= 2:
                break
    return best


def _name(waiter: Waiter) -> str:
    who = f"rank {waiter.rank} {waiter.line}"
    return who if waiter.ubatch < 0 or waiter.line == f"u{waiter.ubatch}" else f"{who} (u{waiter.ubatch})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gone(waiter: Waiter, alive: Set[Node]) -> str:
    gone = [f"{line} of rank {rank}" for rank, line in waiter.needs if (rank, line) not in alive]
    return f"; {' and '.join(gone)} ended and will not act" if gone else ""
