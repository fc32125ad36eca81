"""The arithmetic of the low-latency exchange on simulated tensors (needs torch).

Rows of expert e arrive ordered by (source rank, token), so results do not depend on timing. The payload keeps the model's
dtype: on devices DeepEP carries bf16, and so does a bf16 model here; an fp32 payload exists only in the simulator, where it
lets fp32 logits be compared tightly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sim import tensors

if TYPE_CHECKING:
    from sim.world import SimWorld


class NumericPayload:
    """Plans one rank's calls."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def dispatch(self, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int) -> DispatchPlan:
        return DispatchPlan(self.world, x, topk_idx, max_tokens, num_experts)

    def combine(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any) -> CombinePlan:
        return CombinePlan(self.world, x, topk_idx, topk_weights, handle)


class DispatchPlan:
    """`x` `[T, H]` to the ranks of its experts; the result is `[L, R * M, H]` with counts `[L]`."""

    def __init__(self, world: SimWorld, x: Tensor, topk_idx: Tensor, max_tokens: int, num_experts: int) -> None:
        self.world = world
        self.local = num_experts // world.size
        self.x, self.ids = tensors.raw(x), tensors.raw(topk_idx)
        shape = (self.local, world.size * max_tokens, x.shape[1])
        self.result = tensors.poisoned_empty(shape, x.dtype, world.rank)
        self.counts = tensors.poisoned_empty((self.local,), torch.int64, world.rank)
        self.handle: dict[str, Any] = {"tokens": x.shape[0], "max_tokens": max_tokens, "num_experts": num_experts}
        self.reads = (tensors.accesses(x), tensors.accesses(topk_idx))
        self.writes = (tensors.accesses(self.result), tensors.accesses(self.counts))
        self._out, self._counts = tensors.raw(self.result), tensors.raw(self.counts)
        remote = topk_idx.shape[1] * (world.size - 1) / world.size
        self.nbytes = int(x.shape[0] * remote * x.shape[1] * x.element_size())

    @torch.inference_mode()
    def send(self) -> tuple[Tensor, Tensor]:
        return self.x.clone(), self.ids.clone()

    def rows(self, real: int) -> int:
        return int((self.ids >= 0).any(-1).sum())

    @torch.inference_mode()
    def receive(self, sent: list[tuple[Tensor, Tensor]], rank: int) -> None:
        layout = []
        for local in range(self.local):
            expert, at = rank * self.local + local, 0
            for source, (x, ids) in enumerate(sent):
                tokens = (ids == expert).any(-1).nonzero().flatten()
                self._out[local, at : at + len(tokens)] = x[tokens]
                layout.append((source, local, tokens, at))
                at += len(tokens)
            self._counts[local] = at
            # Rows that nobody sent keep what the buffer held before; experts must not read past the count.
            self._out[local, at:] = 0
        self.handle["layout"] = layout


class CombinePlan:
    """Expert results back to the tokens' ranks, weighted and summed over the experts in ascending order."""

    def __init__(self, world: SimWorld, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: dict) -> None:
        self.world = world
        self.x, self.ids, self.weights = tensors.raw(x), tensors.raw(topk_idx), tensors.raw(topk_weights)
        self._handle = handle
        self.result = tensors.poisoned_empty((handle["tokens"], x.shape[2]), x.dtype, world.rank)
        self.counts, self.handle = None, None
        self.reads = (tensors.accesses(x), tensors.accesses(topk_idx), tensors.accesses(topk_weights))
        self.writes = (tensors.accesses(self.result),)
        self._out = tensors.raw(self.result)
        remote = topk_idx.shape[1] * (world.size - 1) / world.size
        self.nbytes = int(handle["tokens"] * remote * x.shape[2] * x.element_size())

    @torch.inference_mode()
    def send(self) -> list[tuple[int, int, Tensor, Tensor]]:
        local_experts = self.x.shape[0]
        return [
            (source, self.world.rank * local_experts + local, tokens, self.x[local, at : at + len(tokens)].clone())
            for source, local, tokens, at in self._handle["layout"]
        ]

    def rows(self, real: int) -> int:
        return int((self.ids >= 0).any(-1).sum())

    @torch.inference_mode()
    def receive(self, sent: list[list[tuple[int, int, Tensor, Tensor]]], rank: int) -> None:
        total = torch.zeros(self._out.shape, dtype=torch.float32)
        for blocks in sent:
            for source, expert, tokens, rows in blocks:
                if source == rank and len(tokens):
                    weight = torch.where(self.ids[tokens] == expert, self.weights[tokens], 0.0).sum(-1, keepdim=True)
                    total[tokens] += weight.float() * rows.float()
        self._out.copy_(total)
