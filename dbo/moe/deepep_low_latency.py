"""Backend `deepep_low_latency`: fixed-size receive buffers, two halves, weights applied in combine.

Written against DeepEP's `Buffer`; the simulator offers the same two methods, so this file is what runs on devices too.
"""

from __future__ import annotations

from typing import Any

from dbo.contract.world import World
from dbo.moe.cross_stream import CrossStream
from dbo.moe.interface import ExpertInputs, Receiver, RecvHook
from dbo.ubatching.ring import dbo_current_ubatch_id


class DeepEPLowLatencyPrepareAndFinalize:
    """Dispatch and combine of one rank, for all layers and ubatches.

    Args:
        world: of this rank.
        buffer: `deep_ep.Buffer` or the simulator's.
        num_experts: E, over all ranks.
        max_tokens_per_rank: rows that a rank may dispatch in one call; the same on all ranks.
    """

    layout = "batched"

    def __init__(self, world: World, buffer: Any, *, num_experts: int, max_tokens_per_rank: int) -> None:
        self.buffer = buffer
        self.num_experts = num_experts
        self.max_tokens_per_rank = max_tokens_per_rank
        self._streams = CrossStream(world)
        self._handles: dict[int, Any] = {}

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> tuple[RecvHook, Receiver]:
        x, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            a1,
            topk_ids,
            self.max_tokens_per_rank,
            self.num_experts,
            use_fp8=False,
            async_finish=False,
            return_recv_hook=True,
        )
        self._handles[dbo_current_ubatch_id()] = handle
        return hook, lambda: ExpertInputs(layout="batched", x=x, counts=counts)

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> tuple[RecvHook, Receiver]:
        handle = self._handles.pop(dbo_current_ubatch_id())
        combined, _, hook = self.buffer.low_latency_combine(
            expert_out, topk_ids, topk_weights, handle, async_finish=False, return_recv_hook=True
        )
        return hook, lambda: combined

    def copy_out(self, combined: Any) -> Any:
        return self._streams.copy_out(combined)
