"""What all ranks share of the direct path: regions with two parities, what lies in their slabs, and flags.

A flag belongs to a source, a receiver, a ubatch and an epoch: it is up when the transfer that it announces has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.engine import Node
    from sim.world import Cluster

# Of any size: what matters for ordering is which slab it is.
SLAB_BYTES = 1024


class DirectFabric:
    """Slabs by (rank, ubatch, parity, source), flags by (rank, ubatch, epoch).

    A slab is a buffer of its own, so that each carries the tag of what its source pushed last.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._slabs: dict[tuple[int, int, int, int], int] = {}
        self._held: dict[tuple[int, int, int], dict[int, Any]] = {}
        self._flags: dict[tuple[int, int, int, int], Node] = {}

    def slab(self, rank: int, ubatch: int, parity: int, source: int) -> int:
        """The buffer of `rank` that its peer `source` pushes to."""
        key = rank, ubatch, parity, source
        if key not in self._slabs:
            name = f"dcp.direct.u{ubatch}.{parity}.from{source}"
            self._slabs[key] = self._cluster.engine.new_buffer(rank, name, SLAB_BYTES)
        return self._slabs[key]

    def held(self, rank: int, ubatch: int, parity: int) -> dict[int, Any]:
        """What lies in that region of `rank`, by source rank."""
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
