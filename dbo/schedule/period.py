"""From one period of the ring back to the program that every ubatch follows, and the offset between them.

* Where the ubatch changes, the one before yields.
* Where the backend has hooks, a receive of ubatch i stands in another ubatch's run: there is a `hook`, and i takes the
  result in its next run. Where it has none, every receive is its owner's.
* A period starts with the leader's D send; how far its runs are ahead of the next ubatch's is the offset.

A period says nothing of streams: with hooks everything is on compute; without, sends and the copy are on comm, and so
is the receive that the copy follows. It does not show a run without points, nor where a carried wait crosses the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dbo.errors import ScheduleSyntaxError
from dbo.schedule.model import OPTIONAL_POINTS, POINTS, REQUIRED_POINTS, Item, Point, RunRecvHook, Yield
from dbo.schedule.order import Mark, label


def derive(marks: Sequence[Mark], *, hooks: bool, source: str) -> tuple[tuple[Item, ...], int]:
    """One ubatch's items and the offset, from one period of the ring.

    Args:
        hooks: whether the peer runs the receives.

    Raises:
        ScheduleSyntaxError: the marks are no period of any schedule.
    """
    _check_complete(marks, source)
    leader, num_ubatches = marks[0].ubatch, max(mark.ubatch for mark in marks) + 1
    owners = [(mark.ubatch - leader) % num_ubatches for mark in marks]
    if hooks:
        entries = _with_hooks(marks, owners, source)
    else:
        entries = [(owner, Point(mark.point)) for owner, mark in zip(owners, marks, strict=True)]
    programs, runs = _split(entries)
    for ubatch, items in enumerate(programs):
        if items != programs[0]:
            odd = (ubatch + leader) % num_ubatches
            fix = f"make it do what the leader, {leader}, does"
            raise _error(marks[0], f"all ubatches follow one program: ubatch={odd}; {fix}", source)
    offsets = [(runs[u] - runs[u + 1]) % _yields(programs[0]) for u in range(len(programs) - 1)]
    if any(offset != offsets[0] for offset in offsets):
        raise _error(marks[0], f"one offset lies between neighbours: offsets={offsets}; take turns in order", source)
    return _with_streams(programs[0], hooks), offsets[0]


def _error(mark: Mark, message: str, source: str) -> ScheduleSyntaxError:
    return ScheduleSyntaxError(message, line=mark.line, column=mark.column, source=source)


def _check_complete(marks: Sequence[Mark], source: str) -> None:
    """Every ubatch reaches every point once."""
    seen: set[tuple[str, int]] = set()
    for mark in marks:
        if mark.point not in POINTS:
            raise _error(mark, f"a dispatch or combine has halves: point={mark.name}; write its send and recv", source)
        if (mark.point, mark.ubatch) in seen:
            raise _error(mark, f"a period reaches a point once: point={mark.name}; drop one", source)
        seen.add((mark.point, mark.ubatch))
    last = marks[-1]
    num_ubatches = max(mark.ubatch for mark in marks) + 1
    if num_ubatches < 2:
        raise _error(last, "an order interleaves at least 2 ubatches: ubatches=1; add the others", source)
    optional = {mark.point for mark in marks} & set(OPTIONAL_POINTS)
    for point in (*REQUIRED_POINTS, *sorted(optional)):
        for ubatch in range(num_ubatches):
            if (point, ubatch) not in seen:
                name = label(point, ubatch, pretty=False)
                raise _error(last, f"a period reaches every point: missing={name}; add it", source)
    if marks[0].point != "D.send":
        raise _error(marks[0], f"an order starts with the leader's D send: first={marks[0].name}; rotate it", source)


def _with_hooks(marks: Sequence[Mark], owners: Sequence[int], source: str) -> list[tuple[int, Item]]:
    """(runner, item) in order: a hook where a peer receives, and the owner's take in front of its next point."""
    own = [i for i, mark in enumerate(marks) if not mark.point.endswith("recv")]
    runner_of: dict[int, int] = {}
    takes: dict[int, list[Item]] = {}
    for i, mark in enumerate(marks):
        if i in own:
            continue
        before = owners[max((j for j in own if j < i), default=own[-1])]
        after = owners[min((j for j in own if j > i), default=own[0])]
        if before == after == owners[i]:
            fix = "move it into another ubatch's run"
            raise _error(mark, f"a peer runs a receive hook: its owner is around point={mark.name}; {fix}", source)
        runner_of[i] = before if before != owners[i] else after
        following = (j % len(marks) for j in range(i + 1, i + len(marks)))
        taken_at = next(j for j in following if j in own and owners[j] == owners[i])
        takes.setdefault(taken_at, []).append(Point(mark.point))
    entries: list[tuple[int, Item]] = []
    for i, mark in enumerate(marks):
        if i in runner_of:
            entries.append((runner_of[i], RunRecvHook()))
            continue
        entries += [(owners[i], item) for item in (*takes.get(i, ()), Point(mark.point))]
    return entries


def _split(entries: Sequence[tuple[int, Item]]) -> tuple[list[tuple[Item, ...]], list[int]]:
    """Each ubatch's items from A0 on, and the number of its first run (0: the run with A0)."""
    num_ubatches = max(runner for runner, _ in entries) + 1
    # Start where ubatch 0 gets the baton, so that no run is cut in two.
    start = next(i for i in range(len(entries)) if entries[i][0] == 0 and entries[i - 1][0] != 0)
    turned = [*entries[start:], *entries[:start]]
    programs: list[list[Item]] = [[] for _ in range(num_ubatches)]
    for (runner, item), (following, _) in pairwise([*turned, turned[0]]):
        programs[runner].append(item)
        if following != runner:
            programs[runner].append(Yield())
    first_runs = []
    for items in programs:
        first = items.index(Point("A0"))
        # The run in front was entered `yields before A0` runs before the one with A0.
        first_runs.append(-_yields(items[:first]))
        items[:] = items[first:] + items[:first]
    return [tuple(items) for items in programs], first_runs


def _yields(items: Sequence[Item]) -> int:
    return sum(isinstance(item, Yield) for item in items)


def _with_streams(items: Sequence[Item], hooks: bool) -> tuple[Item, ...]:
    comm = set() if hooks else {"D.send", "C.send", "copy"}
    if Point("copy") in items and not hooks:
        comm.add("C.recv")
    return tuple(Point(i.name, "comm") if isinstance(i, Point) and i.name in comm else i for i in items)
