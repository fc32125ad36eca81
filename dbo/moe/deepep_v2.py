"""Backend `deepep_v2`: one fused kernel a call, symmetric receive buffers, one comm stream a process.

Written against `ElasticBuffer` of DeepEP V2; the simulator offers the same methods, so this file is what runs on devices
too. What differs from V1: no layout call; a dispatch kernel fills the process's receive buffer and an epilogue copies the
rows out of it, both on the process's one comm stream, which is what keeps the other ubatch's call from overwriting them.
With `do_cpu_sync` the host waits for the counts between the two; without, outputs have `R * max tokens` rows, of which only
the first `psum_num_recv_tokens_per_scaleup_rank[-1]` are written, ids included.
"""

from __future__ import annotations

from typing import Any, Protocol

from dbo.contract import World
from dbo.forward_context import get_forward_context
from dbo.moe.cross_stream import CrossStream
from dbo.moe.interface import ExpertInputs, Receiver
from dbo.ubatch import dbo_current_ubatch_id, dbo_enabled


class ValidRows(Protocol):
    """The device work after a dispatch without counts on the host. Torch: `dbo.moe.nccl_ops`; ordering: `sim.symbols`."""

    def keep_ids(self, ids: Any, ends: Any) -> Any:
        """`[N, K]` ids with -1 in the rows from `ends[-1]` on, where `ends` `[R]` int32 is a running count."""


class DeepEPV2PrepareAndFinalize:
    """Dispatch and combine of one rank, for all layers and ubatches.

    Args:
        world: of this rank.
        buffer: `deep_ep.ElasticBuffer` or the simulator's.
        num_experts: E, over all ranks.
        worst_case: no CPU sync, worst-case outputs; graphs need it.
        comm_sms: SMs of the exchanges of split steps, even; 0: the library's own choice.
    """

    layout = "flat"

    def __init__(
        self, world: World, buffer: Any, *, num_experts: int, worst_case: bool = False, comm_sms: int = 0
    ) -> None:
        self.buffer = buffer
        self.ops: ValidRows = world.row_ops
        self.num_experts = num_experts
        self.worst_case = worst_case
        self.comm_sms = comm_sms
        self._streams = CrossStream(world)
        self._handles: dict[int, Any] = {}

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(a1, topk_weights, topk_ids)
        x, ids, weights, handle, event = self.buffer.dispatch(
            a1,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            num_experts=self.num_experts,
            num_max_tokens_per_rank=max(get_forward_context().num_tokens_across_ranks),
            do_cpu_sync=not self.worst_case,
            **self._launch(),
        )
        self._handles[dbo_current_ubatch_id()] = handle

        def receive() -> ExpertInputs:
            _wait(event)
            valid = ids
            if self.worst_case:
                self._streams.used_here(ids, handle.psum_num_recv_tokens_per_scaleup_rank)
                valid = self.ops.keep_ids(ids, handle.psum_num_recv_tokens_per_scaleup_rank)
            self._streams.used_by_compute(x, valid, weights)
            return ExpertInputs(layout="flat", x=x, topk_ids=valid, topk_weights=weights)

        return receive

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(expert_out)
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
        """See the V1 adapter: beside compute in an unsplit step, in the comm stream's order under DBO."""
        return {
            "num_sms": self.comm_sms if dbo_enabled() else 0,
            "previous_event": None,
            "async_with_compute_stream": not dbo_enabled(),
        }


def _wait(event: Any) -> None:
    """Let the current stream wait for an asynchronous call; a call in stream order has left no event."""
    if event.event is not None:
        event.current_stream_wait()
