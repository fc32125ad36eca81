"""`a2a_direct` on the simulated machine: the protocol of `dbo.dcp.direct`, one tile a source.

A push is a transfer on the line "net", behind the caller's stream, into slab (epoch mod 2, source) of the peer's
region; its end raises the flag of its epoch. The merge waits for the flags of that epoch from all peers, and for the
own pushes, which belong to the same kernel. The epoch is counted where the kernel runs: also when a graph is
replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dbo.dcp.interface import place_in_groups
from dbo.trace import Access, kinds
from sim.dcp.fabric import SLAB_BYTES, DirectFabric
from sim.work import Work

if TYPE_CHECKING:
    from sim.engine import Node
    from sim.world import SimWorld


class SimDirect:
    """One rank's end. `payload` holds values (`sim.dcp.numeric`) or nothing (`sim.dcp.symbols`).

    Attributes:
        epochs: exchanges made, by ubatch.
        parities: regions that alternate; two are enough, and one is not.
    """

    parities = 2

    def __init__(self, world: SimWorld, size: int, payload: Any, fabric: DirectFabric) -> None:
        self.members = place_in_groups(world.rank, size)[2]
        self.world = world
        self.payload = payload
        self.fabric = fabric
        self.epochs: dict[int, int] = {}
        world.restarted.append(self.epochs.clear)

    def reduce(self, out_THD: Any, lse_TH: Any, seq_lens: Any, query_start_loc: Any, *, ubatch: int) -> Any:
        """`[T, H / C, D]`, the merge over all peers."""
        world = self.world
        call = self.payload.call(out_THD, lse_TH, seq_lens, query_start_loc, self.members)
        reads = tuple(a for a in map(world.tensors.access, (out_THD, lse_TH, seq_lens, query_start_loc)) if a.sizes[0])
        write = world.tensors.access(call.merged)
        nbytes = world.tensors.itemsize(out_THD)
        for n in out_THD.shape:
            nbytes *= int(n)

        def start() -> None:
            self._exchange(call, reads, write, nbytes, ubatch)

        if world.capture is None:
            start()
        else:
            world.capture.note((*reads, write))
            world.capture.add(world.current_stream(), start)
        return call.merged

    def wanted_epoch(self, epoch: int) -> int:
        """The epoch whose flags a merge waits for."""
        return epoch

    def peers_to_push(self, others: Sequence[int]) -> Sequence[int]:
        """Those that get this rank's partial output."""
        return others

    def parity_to_push(self, epoch: int) -> int:
        """Which of a peer's regions a push goes to."""
        return epoch % self.parities

    def _exchange(self, call: Any, reads: tuple[Access, ...], write: Access, nbytes: int, ubatch: int) -> None:
        world, rank = self.world, self.world.rank
        world.cluster.check_peers(rank)
        epoch = self.epochs[ubatch] = self.epochs.get(ubatch, 0) + 1
        parity = epoch % self.parities
        place = self.members.index(rank)
        others = [self.members[(place + hop) % len(self.members)] for hop in range(1, len(self.members))]
        pushed = [
            self._push(call, reads, nbytes // len(self.members), ubatch, epoch, peer)
            for peer in self.peers_to_push(others)
        ]
        flags = self.fabric.flags(rank, ubatch, self.wanted_epoch(epoch), self._sources(rank))
        stream = world.current_stream()
        stream.launch(
            Work(
                kind=kinds.WAIT,
                name="flags",
                after=(flags, *pushed),
                src=world.source(),
                attrs={"event": f"direct#{epoch}"},
            )
        )
        slabs = [self.fabric.slab(rank, ubatch, parity, source) for source in others]
        stream.launch(
            Work(
                kind=kinds.OP,
                name="dcp.direct.merge",
                duration_us=world.cost.kernel(nbytes),
                reads=(*reads, *map(_whole, slabs)),
                writes=(write,),
                run=lambda: call.merge(self.fabric.held(rank, ubatch, parity)),
                src=world.source(),
                attrs={"expects": {str(slab): [ubatch, epoch] for slab in slabs}},
            )
        )

    def _push(self, call: Any, reads: tuple[Access, ...], nbytes: int, ubatch: int, epoch: int, peer: int) -> Node:
        world, rank, taken = self.world, self.world.rank, list[Any]()
        parity = self.parity_to_push(epoch)
        stream, task = world.current_stream(), world.task()
        slab = self.fabric.slab(peer, ubatch, parity, rank)
        node = world.engine.node(
            Work(
                kind=kinds.TRANSFER,
                name="dcp.direct.push",
                after=() if stream.tail is None else (stream.tail,),
                duration_us=world.cost.transfer(nbytes),
                reads=reads,
                writes=(_whole(slab),),
                run=lambda: taken.append(call.chunk(peer)),
                finish=lambda: self.fabric.held(peer, ubatch, parity).__setitem__(rank, taken[0]),
                src=world.source(),
                attrs={"call": epoch, "op": "dcp.direct", "dst": peer, "tags": {str(slab): [ubatch, epoch]}},
            ),
            rank=rank,
            line="net",
            tags=task.tags,
            issued_by=task,
            stream_tail=world.net_tail,
        )
        world.net_tail = node
        self.fabric.raise_flag(peer, ubatch, epoch, self._sources(peer), rank, node)
        return node

    def _sources(self, rank: int) -> list[int]:
        return [member for member in self.members if member != rank]


def _whole(slab: int) -> Access:
    return Access.interval(slab, 0, SLAB_BYTES)
