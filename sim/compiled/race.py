"""Races of a compiled schedule, for any number of ranks, in one pass over the program of one rank.

Why one rank's program is enough. All ranks run the same program and every meeting has all of them, so exchanging two
ranks maps the partial order onto itself. What an operation of rank r knows about another rank is therefore the same
for all other ranks, and its vector clock, one entry a line of every rank, collapses to two: `own`, what it knows about
the lines of r, and `foreign`, what it knows about those lines of any other rank. Two operations of different ranks are
ordered if and only if they are in a run of two ranks: a path that leads over a third rank enters and leaves it at
meetings, between which the second rank has the same operations to offer. Faults that hit one rank break the symmetry:
they are run with the real ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.compiled.program import CompiledSchedule

_Clock = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks:
    """For each operation: by line, how many operations happen before it or are it.

    Attributes:
        count: the operation's own number on its line, from 1.
        line: of the operation, as an index.
        own, foreign: about its own rank, and about any other.
    """

    line: list[int]
    count: list[int]
    own: list[_Clock]
    foreign: list[_Clock]

    def ordered(self, a: int, b: int, *, same_rank: bool) -> bool:
        """Whether `a`, of the same rank or of another one, happens before `b`."""
        known = self.own[b] if same_rank else self.foreign[b]
        return a != b and known[self.line[a]] >= self.count[a]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledRace:
    """Two operations that touch one array, one of them to write, in no fixed order.

    Attributes:
        first, second: places in the program, `first` is issued earlier.
        same_rank: whether they are two operations of one rank, or of two.
    """

    array: str
    first: int
    second: int
    same_rank: bool


def clocks_of(program: CompiledSchedule) -> Clocks:
    """Collapsed vector clocks of every operation."""
    numbers = {name: i for i, name in enumerate(sorted({op.line for op in program.ops}))}
    width = len(numbers)
    counts = [0] * width
    clocks = Clocks(line=[], count=[], own=[], foreign=[])
    own, foreign = clocks.own, clocks.foreign
    for op, before in zip(program.ops, program.before_on_line, strict=True):
        line = numbers[op.line]
        counts[line] += 1
        mine = list(own[before]) if before >= 0 else [0] * width
        other = foreign[before] if before >= 0 else [0] * width
        for source in op.after:
            mine = list(map(max, mine, own[source]))
            other = list(map(max, other, foreign[source]))
        if op.follows >= 0:
            # What the members know, each about itself, is the same vector on every rank.
            member = program.members[op.follows]
            of_me = foreign[member] if program.meetings[op.follows].of_others else own[member]
            mine = list(map(max, mine, of_me))
            other = list(map(max, other, own[member]))
        mine[line] = counts[line]
        clocks.line.append(line)
        clocks.count.append(counts[line])
        own.append(mine)
        foreign.append(other)
    return clocks


def find_races(program: CompiledSchedule, clocks: Clocks | None = None) -> tuple[CompiledRace, ...]:
    """All pairs of conflicting operations without an order, of any two ranks; for each array a frontier is kept."""
    clocks = clocks or clocks_of(program)
    found: list[CompiledRace] = []
    for cell in program.cells:
        if len({clocks.line[index] for index, _ in cell.uses}) == 1 and not cell.window:
            continue
        frontier: list[tuple[int, bool]] = []
        for index, writes in cell.uses:
            kept = []
            for earlier, wrote in frontier:
                unordered = [
                    same_rank
                    for same_rank in _pairings(cell.window, wrote, writes)
                    if not clocks.ordered(earlier, index, same_rank=same_rank)
                ]
                if (writes or wrote) and earlier != index:
                    found += [
                        CompiledRace(array=cell.array, first=earlier, second=index, same_rank=same_rank)
                        for same_rank in unordered
                    ]
                # A write covers everything before it, a read earlier reads: a later race with what is dropped is one
                # with what dropped it.
                if unordered or (wrote and not writes):
                    kept.append((earlier, wrote))
            frontier = [*kept, (index, writes)]
    return tuple(found)


def _pairings(window: str, wrote: bool, writes: bool) -> tuple[bool, ...]:
    """Whose accesses can meet: those of one rank; in a window also what another rank writes.

    Two ranks never write the same region of a window, and reads of it are of the rank's own. A rank that writes on others
    only does not meet its own reads.
    """
    if not window or wrote == writes:
        return (True,)
    return (True, False) if window == "all" else (False,)
