"""The two pieces every layer is made of: RMS norm and the gated MLP. Needs torch."""

from __future__ import annotations

import torch

from dbo import registry
from dbo.moe.gated import gated
from dbo.moe.interface import PartialSums, summed

Weights = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` `[..., H]` over its root mean square, in fp32, times `weight` `[H]`; the dtype is kept."""
    if (kernels := registry.layer_kernels(x.device.type)) is not None:
        return kernels.rms_norm(x, weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `residual` and `x`, `[..., H]` each, and its `rms_norm`, in `out` if there is one."""
    if (kernels := registry.layer_kernels(x.device.type)) is not None:
        total, normed = kernels.add_rms_norm(residual, x, weight, eps, out)
        return total, normed
    total = residual + x
    normed = rms_norm(total, weight, eps)
    return total, normed if out is None else out.copy_(normed)


def add_three(residual: torch.Tensor, routed: torch.Tensor | PartialSums, shared: torch.Tensor | None) -> torch.Tensor:
    """`residual + (routed + shared)`, `[..., H]` each; without shared experts `residual + routed`."""
    kernels = registry.layer_kernels(residual.device.type)
    if kernels is None or shared is None or isinstance(routed, PartialSums) and not kernels.adds_partial(routed):
        return residual + (summed(routed) if shared is None else summed(routed) + shared)
    add = kernels.add_partial_sums if isinstance(routed, PartialSums) else kernels.add_three
    out: torch.Tensor = add(residual, routed, shared)
    return out


class MLP:
    """A gated MLP, `[T, H]` to `[T, H]`: a dense layer's, and the shared experts of an MoE layer."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate_up_proj = weights[f"{prefix}.gate_up_proj.weight"]
        self.down_proj = weights[f"{prefix}.down_proj.weight"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return gated(x @ self.gate_up_proj.t()) @ self.down_proj.t()
