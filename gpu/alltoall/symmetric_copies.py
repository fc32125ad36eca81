"""`World.symmetric` on devices (needs torch, cuda-bindings and peer access): copy engines and signals, no kernel.

A send is one `cudaMemcpyAsync` for each peer and array into the peer's mapped memory, then a stream memory operation that
raises this rank's flag there; a receive is another one that waits for the peers' flags and lowers them. Neither takes an SM,
and all of them can be captured. A flag is up only between a send and its receive, so one value serves eager calls and every
replay: within a channel a peer raises it again only after it has received what was sent behind the lowering
(`dbo.moe.symm_copy`).

Measured on 2 H200s: 117 MB one way, both ways at once, in 316 us (372 GB/s), eager and captured; the flags take 7 us.

Memory comes from torch's symmetric memory, or, where ranks share a device and torch refuses, over CUDA IPC.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dbo.errors import ConfigError, NotAvailable
from dbo.moe.symm_copy import Channel, Table
from gpu.alltoall.copies import arrives, exchange_counts, sending
from gpu.alltoall.symm import shared_regions
from gpu.group import rows_as_bytes

if TYPE_CHECKING:
    from gpu.device import GpuWorld

HALVES = ("dispatch", "combine")
ALIGNMENT_BYTES = 256
FLAG_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class RegionLayout:
    """Where things lie in a rank's memory; the same on all ranks.

    Attributes:
        ranks, ubatches: how many. rows: the most of one rank in one exchange.
        row_bytes: widths of the arrays of an exchange.
    """

    ranks: int
    ubatches: int
    rows: int
    row_bytes: tuple[int, ...]

    @property
    def channel_bytes(self) -> int:
        return sum(_aligned(self.ranks * self.rows * width) for width in self.row_bytes)

    @property
    def flags_at(self) -> int:
        return self.ubatches * len(HALVES) * self.channel_bytes

    @property
    def total_bytes(self) -> int:
        return self.flags_at + _aligned(self.ubatches * len(HALVES) * self.ranks * FLAG_BYTES)

    def covers(self, other: RegionLayout) -> bool:
        """Whether what `other` has room for fits here, too."""
        return (
            self.ranks == other.ranks and self.ubatches >= other.ubatches and self.channel_bytes >= other.channel_bytes
        )

    def arrays_at(self, channel: Channel, rows: int, row_bytes: Sequence[int]) -> list[int]:
        """Where each array of an exchange begins that brings so many rows of these widths.

        Raises:
            ConfigError: there is no room for them.
        """
        ubatch, half = channel
        at, found = 0, []
        for width in row_bytes:
            found.append((ubatch * len(HALVES) + HALVES.index(half)) * self.channel_bytes + at)
            at += _aligned(rows * width)
        if at > self.channel_bytes or ubatch >= self.ubatches:
            rule = "an exchange fits into the memory that was reserved for its ubatch"
            fix = "lower --max-num-batched-tokens, or reserve more"
            raise ConfigError.of(rule, fix=fix, ubatch=ubatch, needed_bytes=at, reserved_bytes=self.channel_bytes)
        return found

    def flag_at(self, channel: Channel, source: int) -> int:
        """Where `source` says that its rows are there."""
        number = channel[0] * len(HALVES) + HALVES.index(channel[1])
        return self.flags_at + (number * self.ranks + source) * FLAG_BYTES


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Symmetric memory as this rank sees it; `regions` `[total_bytes]` uint8 by rank."""

    layout: RegionLayout
    regions: list[torch.Tensor]

    def rows(self, rank: int, start: int, count: int, row_bytes: int) -> torch.Tensor:
        """`[count, row_bytes]` uint8 of `rank`'s region."""
        return self.regions[rank][start : start + count * row_bytes].view(count, row_bytes)

    def lower_all(self, rank: int) -> None:
        """Lower every flag of `rank`."""
        self.regions[rank][self.layout.flags_at :].zero_()

    def flag(self, rank: int, channel: Channel, source: int) -> int:
        """The address at which `rank` learns that the rows of `source` are there."""
        return self.regions[rank].data_ptr() + self.layout.flag_at(channel, source)


_KEPT: list[Memory] = []
"""The process's memory, mapped by its peers for as long as it lives: a later run takes the same."""


class StreamSignals:
    """Flags raised and awaited by the current stream itself: stream memory operations of the driver.

    Raises:
        NotAvailable: cuda-bindings is missing; CUDA builds of torch bring it.
    """

    def __init__(self) -> None:
        try:
            self._driver = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            rule = "backend symm_copy raises its signals through the CUDA driver"
            raise NotAvailable.of(rule, fix="pip install cuda-bindings", error=error) from error

    def raise_flag(self, address: int) -> None:
        """Set the flag when the stream gets there; whatever it wrote before is visible first."""
        self._queue(self._driver.cuStreamWriteValue32, address, 1, 0)

    def await_flag(self, address: int) -> None:
        """Let the stream wait until the flag is up, and lower it."""
        equal = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        self._queue(self._driver.cuStreamWaitValue32, address, 1, int(equal))
        self._queue(self._driver.cuStreamWriteValue32, address, 0, 0)

    def _queue(self, operation: Any, address: int, value: int, flags: int) -> None:
        (result,) = operation(torch.cuda.current_stream().cuda_stream, address, value, flags)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            rule = "the driver takes stream memory operations on mapped memory"
            raise NotAvailable.of(rule, fix="use another backend", result=result, operation=operation.__name__)


class DeviceCopies:
    """One rank's end; see `dbo.moe.symm_copy.SymmetricCopies`.

    Args:
        process_group: NCCL over all ranks; None where they share one device.
        control: gloo over all ranks.
    """

    def __init__(self, world: GpuWorld, process_group: Any, control: Any) -> None:
        self.world = world
        self.process_group = process_group
        self.control = control
        self._memory: Memory | None = None

    def reserve(self, *, ubatches: int, rows: int, row_bytes: Sequence[int]) -> None:
        layout = RegionLayout(ranks=self.world.size, ubatches=ubatches, rows=rows, row_bytes=tuple(row_bytes))
        kept = next((memory for memory in _KEPT if memory.layout.covers(layout)), None)
        if kept is not None:
            self._memory = kept
            self.restart()  # whoever had it before may have failed
            return
        regions = shared_regions(layout.total_bytes, self.process_group, self.control)
        self._memory = Memory(layout=layout, regions=regions)
        _KEPT.append(self._memory)

    @property
    def memory(self) -> Memory:
        """What was reserved last.

        Raises:
            ConfigError: nothing was.
        """
        if self._memory is None:
            rule = "symmetric memory is reserved before the first exchange, by all ranks together"
            raise ConfigError.of(rule, fix="call reserve", rank=self.world.rank)
        return self._memory

    def restart(self) -> None:
        """After a failed step: nothing is under way, no flag is up. Every rank calls it; it returns when all have done so."""
        if self._memory is not None:
            torch.cuda.synchronize()
            dist.barrier(self.control)  # nobody's copies are under way any more
            self._memory.lower_all(self.world.rank)
            torch.cuda.synchronize()
            dist.barrier(self.control)

    def own_rows(self, like: torch.Tensor, table: Table, *, channel: Channel) -> torch.Tensor:
        rank = self.world.rank
        theirs = [sent[rank] for sent in table]
        width = like.element_size() * prod(like.shape[1:])
        # The first array of an exchange begins where its channel does, whatever comes with it.
        (at,) = self.memory.layout.arrays_at(channel, sum(theirs), [width])
        rows = self.memory.rows(rank, at + sum(theirs[:rank]) * width, len(like), width)
        return rows.view(like.dtype).view(like.shape)

    def exchange_counts(self, counts: torch.Tensor, *, channel: Channel) -> Table:
        return exchange_counts(self.world, self.control, counts, channel)

    def send(
        self, arrays: Sequence[torch.Tensor], table: Table, *, channel: Channel, to_all: bool = False
    ) -> DeviceArrival:
        world, memory = self.world, self.memory
        rank, size = world.rank, world.size
        own = [rows_as_bytes(array.contiguous()) for array in arrays]
        widths = [array.shape[1] for array in own]
        starts = [0] * size if to_all else [sum(table[rank][:peer]) for peer in range(size)]
        with sending(world, channel) as index:
            for peer in ((rank + step) % size for step in range(1, size)):
                count, before = table[rank][peer], sum(table[source][peer] for source in range(rank))
                incoming = sum(sent[peer] for sent in table)
                at = memory.layout.arrays_at(channel, incoming, widths)
                for array, width, start in zip(own, widths, at, strict=True):
                    if count:
                        into = memory.rows(peer, start + before * width, count, width)
                        into.copy_(array[starts[peer] : starts[peer] + count])
                self.signals.raise_flag(memory.flag(peer, channel, rank))
        kept = [array[starts[rank] : starts[rank] + table[rank][rank]] for array in arrays]
        return DeviceArrival(self, channel, index, kept, [sent[rank] for sent in table])

    @cached_property
    def signals(self) -> StreamSignals:
        return StreamSignals()


class DeviceArrival:
    """What peers are sending in one exchange; own rows are where they were."""

    def __init__(
        self, copies: DeviceCopies, channel: Channel, index: int, own: Sequence[torch.Tensor], theirs: Sequence[int]
    ) -> None:
        self._copies = copies
        self._channel = channel
        self._index = index
        self._own = list(own)
        self._theirs = list(theirs)

    def rows(self) -> tuple[torch.Tensor, ...]:
        rank = self._copies.world.rank
        start = sum(self._theirs[:rank])
        arrived = self._arrived()
        for array, own in zip(arrived, self._own, strict=True):
            place = array[start : start + len(own)]
            if place.data_ptr() != own.data_ptr():
                place.copy_(own)
        return arrived

    def blocks(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        rank = self._copies.world.rank
        return tuple(
            tuple(own if source == rank else block for source, block in enumerate(array.split(self._theirs)))
            for array, own in zip(self._arrived(), self._own, strict=True)
        )

    def _arrived(self) -> tuple[torch.Tensor, ...]:
        """The channel's region, behind the peers' signals; where own rows belong nothing has been written."""
        copies, world, total = self._copies, self._copies.world, sum(self._theirs)
        memory = copies.memory
        arrives(world, self._channel[1], self._index)
        for source in range(world.size):
            if source != world.rank:
                copies.signals.await_flag(memory.flag(world.rank, self._channel, source))
        world.trace.launches()
        widths = [own.element_size() * prod(own.shape[1:]) for own in self._own]
        at = memory.layout.arrays_at(self._channel, total, widths)
        return tuple(
            memory.rows(world.rank, start, total, width).view(own.dtype).view(total, *own.shape[1:])
            for own, width, start in zip(self._own, widths, at, strict=True)
        )
