"""Backend `deepep_high_throughput`: exact receive sizes, a host wait for them, sums without weights.

Written against `Buffer` of DeepEP V1 (normal mode, one node); the simulator offers the same methods, so this file is what
runs on devices too. Its rules:

* `dispatch` needs the receive count before it can allocate: the host spins for it, holding the GIL, while this ubatch has
  the baton. With `num_worst_tokens` nothing is waited for: outputs have the worst-case rows, ids -1 past the real ones.
* `combine` adds up rows without weights: the experts apply them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from dbo.moe.comm_sms import reserved_comm_sms
from dbo.moe.deepep_flat import DeepEPFlat, wait_for
from dbo.moe.interface import ExpertInputs, Receiver
from dbo.ubatching.forward_context import get_forward_context
from dbo.ubatching.ring import dbo_enabled


class DeepEPHighThroughputPrepareAndFinalize(DeepEPFlat):
    """Dispatch and combine of one rank, over `deep_ep.Buffer` or the simulator's."""

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(a1, topk_weights, topk_ids)
        with self._reserved():
            per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_ids, self.num_experts)
            x, ids, weights, _, handle, event = self.buffer.dispatch(
                a1,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_ids,
                topk_weights=topk_weights,
                num_worst_tokens=sum(get_forward_context().num_tokens_across_ranks) if self.worst_case else 0,
                **self._launch(),
            )
        self._keep_handle(handle)

        def receive() -> ExpertInputs:
            wait_for(event)
            self._streams.used_by_compute(x, ids, weights)
            return ExpertInputs(layout="flat", x=x, topk_ids=ids, topk_weights=weights)

        return receive

    def _launch(self) -> dict[str, Any]:
        return {"previous_event": None, "async_finish": not dbo_enabled()}

    def _reserved(self) -> AbstractContextManager[None]:
        return reserved_comm_sms(self.buffer, self._sms)
