"""Needs torch. One payload for output and LSE: `[C, B, N, D + L]` in the output's dtype, bit for bit.

The first D elements of a row are the partial output, the last L carry the fp32 *bits* of its LSE (16-bit dtypes: low
half first). Nothing is converted on the way: everything moves as integers, so NaN payloads, denormals and infinities
survive.
"""

from __future__ import annotations

import torch

from dbo.errors import ArgumentError

NEG_INF_BITS = -0x800000  # 0xFF800000, minus infinity, as a signed 32-bit integer
_LANES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 1}
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def lse_pack_dim(dtype: torch.dtype) -> int:
    """Payload elements of `dtype` that carry one fp32 LSE: 1 for fp32, 2 for fp16 and bf16.

    Raises:
        ValueError: any other dtype.
    """
    if dtype not in _LANES:
        raise ArgumentError.of("the exchange carries fp16, bf16 or fp32", fix="cast the partial output", dtype=dtype)
    return _LANES[dtype]


def check_inputs(
    out_BHD: torch.Tensor,
    lse_BH: torch.Tensor,
    world_size: int,
    seq_lens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
) -> None:
    """Refuse what the exchange cannot carry, before anything is allocated or sent.

    Raises:
        ValueError: wrong shapes or dtypes, H not divisible by C, or half of the mask.
    """
    if out_BHD.dim() != 3 or tuple(lse_BH.shape) != tuple(out_BHD.shape[:2]):
        raise ArgumentError.of(
            "the partial output is [B, H, D] and its LSE [B, H]",
            fix="reshape them",
            cp_attn_out=list(out_BHD.shape),
            cp_attn_lse=list(lse_BH.shape),
        )
    lse_pack_dim(out_BHD.dtype)
    if lse_BH.dtype not in _LANES:
        raise ArgumentError.of(
            "an LSE is fp32, or 16-bit to be widened", fix="cast it to fp32", cp_attn_lse=lse_BH.dtype
        )
    if world_size < 1 or out_BHD.shape[1] % world_size:
        raise ArgumentError.of(
            "the ranks of a DCP group divide the query heads",
            fix="choose a DCP size that divides them",
            H=out_BHD.shape[1],
            world_size=world_size,
        )
    _check_mask(seq_lens, query_start_loc)


def _check_mask(seq_lens: torch.Tensor | None, query_start_loc: torch.Tensor | None) -> None:
    if (seq_lens is None) != (query_start_loc is None):
        given = "query_start_loc" if seq_lens is None else "seq_lens"
        raise ArgumentError.of(
            "seq_lens and query_start_loc together say which rows are empty", fix="pass both or none", only=given
        )
    if seq_lens is None or query_start_loc is None:
        return
    if seq_lens.dim() != 1 or tuple(query_start_loc.shape) != (seq_lens.shape[0] + 1,):
        raise ArgumentError.of(
            "seq_lens is [R] and query_start_loc [R + 1]",
            fix="slice both to the same requests",
            seq_lens=list(seq_lens.shape),
            query_start_loc=list(query_start_loc.shape),
        )


def empty_rows(num_rows: int, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
    """Rows without a local key: their request has local length 0, or they are graph padding.

    Args:
        num_rows: B.
        seq_lens: `[R]` integers, local KV lengths.
        query_start_loc: `[R + 1]` integers, first row of each request; rows from the last entry on are padding.

    Returns:
        `[B]` bool on the device of `query_start_loc`. No host read, so it is legal during capture.
    """
    rows = torch.arange(num_rows, device=query_start_loc.device, dtype=query_start_loc.dtype)
    padding = rows >= query_start_loc[-1]
    if seq_lens.shape[0] == 0:
        return padding
    # right=True: of several requests that start at one row, the last one owns it; the others have no row.
    owner = torch.searchsorted(query_start_loc, rows, right=True) - 1
    return padding | (seq_lens[owner.clamp(0, seq_lens.shape[0] - 1)] <= 0)


def lse_bits(lse_BH: torch.Tensor, empty_B: torch.Tensor | None) -> torch.Tensor:
    """fp32 bits of an LSE as int32 `[B, H]`, minus infinity in empty rows. A 16-bit LSE is widened *first*."""
    bits = lse_BH.float().view(torch.int32)
    return bits if empty_B is None else torch.where(empty_B[:, None], NEG_INF_BITS, bits)


def pack(
    out_BHD: torch.Tensor, lse_BH: torch.Tensor, send_CBNP: torch.Tensor, empty_B: torch.Tensor | None = None
) -> None:
    """Write the payload of every destination rank into `send_CBNP`.

    Args:
        out_BHD: `[B, H, D]`, any strides.
        lse_BH: `[B, H]`, any strides, fp32 or 16-bit.
        send_CBNP: `[C, B, N, D + L]` contiguous, dtype of `out_BHD`; overwritten completely.
        empty_B: `[B]` bool: rows whose LSE becomes minus infinity.
    """
    world_size, rows, heads, _ = send_CBNP.shape
    dim, num_lanes = out_BHD.shape[2], lse_pack_dim(out_BHD.dtype)
    raw = _BITS[out_BHD.dtype]
    send = send_CBNP.view(raw)
    send[..., :dim] = out_BHD.view(raw).unflatten(1, (world_size, heads)).permute(1, 0, 2, 3)
    lanes = lse_bits(lse_BH, empty_B).unsqueeze(-1).contiguous().view(raw)  # little-endian storage: low half first
    send[..., dim:] = lanes.view(rows, world_size, heads, num_lanes).permute(1, 0, 2, 3)


def unpack(recv_CBNP: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a payload apart.

    Returns:
        `out_CBND` `[C, B, N, D]`, a view, and `lse_CBN` `[C, B, N]` fp32, the very bits that were packed.
    """
    lanes = recv_CBNP.view(_BITS[recv_CBNP.dtype])[..., head_dim:]
    return recv_CBNP[..., :head_dim], lanes.contiguous().view(torch.float32).squeeze(-1)
