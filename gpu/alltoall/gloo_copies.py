"""`World.symmetric` on CPU tensors, between real processes over gloo (needs torch): no symmetric memory, same promises.

A send starts the bytes and returns; `wait` of the arrival is where the rank waits for its peers. Channels are numbered
apart, so that calls of two ubatches cannot meet each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gpu import board
from gpu.group import rows_as_bytes

if TYPE_CHECKING:
    from gpu.device import GpuWorld

NAME = "symm_copy"


class GlooCopies:
    """One rank's end; see `dbo.moe.symm_copy.SymmetricCopies`."""

    def __init__(self, world: GpuWorld, process_group: Any) -> None:
        self.world = world
        self.process_group = process_group

    def exchange_counts(self, counts: torch.Tensor, *, channel: tuple[int, str]) -> list[list[int]]:
        """Everybody's counts `[R]`, by rank; the host waits for them."""
        world, recorder = self.world, self.world.trace
        index = world.next_index(NAME)
        recorder.came(NAME, index, f"{channel[1]}.counts")
        recorder.waits(board.COLLECTIVE, "receive counts of symm_copy", NAME, index)
        table = [torch.empty_like(counts) for _ in range(world.size)]
        with world.peers_may_fail():
            dist.all_gather(table, counts.contiguous(), group=self.process_group)
        recorder.goes_on()
        recorder.end_visit(recorder.task)
        recorder.on_line(
            "host.wait", world.current_stream().name, {"why": "receive counts of symm_copy", "declared": True}
        )
        return [row.tolist() for row in table]

    def send(
        self, arrays: Sequence[torch.Tensor], mine: Sequence[int], theirs: Sequence[int], *, channel: tuple[int, str]
    ) -> GlooArrival:
        """Rows of each of `arrays` go to peers by `mine` and come by `theirs`."""
        world = self.world
        world.trace.launches()
        index = world.next_index(NAME)
        world.trace.came(NAME, index, channel[1])
        received, works = [], []
        for array in arrays:
            incoming = array.new_empty((sum(theirs), *array.shape[1:]))
            works.append(
                dist.all_to_all_single(
                    rows_as_bytes(incoming), rows_as_bytes(array.contiguous()), list(theirs), list(mine),
                    group=self.process_group, async_op=True,
                )
            )  # fmt: skip
            received.append(incoming)
        return GlooArrival(world, index, channel[1], tuple(received), works)


class GlooArrival:
    """What peers are sending in one exchange."""

    def __init__(
        self, world: GpuWorld, index: int, op: str, received: tuple[torch.Tensor, ...], works: list[Any]
    ) -> None:
        self._world = world
        self._index = index
        self._op = op
        self._received = received
        self._works = works

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The rows by source rank, one array for each that was sent."""
        recorder = self._world.trace
        recorder.launches()
        recorder.waits(board.COLLECTIVE, f"the peers' {self._op}", NAME, self._index)
        with self._world.peers_may_fail():
            for work in self._works:
                work.wait()
        recorder.goes_on()
        return self._received
