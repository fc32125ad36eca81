"""What the adapters of DeepEP V1's normal mode and of V2 share: sums of rows come back, and what is waited for.

A call without `previous_event` starts behind the tail that the *current* stream has when the call is made. Under DBO the
player makes the comm stream current and lets it wait for the producer's event, recorded before the yield: the tail is then
this ubatch's own work. On compute it would be whatever the peer has queued meanwhile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dbo.contract.world import World
from dbo.moe.cross_stream import CrossStream
from dbo.moe.interface import Receiver
from dbo.ubatching.ring import dbo_current_ubatch_id, dbo_enabled


class DeepEPFlat:
    """Combine of one rank, for all layers and ubatches; dispatch is the adapter's own.

    Args:
        world: of this rank.
        buffer: the library's or the simulator's.
        num_experts: E, over all ranks.
        worst_case: nothing is waited for on the host, and outputs have the worst-case rows; graphs need it.
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

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(expert_out)
        with self._reserved():
            combined, _, event = self.buffer.combine(expert_out, self._take_handle(), **self._launch())

        def receive() -> Any:
            wait_for(event)
            self._streams.used_by_compute(combined)
            return combined

        return receive

    def copy_out(self, combined: Any) -> Any:
        return self._streams.copy_out(combined)

    def _keep_handle(self, handle: Any) -> None:
        """A dispatch's, for this ubatch's combine."""
        self._handles[dbo_current_ubatch_id()] = handle

    def _take_handle(self) -> Any:
        return self._handles.pop(dbo_current_ubatch_id())

    def _launch(self) -> dict[str, Any]:
        """How a call is launched: in an unsplit step beside compute, which waits for it when its result is wanted.

        Under DBO the call is made on the comm stream and stays in its order; the player's events do the rest.
        """
        raise NotImplementedError

    def _reserved(self) -> AbstractContextManager[None]:
        """Around a call of a library whose SMs are a setting."""
        return nullcontext()

    @property
    def _sms(self) -> int:
        return self.comm_sms if dbo_enabled() else 0


def wait_for(event: Any) -> None:
    """Let the current stream wait for an asynchronous call; a call in stream order has left no event."""
    if event.event is not None:
        event.current_stream_wait()
