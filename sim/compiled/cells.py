"""The arrays of a compiled schedule cut into cells: an operation touches a cell whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.compiled.program import CompiledSchedule

_Use = tuple[int, int, int, bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Bytes of one array that the same operations touch.

    Attributes:
        window: as of `Array`.
        uses: (place of the operation, whether it writes), in order of issue.
    """

    array: str
    window: str
    uses: tuple[tuple[int, bool], ...]


def cells_of(program: CompiledSchedule) -> Iterator[Cell]:
    """Cells that an operation writes."""
    touched: dict[int, list[_Use]] = {}
    for place, op in enumerate(program.ops):
        for accesses, writes in ((op.reads, False), (op.writes, True)):
            for access in accesses:
                touched.setdefault(access.buffer, []).append((access.offset, access.stop, place, writes))
    for index, uses in touched.items():
        array = program.arrays[index]
        whole = array.window != "" or len({(start, stop) for start, stop, _, _ in uses}) == 1
        for found in {_all(uses)} if whole else set(_parts(uses)):
            if any(writes for _, writes in found):
                yield Cell(array=array.name, window=array.window, uses=found)


def _all(uses: list[_Use]) -> tuple[tuple[int, bool], ...]:
    return tuple((place, writes) for _, _, place, writes in uses)


def _parts(uses: list[_Use]) -> Iterator[tuple[tuple[int, bool], ...]]:
    """Between any two ends of accesses. A strided access counts as all bytes from its first to its last."""
    ends = sorted({end for start, stop, _, _ in uses for end in (start, stop)})
    for low, high in zip(ends, ends[1:], strict=False):
        yield tuple((place, writes) for start, stop, place, writes in uses if start <= low and high <= stop)
