"""Backend `nccl`: plain `all_to_all_single`, the output argument first. Always available, any dtype.

Every rank sends each peer one row per token, zeroed where the token has no expert there, with its ids and weights beside it.
So all sizes follow from the token counts that the coordination has already shared: no count exchange, no host wait, safe in
graphs. With top-k near or above the number of ranks nearly every row is needed anyway.
"""

from __future__ import annotations

from typing import Any, Protocol

from dbo.contract.world import World
from dbo.moe.cross_stream import CrossStream
from dbo.moe.interface import ExpertInputs, Receiver
from dbo.ubatching.forward_context import get_forward_context


class RowOps(Protocol):
    """The device work around the exchange. Torch: `dbo.moe.row_ops`; ordering mode: `sim.symbols`.

    T_r rows of rank r, N = sum of T_r, R ranks, L local experts.
    """

    def pack(self, x: Any, topk_weights: Any, topk_ids: Any, ranks: int, local_experts: int) -> tuple[Any, Any]:
        """`[R * T, H]` rows for each peer and `[R * T, 2 * K]` fp32: ids local to the peer (-1: none), weights."""

    def empty_rows(self, like: Any, rows: int) -> Any:
        """An uninitialised `[rows, …]` of `like`'s dtype and width."""

    def unpack(self, routing: Any) -> tuple[Any, Any]:
        """`[N, 2 * K]` fp32 -> ids `[N, K]` int64, weights `[N, K]` fp32."""

    def reduce(self, rows: Any, ranks: int) -> Any:
        """`[R * T, H]` partial sums, one block a rank -> `[T, H]`."""


class NcclPrepareAndFinalize:
    """Dispatch and combine of one rank, for all layers and ubatches."""

    layout = "flat"

    def __init__(self, world: World, *, num_experts: int) -> None:
        self.group = world.group
        self.ops: RowOps = world.row_ops
        self.local_experts = num_experts // self.group.size
        self._streams = CrossStream(world)

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        ranks = self.group.size
        mine, theirs = self._splits(a1.shape[0])
        self._streams.used_here(a1, topk_weights, topk_ids)
        rows, routing = self.ops.pack(a1, topk_weights, topk_ids, ranks, self.local_experts)
        got_rows = self.ops.empty_rows(rows, sum(theirs))
        got_routing = self.ops.empty_rows(routing, sum(theirs))
        self.group.all_to_all_single(got_rows, rows, theirs, mine)
        self.group.all_to_all_single(got_routing, routing, theirs, mine)

        def receive() -> ExpertInputs:
            self._streams.used_here(got_rows, got_routing)
            ids, weights = self.ops.unpack(got_routing)
            self._streams.used_by_compute(got_rows, ids, weights)
            return ExpertInputs(layout="flat", x=got_rows, topk_ids=ids, topk_weights=weights)

        return receive

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        ranks = self.group.size
        mine, theirs = self._splits(topk_ids.shape[0])
        self._streams.used_here(expert_out)
        got = self.ops.empty_rows(expert_out, sum(mine))
        self.group.all_to_all_single(got, expert_out, mine, theirs)

        def receive() -> Any:
            self._streams.used_here(got)
            combined = self.ops.reduce(got, ranks)
            self._streams.used_by_compute(combined)
            return combined

        return receive

    def copy_out(self, combined: Any) -> Any:
        return self._streams.copy_out(combined)

    def _splits(self, tokens: int) -> tuple[list[int], list[int]]:
        """Rows to and from each peer in dispatch. All counts come from the shared decision."""
        return [tokens] * self.group.size, list(get_forward_context().num_tokens_across_ranks)
