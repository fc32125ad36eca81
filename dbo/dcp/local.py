"""Needs torch. C virtual ranks in one process: one thread each, collectives by copying. For tests and for reading.

def program(group):
    return dcp_a2a_lse_reduce(out[group.rank], lse[group.rank], group)

results = run_ranks(4, program)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Result = TypeVar("Result")


@dataclass
class _Meeting:
    """What the ranks share: a barrier, and the inputs of the collective that is under way."""

    barrier: threading.Barrier
    inputs: list[torch.Tensor | None]


@dataclass
class LocalDCPGroup:
    """One rank's view of the group; satisfies `DCPGroup`.

    Attributes:
        calls: names of the collectives that this rank has entered.
    """

    world_size: int
    rank: int
    meeting: _Meeting
    device_group: None = None
    calls: list[str] = field(default_factory=list)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Chunk c of `input` `[C, ...]` goes to rank c."""
        inputs = self._enter("all_to_all_single", input)
        for source, theirs in enumerate(inputs):
            output[source].copy_(theirs[self.rank])
        self.meeting.barrier.wait()

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Inputs of all ranks, in rank order."""
        torch.stack(self._enter("all_gather_into_tensor", input), out=output)
        self.meeting.barrier.wait()

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Sum of chunk `rank` of all inputs."""
        inputs = self._enter("reduce_scatter_tensor", input)
        torch.sum(torch.stack([theirs[self.rank] for theirs in inputs]), dim=0, out=output)
        self.meeting.barrier.wait()

    def _enter(self, name: str, input: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append(name)
        self.meeting.inputs[self.rank] = input
        self.meeting.barrier.wait()
        return [theirs for theirs in self.meeting.inputs if theirs is not None]


def run_ranks(world_size: int, program: Callable[[LocalDCPGroup], Result], *, timeout_s: float = 30.0) -> list[Result]:
    """Run `program(group)` on every rank at once.

    Returns:
        The results, in rank order.

    Raises:
        Exception: what the first failing rank raised; the others are released from their collectives.
        threading.BrokenBarrierError: a rank did not come to a collective within `timeout_s`.
    """
    meeting = _Meeting(threading.Barrier(world_size, timeout=timeout_s), [None] * world_size)
    results: list[Result | None] = [None] * world_size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = program(LocalDCPGroup(world_size, rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A rank that was thrown out of a barrier by another one's failure only tells that there was a failure.
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results  # type: ignore[return-value]
