"""The two pieces every layer is made of: RMS norm and the gated MLP. Needs torch."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from dbo import registry

Weights = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` `[..., H]` over its root mean square, in fp32, times `weight` `[H]`; the dtype is kept."""
    if (kernels := registry.layer_kernels(x.device.type)) is not None:
        return kernels.rms_norm(x, weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the last axis, times its second half: `[..., 2I]` to `[..., I]`."""
    if (kernels := registry.layer_kernels(gate_up.device.type)) is not None:
        return kernels.gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


class MLP:
    """A gated MLP, `[T, H]` to `[T, H]`: a dense layer's, and the shared experts of an MoE layer."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate_up_proj = weights[f"{prefix}.gate_up_proj.weight"]
        self.down_proj = weights[f"{prefix}.down_proj.weight"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return gated(x @ self.gate_up_proj.t()) @ self.down_proj.t()
