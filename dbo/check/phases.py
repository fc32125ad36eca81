"""The quick way to see that a buffer is free of races: its accesses fall into phases.

Each phase as a whole comes before the next one, and within a phase nothing conflicts. Conflicting accesses then lie in
different phases and are ordered, so no pair of them has to be looked at: with R ranks that write into each other's
buffers, R * R pairs become R comparisons of a clock. What does not fit (a race never does) is left to the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dbo.check.happens import Frontier, HappensBefore
from dbo.trace import Access, Record
from dbo.trace.accesses import overlaps

_FEW = 4
"""Up to so many accesses are compared pair by pair."""


class Use(Protocol):
    """One access of a record."""

    @property
    def access(self) -> Access: ...
    @property
    def writes(self) -> bool: ...
    @property
    def record(self) -> Record: ...


def in_phases(uses: Sequence[Use], happens: HappensBefore) -> bool:
    """Whether phases show that no two of `uses` (of one buffer, in trace order) race. False: not shown."""
    before, phase = _Phase(), _Phase()
    for use in uses:
        id = use.record.id
        if phase.members and happens.ordered(phase.members[-1].record.id, id) and phase.precedes(id, happens):
            if not _harmless(phase.members):
                return False
            before, phase = phase, _Phase()
        elif not before.precedes(id, happens):
            return False
        phase.members.append(use)
    return _harmless(phase.members)


class _Phase:
    """Accesses that nothing orders, or that need no order."""

    def __init__(self) -> None:
        self.members: list[Use] = []
        self._frontier: tuple[int, Frontier] | None = None

    def precedes(self, id: int, happens: HappensBefore) -> bool:
        """Whether every member happens before record `id`."""
        size = len(self.members)
        if size <= _FEW:
            return all(happens.ordered(member.record.id, id) for member in self.members)
        if self._frontier is None or self._frontier[0] != size:
            self._frontier = size, happens.frontier([member.record.id for member in self.members])
        return happens.follows(id, self._frontier[1])


def _harmless(phase: Sequence[Use]) -> bool:
    """Whether no two of the phase's accesses conflict; accesses of one record never do."""
    if len(phase) < 2 or not any(use.writes for use in phase):
        return True
    if len(phase) > _FEW:
        return _apart([use.access for use in phase])
    return not any(
        (a.writes or b.writes) and a.record is not b.record and overlaps(a.access, b.access)
        for i, a in enumerate(phase)
        for b in phase[i + 1 :]
    )


def _apart(accesses: Sequence[Access]) -> bool:
    """Whether no two of many accesses share a byte: intervals, or equal boxes within one period of their rows."""
    ordered = sorted(accesses, key=lambda access: access.offset)
    first = ordered[0]
    if all(access.strides == (1,) for access in ordered):
        return all(a.offset + a.sizes[0] <= b.offset for a, b in zip(ordered, ordered[1:], strict=False))
    if len(first.sizes) != 2 or any(a[2:] != first[2:] for a in ordered):
        return False
    period, width = first.strides[0], first.sizes[1]
    if ordered[-1].offset - first.offset + width > period:
        return False
    return all(a.offset + width <= b.offset for a, b in zip(ordered, ordered[1:], strict=False))
