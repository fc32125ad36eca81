"""Backend `deepep_v2`: one fused kernel a call, symmetric receive buffers, one comm stream a process.

Written against `ElasticBuffer` of DeepEP V2; the simulator offers the same methods, so this file is what runs on devices
too. What differs from V1: no layout call; a dispatch kernel fills the process's receive buffer and an epilogue copies the
rows out of it, both on the process's one comm stream, which is what keeps the other ubatch's call from overwriting them.
With `do_cpu_sync` the host waits for the counts between the two; without, outputs have `R * max tokens` rows, of which only
the first `psum_num_recv_tokens_per_scaleup_rank[-1]` are written, ids included. The library compiles its kernels anew for each
`num_max_tokens_per_rank`, while ranks wait for each other: a step's own number, which changes from step to step, is never it.
"""

from __future__ import annotations

from typing import Any, Protocol

from dbo.contract.world import World
from dbo.moe.deepep_flat import DeepEPFlat, wait_for
from dbo.moe.interface import ExpertInputs, Receiver
from dbo.ubatching.forward_context import get_forward_context
from dbo.ubatching.ring import dbo_enabled


class ValidRows(Protocol):
    """The device work after a dispatch without counts on the host. Torch: `dbo.moe.row_ops`; ordering: `sim.symbols`."""

    def keep_ids(self, ids: Any, ends: Any) -> Any:
        """`[N, K]` ids with -1 in the rows from `ends[-1]` on, where `ends` `[R]` int32 is a running count."""


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below `number` (>= 1)."""
    return 1 << (number - 1).bit_length()


class DeepEPV2PrepareAndFinalize(DeepEPFlat):
    """Dispatch and combine of one rank, over `deep_ep.ElasticBuffer` or the simulator's.

    Args:
        max_tokens_per_rank: that any step brings, equal on all ranks.
        options: of `DeepEPFlat`.
    """

    def __init__(self, world: World, buffer: Any, *, max_tokens_per_rank: int, **options: Any) -> None:
        super().__init__(world, buffer, **options)
        self.ops: ValidRows = world.row_ops
        self.max_tokens_per_rank = max_tokens_per_rank

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(a1, topk_weights, topk_ids)
        x, ids, weights, handle, event = self.buffer.dispatch(
            a1,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            num_experts=self.num_experts,
            num_max_tokens_per_rank=self._rows_of_a_rank(),
            do_cpu_sync=not self.worst_case,
            **self._launch(),
        )
        self._keep_handle(handle)

        def receive() -> ExpertInputs:
            wait_for(event)
            valid = ids
            if self.worst_case:
                self._streams.used_here(ids, handle.psum_num_recv_tokens_per_scaleup_rank)
                valid = self.ops.keep_ids(ids, handle.psum_num_recv_tokens_per_scaleup_rank)
            self._streams.used_by_compute(x, valid, weights)
            return ExpertInputs(layout="flat", x=x, topk_ids=valid, topk_weights=weights)

        return receive

    def _rows_of_a_rank(self) -> int:
        """Rows that a rank may send: few different numbers, and the same on every rank.

        With counts on the host outputs are as long as what came, whatever this says; without, this is their length.
        """
        most = max(get_forward_context().num_tokens_across_ranks)
        enough = next_power_of_two(most) if self.worst_case else self.max_tokens_per_rank
        return max(most, min(enough, self.max_tokens_per_rank))

    def _launch(self) -> dict[str, Any]:
        return {
            "num_sms": self._sms,
            "previous_event": None,
            "async_with_compute_stream": not dbo_enabled(),
        }
