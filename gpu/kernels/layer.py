"""Needs torch and Triton. What `dbo.registry.layer_kernels("cuda")` answers: a layer's fused kernels, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dbo.moe.grouped_experts import RowMoves
from dbo.moe.interface import PartialSums
from dbo.moe.symm_copy import CopyRows
from gpu.kernels import copy_rows, layer_rows
from gpu.kernels.attention import FusedDCPAttention, FusedMLAttention
from gpu.kernels.expert_rows import TRITON_ROWS


def gate_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`[T, H]` by `[E, H]` to `[T, E]` fp32. Products of bf16 are exact in fp32, so nothing is widened beforehand."""
    if hidden.dtype == torch.bfloat16 and weight.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.float().t()


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """Each with the signature and the rounding of what it replaces.

    Attributes:
        rms_norm, add_rms_norm, add_three, gated: as in `dbo.model.layers`. adds_partial, add_partial_sums: `add_three` of
            partial sums, where they are few enough.
        gate_logits: `[T, H]` hidden and `[E, H]` weight to `[T, E]` fp32. route: see `gpu.kernels.layer_rows`.
        rows: how rows come to their experts and back. copy_rows: what is around the copies of backend `symm_copy`.
        attention, dcp_attention: the classes of a layer's attention, alone and on a peer of a DCP group.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = layer_rows.rms_norm
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = layer_rows.add_rms_norm
    add_three: Callable[[Tensor, Tensor, Tensor], Tensor] = layer_rows.add_three
    adds_partial: Callable[[PartialSums], bool] = copy_rows.adds_partial
    add_partial_sums: Callable[[Tensor, PartialSums, Tensor], Tensor] = copy_rows.add_partial_sums
    gated: Callable[[Tensor], Tensor] = layer_rows.gated
    gate_logits: Callable[[Tensor, Tensor], Tensor] = gate_logits
    route: Callable[..., Any] = layer_rows.route
    rows: RowMoves = TRITON_ROWS
    copy_rows: CopyRows = copy_rows.TRITON_COPY_ROWS
    attention: type[FusedMLAttention] = FusedMLAttention
    dcp_attention: type[FusedDCPAttention] = FusedDCPAttention


LAYER = LayerKernels()
