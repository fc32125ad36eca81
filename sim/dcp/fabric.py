"""What all ranks share of the direct path: regions with two parities, what lies in them, and flags.

A flag belongs to a source, a receiver, a ubatch and an epoch: it is up when the transfer that it announces has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.engine import Node
    from sim.world import Cluster

# A slab for each source rank. Only its place matters for ordering, not its size.
SLAB_BYTES = 1024


class DirectFabric:
    """Regions by (rank, ubatch, parity), flags by (rank, ubatch, epoch)."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._regions: dict[tuple[int, int, int], int] = {}
        self._held: dict[tuple[int, int, int], dict[int, Any]] = {}
        self._flags: dict[tuple[int, int, int, int], Node] = {}

    def region(self, rank: int, ubatch: int, parity: int) -> int:
        """The buffer of `rank` that its peers push to, one slab a source rank."""
        key = rank, ubatch, parity
        if key not in self._regions:
            nbytes = SLAB_BYTES * self._cluster.size
            self._regions[key] = self._cluster.engine.new_buffer(rank, f"dcp.direct.u{ubatch}.{parity}", nbytes)
        return self._regions[key]

    def held(self, rank: int, ubatch: int, parity: int) -> dict[int, Any]:
        """What lies in that region, by source rank."""
        return self._held.setdefault((rank, ubatch, parity), {})

    def flags(self, rank: int, ubatch: int, epoch: int, sources: list[int]) -> Node:
        """Ends when every one of `sources` has raised its flag of `epoch` at `rank`."""
        key = self._cluster.epoch, rank, ubatch, epoch
        if key not in self._flags:
            meet = self._cluster.open_meet(f"dcp.direct.u{ubatch}->r{rank}", epoch)
            meet.record.attrs["members"] = sources
            self._flags[key] = meet
        return self._flags[key]

    def raise_flag(self, rank: int, ubatch: int, epoch: int, sources: list[int], source: int, pushed: Node) -> None:
        """`source`, one of `sources`, raises its flag at `rank` when `pushed` ends."""
        meet = self.flags(rank, ubatch, epoch, sources)
        self._cluster.join_meet(meet, pushed, source)
        if meet.members is not None and len(meet.members) == len(sources):
            self._cluster.engine.release_hold(meet)
