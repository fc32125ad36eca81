"""Needs torch. The paths that `a2a` replaces, kept as oracles and as the baseline of every benchmark.

`two_collectives` sends outputs and LSE apart; `ag_rs` gathers every LSE, rescales locally and reduce-scatters. Both
take the arguments of `dcp_a2a_lse_reduce` and return what it returns.
"""

from __future__ import annotations

import math

import torch

from dbo.dcp.exchange import TORCH_KERNELS, Reduced, dcp_a2a_lse_reduce
from dbo.dcp.groups import DCPGroup, all_gather_into_tensor, all_to_all_single, reduce_scatter_tensor
from dbo.dcp.merging import clean_lse, merge
from dbo.dcp.packing import check_inputs, empty_rows


def _masked_lse(
    lse_BH: torch.Tensor, seq_lens: torch.Tensor | None, query_start_loc: torch.Tensor | None
) -> torch.Tensor:
    lse = lse_BH.float()
    if seq_lens is None or query_start_loc is None:
        return lse
    return torch.where(empty_rows(lse.shape[0], seq_lens, query_start_loc)[:, None], -math.inf, lse)


def two_collectives(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: DCPGroup,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> Reduced:
    """One all-to-all for the outputs, one for the LSE, then the merge. The LSE travels as fp32, in no lane."""
    world_size = cp_group.world_size
    check_inputs(cp_attn_out, cp_attn_lse, world_size, seq_lens, query_start_loc)
    if world_size == 1:
        return _alone(cp_attn_out, cp_attn_lse, cp_group, return_lse, seq_lens, query_start_loc)
    send_out = cp_attn_out.unflatten(1, (world_size, -1)).transpose(0, 1).contiguous()
    lse_BH = _masked_lse(cp_attn_lse, seq_lens, query_start_loc)
    send_lse = lse_BH.unflatten(1, (world_size, -1)).transpose(0, 1).contiguous()
    recv_out, recv_lse = torch.empty_like(send_out), torch.empty_like(send_lse)
    all_to_all_single(recv_out, send_out, cp_group)
    all_to_all_single(recv_lse, send_lse, cp_group)
    merged, lse = merge(recv_out, recv_lse, is_lse_base_on_e)
    return (merged, lse) if return_lse else merged


def ag_rs(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: DCPGroup,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    reduce_dtype: torch.dtype = torch.float32,
) -> Reduced:
    """All-gather the LSE, rescale the local output by its share of the sum, reduce-scatter over heads.

    `reduce_dtype` is the dtype that is summed on the wire: fp32 is exact but sends twice the bytes of a 16-bit output.
    """
    world_size, rank = cp_group.world_size, cp_group.rank
    check_inputs(cp_attn_out, cp_attn_lse, world_size, seq_lens, query_start_loc)
    if world_size == 1:
        return _alone(cp_attn_out, cp_attn_lse, cp_group, return_lse, seq_lens, query_start_loc)
    exp, log = (torch.exp, torch.log) if is_lse_base_on_e else (torch.exp2, torch.log2)
    mine_BH = clean_lse(_masked_lse(cp_attn_lse, seq_lens, query_start_loc)).contiguous()
    lse_CBH = torch.empty((world_size, *mine_BH.shape), dtype=torch.float32, device=mine_BH.device)
    all_gather_into_tensor(lse_CBH, mine_BH, cp_group)
    peak = lse_CBH.amax(dim=0)
    shift = torch.where(peak == -math.inf, 0.0, peak)
    total = exp(lse_CBH - shift).sum(dim=0)
    share = torch.where(total > 0, exp(mine_BH - shift) / total, 0.0).unsqueeze(-1)
    scaled = torch.where(share > 0, cp_attn_out.float() * share, 0.0).to(reduce_dtype)
    by_rank = scaled.unflatten(1, (world_size, -1)).transpose(0, 1).contiguous()
    merged = torch.empty_like(by_rank[0])
    reduce_scatter_tensor(merged, by_rank, cp_group)
    lse_BH = torch.where(total > 0, peak + log(total), -math.inf)
    heads = lse_BH.shape[1] // world_size
    result = merged.to(cp_attn_out.dtype)
    return (result, lse_BH[:, rank * heads : (rank + 1) * heads].contiguous()) if return_lse else result


def _alone(
    out_BHD: torch.Tensor,
    lse_BH: torch.Tensor,
    cp_group: DCPGroup,
    return_lse: bool,
    seq_lens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
) -> Reduced:
    return dcp_a2a_lse_reduce(
        out_BHD,
        lse_BH,
        cp_group,
        return_lse,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        kernels=TORCH_KERNELS,
    )
