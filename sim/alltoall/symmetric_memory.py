"""What all ranks of a simulated machine share of symmetric memory: regions, what lies in them, and signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbo.moe.symm_copy import Channel

if TYPE_CHECKING:
    from sim.engine import Node
    from sim.world import Cluster

# A region has one part a source rank. Only the part matters for ordering, not its size.
REGION_BYTES = 1024


class Fabric:
    """Regions by (rank, channel); signals by (rank, channel, call): a node that ends when all peers' copies are there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._regions: dict[tuple[int, Channel], int] = {}
        self._held: dict[tuple[int, Channel], dict[int, Any]] = {}
        self._arrivals: dict[tuple[int, int, Channel, int], Node] = {}

    def region(self, rank: int, channel: Channel) -> int:
        """The receive buffer of `rank` for `channel`."""
        key = rank, channel
        if key not in self._regions:
            name = f"symm.u{channel[0]}.{channel[1]}"
            nbytes = REGION_BYTES * self._cluster.size
            self._regions[key] = self._cluster.engine.new_buffer(rank, name, nbytes)
        return self._regions[key]

    def held(self, rank: int, channel: Channel) -> dict[int, Any]:
        """What lies in that region, by source rank."""
        return self._held.setdefault((rank, channel), {})

    def arrival(self, rank: int, channel: Channel, call: int) -> Node:
        """Ends when every peer has signalled `rank`."""
        key = self._cluster.epoch, rank, channel, call
        if key not in self._arrivals:
            meet = self._cluster.open_meet(f"symm.u{channel[0]}.{channel[1]}->r{rank}", call)
            meet.record.attrs["members"] = [peer for peer in range(self._cluster.size) if peer != rank]
            if self._cluster.size == 1:
                self._cluster.engine.release_hold(meet)
            self._arrivals[key] = meet
        return self._arrivals[key]

    def signal(self, rank: int, channel: Channel, call: int, source: int, signal: Node) -> None:
        """`source` signals `rank`, another one, when `signal` ends."""
        meet = self.arrival(rank, channel, call)
        self._cluster.join_meet(meet, signal, source)
        if meet.members is not None and len(meet.members) == self._cluster.size - 1:
            self._cluster.engine.release_hold(meet)

    def restart(self) -> None:
        """A new epoch: nothing is under way."""
        self._arrivals.clear()
        self._held.clear()
