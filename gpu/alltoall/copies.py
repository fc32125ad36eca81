"""What both kinds of `World.symmetric` do alike (needs torch): counts over gloo, words for the board and the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dbo.moe.symm_copy import Channel, Table
from dbo.trace import kinds
from gpu.watch import flight_recorder as board

if TYPE_CHECKING:
    from gpu.device import GpuWorld

NAME = "symm_copy"


def exchange_counts(world: GpuWorld, process_group: Any, counts: torch.Tensor, channel: Channel) -> Table:
    """Everybody's counts `[R]`, by rank; the host waits for them, first of all for its own device."""
    recorder = world.trace
    index = world.next_index(NAME)
    recorder.came(NAME, index, f"{channel[1]}.counts")
    recorder.waits(board.COLLECTIVE, "receive counts of symm_copy", NAME, index)
    told = counts.cpu().contiguous()
    table = [torch.empty_like(told) for _ in range(world.size)]
    with world.peers_may_fail():
        dist.all_gather(table, told, group=process_group)
    recorder.goes_on()
    recorder.end_visit(recorder.task)
    why = {"why": "receive counts of symm_copy", "declared": True}
    recorder.on_line(kinds.HOST_WAIT, world.current_stream().name, why)
    return [row.tolist() for row in table]


@contextmanager
def sending(world: GpuWorld, channel: Channel) -> Iterator[int]:
    """Around queueing a rank's copies: the exchange's number, its place on the board, a transfer in the trace."""
    recorder, op = world.trace, channel[1]
    index = world.next_index(NAME)
    recorder.came(NAME, index, op)
    recorder.timed_device(kinds.TRANSFER, f"{op}.copy", attrs={"group": NAME, "index": index, "op": op, "sms": 0})
    yield index
    recorder.end_visit(recorder.task)


def arrives(world: GpuWorld, op: str, index: int) -> None:
    """Write into the trace that the current stream waits for the signals of all peers."""
    name = f"{op}.signals"
    world.trace.device(kinds.WAIT, name, attrs={"event": name}, after=(world.trace.meet_reference(NAME, index),))
