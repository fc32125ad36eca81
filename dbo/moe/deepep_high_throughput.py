"""Backend `deepep_high_throughput`: exact receive sizes, a host wait for them, sums without weights.

Written against `Buffer` of DeepEP V1 (normal mode, one node); the simulator offers the same methods, so this file is what
runs on devices too. Its rules:

* `dispatch` needs the receive count before it can allocate: the host spins for it, holding the GIL, while this ubatch has
  the baton. With `num_worst_tokens` nothing is waited for: outputs have the worst-case rows, ids -1 past the real ones.
* A call without `previous_event` starts behind the tail that the *current* stream has when the call is made. Under DBO the
  player makes the comm stream current and lets it wait for the producer's event, recorded before the yield: the tail is
  then this ubatch's own work. On compute it would be whatever the peer has queued meanwhile.
* `combine` adds up rows without weights: the experts apply them.
"""

from __future__ import annotations

from typing import Any

from dbo.contract import World
from dbo.forward_context import get_forward_context
from dbo.moe.comm_sms import reserved_comm_sms
from dbo.moe.cross_stream import CrossStream
from dbo.moe.interface import ExpertInputs, Receiver
from dbo.ubatch import dbo_current_ubatch_id, dbo_enabled


class DeepEPHighThroughputPrepareAndFinalize:
    """Dispatch and combine of one rank, for all layers and ubatches.

    Args:
        world: of this rank.
        buffer: `deep_ep.Buffer` or the simulator's.
        num_experts: E, over all ranks.
        worst_case: give the worst-case receive size instead of waiting for counts; graphs need it.
        comm_sms: SMs of the exchanges of split steps, even; 0: the library's own number.
    """

    layout = "flat"

    def __init__(
        self, world: World, buffer: Any, *, num_experts: int, worst_case: bool = False, comm_sms: int = 0
    ) -> None:
        self.buffer = buffer
        self.num_experts = num_experts
        self.worst_case = worst_case
        self.comm_sms = comm_sms
        self._streams = CrossStream(world)
        self._handles: dict[int, Any] = {}

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(a1, topk_weights, topk_ids)
        with reserved_comm_sms(self.buffer, self._sms):
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
        self._handles[dbo_current_ubatch_id()] = handle

        def receive() -> ExpertInputs:
            _wait(event)
            self._streams.used_by_compute(x, ids, weights)
            return ExpertInputs(layout="flat", x=x, topk_ids=ids, topk_weights=weights)

        return receive

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(expert_out)
        with reserved_comm_sms(self.buffer, self._sms):
            combined, _, event = self.buffer.combine(
                expert_out, self._handles.pop(dbo_current_ubatch_id()), **self._launch()
            )

        def receive() -> Any:
            _wait(event)
            self._streams.used_by_compute(combined)
            return combined

        return receive

    def copy_out(self, combined: Any) -> Any:
        return self._streams.copy_out(combined)

    def _launch(self) -> dict[str, Any]:
        """How a call is launched: in an unsplit step beside compute, which waits for it when its result is wanted.

        Under DBO the call is made on the comm stream and stays in its order; the player's events do the rest.
        """
        return {"previous_event": None, "async_finish": not dbo_enabled()}

    @property
    def _sms(self) -> int:
        return self.comm_sms if dbo_enabled() else 0


def _wait(event: Any) -> None:
    """Let the current stream wait for an asynchronous call; a call in stream order has left no event."""
    if event.event is not None:
        event.current_stream_wait()
