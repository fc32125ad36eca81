"""The MoE layer between the gate and the residual: dispatch, routed experts, combine, shared experts.

It names its points and hands each one's work to the player; in which order they run, and where the baton is passed, is the
schedule's business. No torch: whatever arrays the backend and the experts understand flow through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbo.contract.world import Event
from dbo.moe.interface import Experts, FusedMoEPrepareAndFinalizeModular, Receiver, RecvHook, summed
from dbo.moe.side_stream import SideStream
from dbo.ubatching.forward_context import get_forward_context
from dbo.ubatching.ring import dbo_enabled, dbo_register_recv_hook


class FusedMoEModularKernel:
    """One layer's MoE on one rank.

    Args:
        prepare_finalize: the all-to-all backend.
        experts: this rank's routed experts.
        shared_experts: `[T, H] -> [T, H]`, or None.
        shared_placement: "overlap": they run at the schedule's point S; "before": before the dispatch, as a part of A1,
            whatever the schedule says; "stream": on the side stream, from A1 to the end of the layer. The result is the same.
        side: where "stream" runs them; it also tells the allocator what crosses streams when a schedule has S on comm.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular,
        experts: Experts,
        shared_experts: Callable[[Any], Any] | None = None,
        shared_placement: str = "overlap",
        side: SideStream | None = None,
    ) -> None:
        self.prepare_finalize = prepare_finalize
        self.experts = experts
        self.shared_experts = shared_experts
        self.shared_placement = shared_placement
        self.side = side

    def input_buffer(self, like: Any) -> Any | None:
        """Where the backend would like the layer's input, of `like`'s shape and dtype, to be written; None: anywhere."""
        ask = getattr(self.prepare_finalize, "input_buffer", None)
        return None if ask is None else ask(like)

    def forward(self, hidden: Any, topk_weights: Any, topk_ids: Any, *, layer: int) -> Any:
        """Args: hidden `[T, H]`, topk_weights `[T, K]` fp32, topk_ids `[T, K]` int64 (-1: padding). Returns `[T, H]`."""
        routed, shared = self.parts(hidden, topk_weights, topk_ids, layer=layer)
        return summed(routed) if shared is None else summed(routed) + shared

    def parts(self, hidden: Any, topk_weights: Any, topk_ids: Any, *, layer: int) -> tuple[Any, Any]:
        """As `forward`, but what the routed experts (maybe as `PartialSums`) and the shared ones (or None) gave.

        For a caller that adds more to it.
        """
        call = _Call(self, hidden, topk_weights, topk_ids)
        thunks: dict[str, Callable[[], Any]] = {
            "D.send": call.dispatch_send,
            "D.recv": call.dispatch_recv,
            "MLP": call.mlp,
            "C.send": call.combine_send,
            "C.recv": call.combine_recv,
            "copy": call.copy_out,
        }
        if self.shared_experts is not None:
            if self.shared_placement == "overlap":
                thunks["S"] = call.shared
            elif self.shared_placement == "before":
                call.shared()
            else:
                call.shared_aside()
        get_forward_context().player.play(thunks, layer=layer)
        call.join_aside()
        return call.routed, call.shared_out


class _Call:
    """The values of one pass through the layer, filled in as the points run."""

    def __init__(self, kernel: FusedMoEModularKernel, hidden: Any, topk_weights: Any, topk_ids: Any) -> None:
        self.kernel = kernel
        self.hidden = hidden
        self.routing = (topk_weights, topk_ids)
        self.receive: Receiver
        self.arrived: Any = None
        self.expert_out: Any = None
        self.shared_out: Any = None
        self.shared_done: Event | None = None
        self.routed: Any = None

    def dispatch_send(self) -> None:
        self.receive = _start(self.kernel.prepare_finalize.prepare_async(self.hidden, *self.routing))

    def dispatch_recv(self) -> None:
        self.arrived = self.receive()

    def mlp(self) -> None:
        self.expert_out = self.kernel.experts.apply(self.arrived)
        self.arrived = None

    def combine_send(self) -> None:
        self.receive = _start(self.kernel.prepare_finalize.finalize_async(self.expert_out, *self.routing))
        self.expert_out = None

    def shared(self) -> None:
        work, side = self.kernel.shared_experts, self.kernel.side
        assert work is not None
        self.shared_out = work(self.hidden) if side is None else side.stay(work, self.hidden)

    def shared_aside(self) -> None:
        assert self.kernel.shared_experts is not None and self.kernel.side is not None
        self.shared_out, self.shared_done = self.kernel.side.launch(self.kernel.shared_experts, self.hidden)

    def join_aside(self) -> None:
        if self.shared_done is not None:
            assert self.kernel.side is not None
            self.shared_out = self.kernel.side.join(self.shared_out, self.shared_done)

    def combine_recv(self) -> None:
        self.routed = self.receive()

    def copy_out(self) -> None:
        self.routed = self.kernel.prepare_finalize.copy_out(self.routed)


def _start(started: Receiver | tuple[RecvHook, Receiver]) -> Receiver:
    """Leave a backend's hook to the peer; without a peer run it when the data are wanted."""
    if not isinstance(started, tuple):
        return started
    hook, receiver = started
    if dbo_enabled():
        dbo_register_recv_hook(hook)
        return receiver

    def receive() -> Any:
        hook()
        return receiver()

    return receive
