"""The activation of a gated MLP, fused where the device has a kernel for it. Needs torch."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from dbo import registry


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the last axis, times its second half: `[..., 2I]` to `[..., I]`."""
    if (kernels := registry.layer_kernels(gate_up.device.type)) is not None:
        return kernels.gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
