"""Needs torch. `a2a`: one packed all-to-all, then the merge."""

from __future__ import annotations

import math
from typing import Protocol, TypeAlias

import torch

from dbo.dcp.groups import DCPGroup, all_to_all_single
from dbo.dcp.merging import merge
from dbo.dcp.packing import check_inputs, empty_rows, lse_pack_dim, pack, unpack
from dbo.dcp.workspace import Slot, WorkspaceManager

Reduced: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class PackKernels(Protocol):
    """The two local halves of the exchange; plain torch here, fused kernels on a device."""

    def pack(
        self,
        out_BHD: torch.Tensor,
        lse_BH: torch.Tensor,
        send_CBNP: torch.Tensor,
        seq_lens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
    ) -> None:
        """Fill `send_CBNP` `[C, B, N, D + L]`, with minus infinity as the LSE of empty rows."""

    def unpack_merge(
        self, recv_CBNP: torch.Tensor, head_dim: int, is_lse_base_on_e: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, N, D]` and `[B, N]` fp32, merged over the C sources of `recv_CBNP`."""


class TorchKernels:
    """Plain torch, on any device."""

    def pack(
        self,
        out_BHD: torch.Tensor,
        lse_BH: torch.Tensor,
        send_CBNP: torch.Tensor,
        seq_lens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
    ) -> None:
        pack(out_BHD, lse_BH, send_CBNP, _mask(out_BHD, seq_lens, query_start_loc))

    def unpack_merge(
        self, recv_CBNP: torch.Tensor, head_dim: int, is_lse_base_on_e: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return merge(*unpack(recv_CBNP, head_dim), is_lse_base_on_e)


TORCH_KERNELS = TorchKernels()


def dcp_a2a_lse_reduce(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: DCPGroup,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    workspace: WorkspaceManager | None = None,
    slot: Slot | None = None,
    kernels: PackKernels = TORCH_KERNELS,
) -> Reduced:
    """Exchange partial outputs and LSE in one collective and merge them. Every rank of the group calls it, B = 0 too.

    Args:
        cp_attn_out: `[B, H, D]` fp16, bf16 or fp32, any strides: all heads, this rank's keys only.
        cp_attn_lse: `[B, H]` fp32 or 16-bit: the log-sum-exp of this rank's scores.
        cp_group: the C ranks; `[C]` chunks are sent in the order of its ranks.
        return_lse: also return the LSE over all keys.
        is_lse_base_on_e: the base of `cp_attn_lse` and of the LSE returned: e, else 2.
        seq_lens, query_start_loc: `[R]` local KV lengths and `[R + 1]` first rows; rows without local keys, and rows
            from `query_start_loc[-1]` on, get LSE minus infinity.
        workspace: where the staging comes from; None: temporaries of this call.
        slot: (ubatch, lane) of the staging; None: lane "dcp" of the current ubatch.
        kernels: who packs and merges.

    Returns:
        `[B, H / C, D]` in the dtype of `cp_attn_out`, and with `return_lse` also `[B, H / C]` fp32.

    Raises:
        ValueError: see `dbo.dcp.packing.check_inputs`.
        WorkspaceError: the staging would have to grow after the lock.
    """
    world_size = cp_group.world_size
    check_inputs(cp_attn_out, cp_attn_lse, world_size, seq_lens, query_start_loc)
    if world_size == 1:
        return _single_rank(cp_attn_out, cp_attn_lse, return_lse, seq_lens, query_start_loc)
    rows, heads, dim = cp_attn_out.shape
    shape = (world_size, rows, heads // world_size, dim + lse_pack_dim(cp_attn_out.dtype))
    if workspace is None:
        send = torch.empty(shape, dtype=cp_attn_out.dtype, device=cp_attn_out.device)
        recv = torch.empty_like(send)
    else:
        staging = ((shape, cp_attn_out.dtype), (shape, cp_attn_out.dtype))
        send, recv = workspace.get_simultaneous(*staging, slot=slot, lane="dcp", caller="dcp_a2a_lse_reduce")
    kernels.pack(cp_attn_out, cp_attn_lse, send, seq_lens, query_start_loc)
    all_to_all_single(recv, send, cp_group)
    merged, lse = kernels.unpack_merge(recv, dim, is_lse_base_on_e)
    return (merged, lse) if return_lse else merged


def _single_rank(
    out_BHD: torch.Tensor,
    lse_BH: torch.Tensor,
    return_lse: bool,
    seq_lens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
) -> Reduced:
    """C = 1: nothing to merge. Rows without keys become 0 and minus infinity, all others keep their bits."""
    empty_B = _mask(out_BHD, seq_lens, query_start_loc)
    lse = lse_BH.float()
    if empty_B is not None:
        out_BHD = torch.where(
            empty_B[:, None, None], torch.zeros((), dtype=out_BHD.dtype, device=out_BHD.device), out_BHD
        )
        lse = torch.where(empty_B[:, None], -math.inf, lse)
    return (out_BHD, lse) if return_lse else out_BHD


def _mask(
    out_BHD: torch.Tensor, seq_lens: torch.Tensor | None, query_start_loc: torch.Tensor | None
) -> torch.Tensor | None:
    if seq_lens is None or query_start_loc is None:
        return None
    return empty_rows(out_BHD.shape[0], seq_lens, query_start_loc)
