"""The low-latency exchange on CPU tensors, between real processes over gloo (needs torch). For runs without devices.

It keeps the rules of DeepEP's `Buffer`: two halves, a receive that a hook completes, numbered calls,
fixed sizes, weights applied in combine. The send half starts the bytes and returns; the hook waits for them. Any
dtype.

Shapes: R ranks, L local experts, M rows a rank may send, T tokens, K experts a token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dbo.errors import NotAvailable
from dbo.trace import kinds
from gpu.watch import flight_recorder as board

if TYPE_CHECKING:
    from gpu.device import GpuWorld

NAME = "low_latency"


class GlooLowLatency:
    """One rank's end, with the two methods of DeepEP's `Buffer` that the adapter calls."""

    def __init__(self, world: GpuWorld, process_group: Any) -> None:
        self.world = world
        self.process_group = process_group
        self._results = [world.trace.new_buffer(f"{NAME}.result{i}", 1) for i in range(2)]

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Any, Any, None, Callable[[], None]]:
        """Start a dispatch of `x` `[T, H]`; returns (recv_x `[L, R * M, H]`, counts `[L]`, handle, None, hook)."""
        self._refuse(use_fp8=use_fp8, async_finish=async_finish, return_recv_hook=return_recv_hook)
        most, ranks = num_max_dispatch_tokens_per_rank, self.world.size
        tokens, hidden = x.shape
        if tokens > most:
            rule = "a low-latency call sends at most the rows that its buffers have room for"
            raise NotAvailable.of(rule, fix="raise --low-latency-max-tokens-per-rank", tokens=tokens, most=most)
        sent_ids = topk_idx.new_full((most, topk_idx.shape[1]), -1)
        sent_ids[:tokens] = topk_idx
        # A row that goes nowhere is not sent: the peer must not see what padding holds.
        sent_x = x.new_zeros((most, hidden))
        sent_x[:tokens] = torch.where((topk_idx >= 0).any(-1, keepdim=True), x, x.new_zeros(()))
        local = num_experts // ranks
        recv_x = x.new_empty((local, ranks * most, hidden))
        counts = torch.empty(local, dtype=torch.int32)
        handle: dict[str, Any] = {"tokens": tokens, "most": most, "num_experts": num_experts}
        real = int((topk_idx >= 0).any(-1).sum())
        finish = self._start("dispatch", [sent_x, sent_ids], {"rows": real, "real": self.world.trace.task.real_tokens})

        def deliver() -> None:
            got_x, got_ids = finish()
            layout = []
            for row in range(local):
                at = 0
                for source in range(ranks):
                    chosen = (got_ids[source] == self.world.rank * local + row).any(-1).nonzero().flatten()
                    recv_x[row, at : at + len(chosen)] = got_x[source][chosen]
                    layout.append((row, source, chosen, at))
                    at += len(chosen)
                counts[row] = at
            handle["layout"] = layout

        return recv_x, counts, handle, None, deliver

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: dict[str, Any],
        *,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, None, Callable[[], None]]:
        """Start a combine of `x` `[L, R * M, H]`; returns (combined `[T, H]`, None, hook)."""
        self._refuse(use_fp8=False, async_finish=async_finish, return_recv_hook=return_recv_hook)
        ranks, (local, _, hidden), most = self.world.size, x.shape, handle["most"]
        back = x.new_zeros((ranks, local, most, hidden))
        for row, source, chosen, at in handle["layout"]:
            back[source, row, chosen] = x[row, at : at + len(chosen)]
        combined = x.new_empty((handle["tokens"], hidden))
        finish = self._start("combine", [back], {}, scattered=True)

        def deliver() -> None:
            by_expert = finish()[0].view(-1, most, hidden)[:, : handle["tokens"]]
            total = torch.zeros(combined.shape, dtype=torch.float32)
            for k in range(topk_idx.shape[1]):
                here = topk_idx[:, k] >= 0
                rows = by_expert[topk_idx[here, k], here.nonzero().flatten()]
                total[here] += topk_weights[here, k, None].float() * rows.float()
            combined.copy_(total)

        return combined, None, deliver

    def _start(
        self, op: str, parts: list[torch.Tensor], attrs: dict[str, Any], *, scattered: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        """Send `parts` to every peer (`scattered`: block r of a part to rank r); what is returned waits for theirs."""
        world, recorder = self.world, self.world.trace
        call = world.next_index(NAME)
        place = {"call": call, "buffer": call % 2, "op": op}
        recorder.device(kinds.SEND, f"{op}.send", attrs={**place, **attrs})
        recorder.came(NAME, call, op)
        received: list[torch.Tensor] = []
        works = []
        for part in parts:
            blocks = part if scattered else part.unsqueeze(0).expand(world.size, *part.shape)
            outgoing = blocks.contiguous().view(torch.uint8)
            incoming = torch.empty_like(outgoing)
            works.append(dist.all_to_all_single(incoming, outgoing, group=self.process_group, async_op=True))
            received.append(incoming.view(part.dtype))

        def finish() -> list[torch.Tensor]:
            recorder.waits(board.COLLECTIVE, f"collective {op}", NAME, call)
            with world.peers_may_fail():
                for work in works:
                    work.wait()
            recorder.goes_on()
            recorder.device(
                kinds.RECV,
                f"{op}.recv",
                attrs=place,
                after=(recorder.meet_reference(NAME, call),),
                writes=(recorder.whole(self._results[call % 2]),),
            )
            return received

        return finish

    def _refuse(self, *, use_fp8: bool, async_finish: bool, return_recv_hook: bool) -> None:
        if use_fp8 or async_finish or not return_recv_hook:
            rule = "the low-latency exchange over gloo carries the model's dtype and returns a hook"
            fix = "call it with use_fp8=False, async_finish=False, return_recv_hook=True"
            flags = {"use_fp8": use_fp8, "async_finish": async_finish, "return_recv_hook": return_recv_hook}
            raise NotAvailable.of(rule, fix=fix, **flags)
