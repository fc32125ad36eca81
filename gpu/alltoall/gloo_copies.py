"""`World.symmetric` on CPU tensors, between real processes over gloo (needs torch): no symmetric memory, same promises.

A send starts the bytes and returns; asking for the arrival's rows is where the rank waits for its peers. Channels are
numbered apart, so that calls of two ubatches cannot meet each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dbo.moe.symm_copy import Channel, Table
from gpu.alltoall.copies import NAME, arrives, exchange_counts, sending
from gpu.group import rows_as_bytes
from gpu.watch import flight_recorder as board

if TYPE_CHECKING:
    from gpu.device import GpuWorld


class GlooCopies:
    """One rank's end; see `dbo.moe.symm_copy.SymmetricCopies`."""

    def __init__(self, world: GpuWorld, process_group: Any) -> None:
        self.world = world
        self.process_group = process_group

    def reserve(self, *, ubatches: int, rows: int, row_bytes: Sequence[int]) -> None:
        """Nothing is reserved: messages come with their memory."""

    def restart(self) -> None:
        """Nothing is kept between two exchanges."""

    def own_rows(self, like: torch.Tensor, table: Table, *, channel: Channel) -> None:
        """Own rows travel like the others."""

    def exchange_counts(self, counts: torch.Tensor, *, channel: Channel) -> Table:
        return exchange_counts(self.world, self.process_group, counts, channel)

    def send(
        self, arrays: Sequence[torch.Tensor], table: Table, *, channel: Channel, to_all: bool = False
    ) -> GlooArrival:
        world = self.world
        mine, theirs = list(table[world.rank]), [sent[world.rank] for sent in table]
        with sending(world, channel) as index:
            received, works = [], []
            for array in arrays:
                rows = array.repeat(world.size, *[1] * (array.dim() - 1)) if to_all else array.contiguous()
                incoming = array.new_empty((sum(theirs), *array.shape[1:]))
                works.append(
                    dist.all_to_all_single(
                        rows_as_bytes(incoming),
                        rows_as_bytes(rows),
                        theirs,
                        mine,
                        group=self.process_group,
                        async_op=True,
                    )
                )
                received.append(incoming)
        return GlooArrival(world, index, channel[1], tuple(received), theirs, works)


class GlooArrival:
    """What peers are sending in one exchange."""

    def __init__(
        self,
        world: GpuWorld,
        index: int,
        op: str,
        received: tuple[torch.Tensor, ...],
        theirs: Sequence[int],
        works: list[Any],
    ) -> None:
        self._world = world
        self._index = index
        self._op = op
        self._received = received
        self._theirs = list(theirs)
        self._works = works

    def rows(self) -> tuple[torch.Tensor, ...]:
        recorder = self._world.trace
        recorder.waits(board.COLLECTIVE, f"the peers' {self._op}", NAME, self._index)
        arrives(self._world, self._op, self._index)
        with self._world.peers_may_fail():
            for work in self._works:
                work.wait()
        recorder.goes_on()
        recorder.launches()
        return self._received

    def blocks(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple(array.split(self._theirs) for array in self.rows())
