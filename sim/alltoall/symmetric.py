"""Symmetric memory and copy engines of the simulated machine: `dbo.moe.symm_copy.SymmetricCopies`.

A send queues one transfer for each peer on the line "net". It is in the order of the current stream, which goes on when the
copies are done and then signals the peers; but it takes no SM. A receive waits for the signals of all peers and copies the
rows out of the channel's region. Regions are made on first use, as large as somebody needs; on devices they are reserved once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dbo.moe.symm_copy import Channel, Table
from dbo.trace import Access, kinds
from sim.alltoall.symmetric_memory import REGION_BYTES, Fabric
from sim.work import Work

if TYPE_CHECKING:
    from sim.engine import Node
    from sim.world import SimWorld

# What packing-like kernels of this backend occupy; the transfers occupy none.
UNPACK_SMS = 16


class SymmetricMemory:
    """One rank's end. `payload` holds values (numeric mode) or nothing (ordering mode)."""

    def __init__(self, world: SimWorld, payload: Any, fabric: Fabric) -> None:
        self.world = world
        self.payload = payload
        self.fabric = fabric
        self.calls: dict[Channel, int] = {}

    def restart(self) -> None:
        """A new epoch: calls are counted from 0, nothing is under way."""
        self.calls.clear()
        self.fabric.restart()

    def reserve(self, *, ubatches: int, rows: int, row_bytes: Sequence[int]) -> None:
        """Regions of the simulated machine have no size."""

    def own_rows(self, like: Any, table: Table, *, channel: Channel) -> None:
        """Own rows are copied when the others are."""

    def exchange_counts(self, counts: Any, *, channel: Channel) -> list[list[int]]:
        world = self.world
        world.refuse_in_capture("host wait for receive counts")
        channel = (channel[0], f"{channel[1]}.counts")
        call = self._next_call(channel)
        told = self.payload.counts(counts)
        self._push(channel, call, (world.tensors.access(counts),) * world.size, told)
        self._wait_for_signals(channel, call)
        marker, task = world.current_stream().tail, world.task()
        since_us = task.now_us
        if marker is not None:
            world.engine.wait_host(task, marker, "receive counts of symm_copy")
        world.engine.host_record(
            task,
            kinds.HOST_WAIT,
            world.current_stream().name,
            {"why": "receive counts of symm_copy", "declared": True, "gil": "released", "since_us": since_us},
        )
        found = self.fabric.held(world.rank, channel)
        return [told() if rank == world.rank else found[rank] for rank in range(world.size)]

    def send(self, arrays: Sequence[Any], table: Table, *, channel: Channel, to_all: bool = False) -> SimArrival:
        world = self.world
        mine = table[world.rank]
        blocks = [tuple(arrays)] * world.size if to_all else _blocks(arrays, mine, world.tensors.rows)
        arrival = SimArrival(self, channel, arrays, blocks[world.rank], [sent[world.rank] for sent in table])

        def start() -> None:
            arrival.call = self._next_call(channel)
            reads = [tuple(map(world.tensors.access, block)) for block in blocks]
            nbytes = [sum(_size(a) for a in access) for access in reads]
            self._push_blocks(channel, arrival.call, reads, nbytes, [self.payload.block(block) for block in blocks])

        if world.capture is None:
            start()
        else:
            world.capture.note(tuple(world.tensors.access(array) for array in arrays))
            world.capture.add(world.current_stream(), start)
        return arrival

    # -- one exchange -----------------------------------------------------------------------------------------------

    def _next_call(self, channel: Channel) -> int:
        call = self.calls.get(channel, 0)
        self.calls[channel] = call + 1
        return call

    def _push(self, channel: Channel, call: int, reads: Sequence[Access], take: Callable[[], Any]) -> None:
        """The same small array to every peer."""
        self._push_blocks(channel, call, [(a,) for a in reads], [_size(a) for a in reads], [take] * len(reads))

    def _push_blocks(
        self,
        channel: Channel,
        call: int,
        reads: Sequence[tuple[Access, ...]],
        nbytes: Sequence[int],
        takes: Sequence[Callable[[], Any]],
    ) -> None:
        """Queue a copy to each peer behind the current stream, then a signal to all of them."""
        world = self.world
        world.cluster.check_peers(world.rank)
        stream = world.current_stream()
        others = [(world.rank + step) % world.size for step in range(1, world.size)]
        copies = [self._copy(stream, channel, call, peer, reads[peer], nbytes[peer], takes[peer]) for peer in others]
        signal = stream.launch(
            Work(
                kind=kinds.RECORD,
                name="signal",
                after=tuple(copies),
                src=world.source(),
                attrs={"event": _name(channel, call)},
            )
        )
        for peer in others:
            self.fabric.signal(peer, channel, call, world.rank, signal)

    def _copy(
        self,
        stream: Any,
        channel: Channel,
        call: int,
        peer: int,
        reads: tuple[Access, ...],
        nbytes: int,
        take: Callable[[], Any],
    ) -> Node:
        world, rank, taken = self.world, self.world.rank, list[Any]()
        region = self.fabric.region(peer, channel)
        reads = tuple(a for a in reads if _size(a))
        if world.device is not None:
            world.device.note_use(reads, stream.name)  # the stream goes on only when the copy is done
        task = world.task()
        task.now_us += world.cost.host_launch_us
        node = world.engine.node(
            Work(
                kind=kinds.TRANSFER,
                name=f"{channel[1]}.copy",
                after=() if stream.tail is None else (stream.tail,),
                duration_us=world.cost.copy_engine(nbytes),
                reads=reads,
                writes=(Access.interval(region, rank * REGION_BYTES, (rank + 1) * REGION_BYTES),),
                run=lambda: taken.append(take()),
                finish=lambda: self.fabric.held(peer, channel).__setitem__(rank, taken[0]),
                src=world.source(),
                attrs={
                    "call": call,
                    "op": channel[1],
                    "dst": peer,
                    "sms": 0,
                    "tags": {str(region): [*map(str, channel), call]},
                },
                copies=True,
            ),
            rank=rank,
            line="net",
            tags=task.tags,
            issued_by=task,
            stream_tail=world.net_tail,
        )
        world.net_tail = node
        return node

    def _wait_for_signals(self, channel: Channel, call: int) -> None:
        world = self.world
        world.cluster.check_peers(world.rank)
        arrived = self.fabric.arrival(world.rank, channel, call)
        world.current_stream().launch(
            Work(
                kind=kinds.WAIT,
                name="signals",
                after=(arrived,),
                src=world.source(),
                attrs={"event": _name(channel, call)},
            )
        )


class SimArrival:
    """What peers send to this rank in one exchange; own rows never travel."""

    def __init__(
        self,
        memory: SymmetricMemory,
        channel: Channel,
        arrays: Sequence[Any],
        own: Sequence[Any],
        theirs: Sequence[int],
    ) -> None:
        self.memory, self.channel = memory, channel
        self.arrays, self.own, self.theirs = tuple(arrays), tuple(own), tuple(theirs)
        self.call = -1

    def blocks(self) -> tuple[tuple[Any, ...], ...]:
        """By source rank, as views of what `rows` has copied out: the machine has no use for the saved copy."""
        ends = [sum(self.theirs[: source + 1]) for source in range(len(self.theirs))]
        spans = list(zip([0, *ends], ends, strict=False))
        return tuple(tuple(self.memory.world.tensors.rows(array, *span) for span in spans) for array in self.rows())

    def rows(self) -> tuple[Any, ...]:
        memory, world, rank = self.memory, self.memory.world, self.memory.world.rank
        payload, access = memory.payload, world.tensors.access
        received = tuple(
            payload.empty((sum(self.theirs), *array.shape[1:]), array, "received") for array in self.arrays
        )
        own = self.own
        region = memory.fabric.region(rank, self.channel)
        reads = tuple(a for a in map(access, own) if _size(a))
        writes = tuple(a for a in map(access, received) if _size(a))
        deliver = payload.deliver(received, own, rank)
        peers = [r for r in range(world.size) if r != rank]

        def go() -> None:
            memory._wait_for_signals(self.channel, self.call)
            world.current_stream().launch(
                Work(
                    kind=kinds.OP,
                    name=f"{self.channel[1]}.copy_out",
                    duration_us=world.cost.kernel(2 * sum(map(_size, writes))),
                    reads=(*reads, *(Access.interval(region, r * REGION_BYTES, (r + 1) * REGION_BYTES) for r in peers)),
                    writes=writes,
                    run=lambda: deliver(memory.fabric.held(rank, self.channel)),
                    src=world.source(),
                    attrs={"sms": UNPACK_SMS, "expects": {str(region): [*map(str, self.channel), self.call]}},
                )
            )

        if world.capture is None:
            go()
        else:
            world.capture.note((*reads, *writes))
            world.capture.add(world.current_stream(), go)
        return received


def _blocks(
    arrays: Sequence[Any], splits: Sequence[int], rows: Callable[[Any, int, int], Any]
) -> list[tuple[Any, ...]]:
    """Views of the rows for each peer."""
    starts = [sum(splits[:peer]) for peer in range(len(splits))]
    return [tuple(rows(array, at, at + n) for array in arrays) for at, n in zip(starts, splits, strict=True)]


def _name(channel: Channel, call: int) -> str:
    return f"symm.u{channel[0]}.{channel[1]}#{call}"


def _size(access: Access) -> int:
    size = 1
    for n in access.sizes:
        size *= n
    return size
