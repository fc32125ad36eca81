"""Needs torch. Slow, obvious float64 references: what the exchange must equal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Partials:
    """What the C ranks of a group computed: `out_CBHD` in the working dtype, `lse_CBH` fp32."""

    out_CBHD: torch.Tensor
    lse_CBH: torch.Tensor


def peer_of_position(positions: torch.Tensor, world_size: int, interleave: int) -> torch.Tensor:
    """The DCP peer that stores the key of each position."""
    return (positions // interleave) % world_size


def attention(
    scores_BHK: torch.Tensor, values_KD: torch.Tensor, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 softmax over K keys; minus infinity hides a key. All hidden: output 0, LSE minus infinity.

    The scores are logits in the base that is asked for: weights are e ** score or 2 ** score.
    """
    scores = scores_BHK.double() * (1.0 if is_lse_base_on_e else math.log(2.0))
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    weights = torch.where(lse.isfinite().unsqueeze(-1), torch.exp(scores - lse.unsqueeze(-1)), 0.0)
    return weights @ values_KD.double(), lse * (1.0 if is_lse_base_on_e else 1.0 / math.log(2.0))


def shard_attention(
    scores_BHK: torch.Tensor,
    values_KD: torch.Tensor,
    peer_K: torch.Tensor,
    world_size: int,
    dtype: torch.dtype,
    is_lse_base_on_e: bool = True,
) -> Partials:
    """What each of the ranks computes when key k lives on rank `peer_K[k]`, rounded as a kernel would round it."""
    outs, lses = [], []
    for rank in range(world_size):
        mine = torch.where(peer_K == rank, scores_BHK.double(), -math.inf)
        out, lse = attention(mine, values_KD, is_lse_base_on_e)
        outs.append(out.to(dtype))
        lses.append(lse.float())
    return Partials(out_CBHD=torch.stack(outs), lse_CBH=torch.stack(lses))


def merge_float64(
    out_CBND: torch.Tensor, lse_CBN: torch.Tensor, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge in float64, written as the definition says: sum of weight times output over sum of weights."""
    base = math.e if is_lse_base_on_e else 2.0
    lse = lse_CBN.double()
    lse = torch.where(torch.isnan(lse) | (lse == math.inf), -math.inf, lse)
    peak = lse.amax(dim=0)
    shift = torch.where(peak.isfinite(), peak, 0.0)
    weights = base ** (lse - shift)
    total = weights.sum(dim=0)
    parts = torch.where(weights.unsqueeze(-1) == 0, 0.0, out_CBND.double()) * weights.unsqueeze(-1)
    alive = total > 0
    out = torch.where(alive.unsqueeze(-1), parts.sum(dim=0) / total.unsqueeze(-1), 0.0)
    return out, torch.where(alive, shift + torch.log(total) / math.log(base), -math.inf)
