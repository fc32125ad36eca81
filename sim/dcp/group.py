"""The collectives of a DCP group on the simulated machine, over symbols or numbers.

Each is one exchange on the caller's current stream: it reads every member's input when all have come, and writes its
own output at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dbo.dcp.interface import place_in_groups
from dbo.trace import kinds
from sim.collectives import SimGroup
from sim.work import Work

if TYPE_CHECKING:
    from sim.world import SimWorld


class Mover:
    """One member's input and output. In ordering mode nothing moves."""

    def __init__(self, take: Callable[[int], Any], give: Callable[[list[Any]], None]) -> None:
        self.take, self.give = take, give


def nothing(*values: Any) -> None:
    """Takes no value and writes none: ordering mode."""


class SimDCPGroup:
    """One rank's end; satisfies `dbo.dcp.groups.DCPGroup`. `moving` makes a `Mover`, see `sim.dcp.numeric`."""

    device_group = None

    def __init__(self, world: SimWorld, size: int, moving: Any) -> None:
        replica, self.rank, self.members = place_in_groups(world.rank, size)
        self.world_size = size
        self.world = world
        self._moving = moving
        self._group = SimGroup(world, f"dcp{replica}", members=self.members)
        world.restarted.append(self._group.restart)

    def all_to_all_single(self, output: Any, input: Any) -> None:
        """Chunk c of `input` `[C, …]` goes to peer c."""
        share = (self.world_size - 1) / self.world_size
        self._meet("all_to_all_single", output, input, self._moving.all_to_all(output, input), share)

    def all_gather_into_tensor(self, output: Any, input: Any) -> None:
        """Inputs of all peers in `output` `[C, …]`."""
        self._meet("all_gather", output, input, self._moving.all_gather(output, input), self.world_size - 1)

    def reduce_scatter_tensor(self, output: Any, input: Any) -> None:
        """The sum of chunk c of all inputs `[C, …]`."""
        share = (self.world_size - 1) / self.world_size
        self._meet("reduce_scatter", output, input, self._moving.reduce_scatter(output, input), share)

    def all_reduce(self, output: Any, input: Any) -> None:
        """The sum of all inputs, added in order of peers, so that every peer has the same bits."""
        share = 2 * (self.world_size - 1) / self.world_size
        self._meet("all_reduce", output, input, self._moving.all_reduce(output, input), share)

    def _meet(self, op: str, output: Any, input: Any, mover: Mover, share: float) -> None:
        tensors = self.world.tensors
        nbytes = tensors.itemsize(input)
        for n in input.shape:
            nbytes *= int(n)
        self._group.exchange(
            Work(
                kind=kinds.EXCHANGE,
                name=op,
                reads=(tensors.access(input),),
                writes=(tensors.access(output),),
                duration_us=self.world.cost.collective(int(nbytes * share)),
            ),
            signature=(list(map(int, input.shape)), str(input.dtype)),
            value=mover,
            connect=self._connect,
        )

    def _connect(self, members: Mapping[int, Mover], rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
        taken: list[Any] = []

        def begin() -> None:
            taken.extend(members[peer].take(self.rank) for peer in self.members)

        return begin, lambda: members[rank].give(taken)


class SymbolMoving:
    """Moves nothing."""

    def all_to_all(self, output: Any, input: Any) -> Mover:
        return Mover(nothing, nothing)

    all_gather = reduce_scatter = all_reduce = all_to_all
