"""Needs torch and Triton. Pack, and unpack + merge, as one kernel each: `dbo.dcp.exchange.PackKernels` for a device.

Bits move as integers, so fp16 and bf16 share a kernel and no NaN payload is touched. Any head dimension, any strides of
the inputs; the payload and the results are contiguous. Shapes: see `dbo.dcp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dbo.dcp.packing import lse_pack_dim
from gpu.kernels.rows import RAW, block_dim, clean, logarithm, masked_lse_bits, power

_MAX_BLOCK_ROWS = 128  # addresses of rows are kept in registers


# Payload rows are D + L elements long, so stores are at best one word wide. Loads that are wider would need another
# layout, and the detour through shared memory costs more than they save: hide the alignment of the strides from the
# compiler.
@triton.jit(
    do_not_specialize=["num_rows", "num_requests"],
    do_not_specialize_on_alignment=["stride_out_row", "stride_out_head"],
)
def _pack(
    out,
    lse,
    send,
    seq_lens,
    query_start_loc,
    num_rows,
    num_requests,
    stride_out_row,
    stride_out_head,
    stride_out_dim,
    stride_lse_row,
    stride_lse_head,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = flat // H
    head = flat % H
    live = row < num_rows
    source = row * stride_out_row + head * stride_out_head
    # Rows of D + L elements begin anywhere, whatever Triton concludes from runs of `head % N`: it took multiples of 4
    # for granted that are none, and stored four words at once where only one is aligned (tests/gpu/ptx_alignment.py).
    target = tl.multiple_of((((head // N) * num_rows + row) * N + head % N) * (D + L), 1)
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        inside = live[:, None] & (dim < D)[None, :]
        bits = tl.load(out + source[:, None] + dim[None, :] * stride_out_dim, mask=inside)
        tl.store(send + target[:, None] + dim[None, :], bits, mask=inside)
    lanes = masked_lse_bits(
        lse, row, head, live, stride_lse_row, stride_lse_head, seq_lens, query_start_loc, num_requests, HAS_MASK
    )
    if L == 1:
        tl.store(send + target + D, lanes, mask=live)
    else:
        tl.store(send + target + D, (lanes & 0xFFFF).to(tl.int16), mask=live)
        tl.store(send + target + D + 1, (lanes >> 16).to(tl.int16), mask=live)


@triton.jit
def _packed_lse(recv, row, live, D: tl.constexpr, L: tl.constexpr):
    """The LSE at the end of payload row `row`, cleaned; minus infinity where not `live`."""
    lane = recv + row * (D + L) + D
    if L == 1:
        bits = tl.load(lane, mask=live, other=0)
    else:
        low = tl.load(lane, mask=live, other=0).to(tl.int32) & 0xFFFF
        bits = low | (tl.load(lane + 1, mask=live, other=0).to(tl.int32) << 16)
    return clean(tl.where(live, bits.to(tl.float32, bitcast=True), float("-inf")))


@triton.jit(do_not_specialize=["num_flat"])
def _unpack_merge(
    recv,
    merged,
    merged_lse,
    num_flat,
    WORLD: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    BASE_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = flat < num_flat
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for source in tl.static_range(WORLD):
        peak = tl.maximum(peak, _packed_lse(recv, source * num_flat + flat, live, D, L))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([BLOCK_R], tl.float32)
    for source in tl.static_range(WORLD):
        total += power(_packed_lse(recv, source * num_flat + flat, live, D, L) - shift, BASE_E)
    tl.store(merged_lse + flat, tl.where(total > 0, shift + logarithm(total, BASE_E), float("-inf")), mask=live)
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        inside = live[:, None] & (dim < D)[None, :]
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for source in tl.static_range(WORLD):
            row = source * num_flat + flat
            weight = power(_packed_lse(recv, row, live, D, L) - shift, BASE_E)[:, None]
            bits = tl.load(recv + row[:, None] * (D + L) + dim[None, :], mask=inside, other=0)
            part = bits.to(merged.dtype.element_ty, bitcast=True).to(tl.float32)
            acc += tl.where(weight > 0, part * weight, 0.0)
        acc = tl.where(total[:, None] > 0, acc / total[:, None], 0.0)
        tl.store(merged + flat[:, None] * D + dim[None, :], acc.to(merged.dtype.element_ty), mask=inside)


def _in_words(out_BHD: torch.Tensor) -> bool:
    """Whether 16-bit rows can move as 32-bit words, LSE lanes included: all that is addressed lies on word borders."""
    if out_BHD.element_size() != 2:
        return False
    *strides, last = out_BHD.stride()
    even = all(s % 2 == 0 for s in (*strides, out_BHD.shape[2], out_BHD.storage_offset()))
    return last == 1 and even and out_BHD.data_ptr() % 4 == 0


def _block_rows(elements: int, columns: int) -> int:
    return min(_MAX_BLOCK_ROWS, max(1, elements // columns))


@dataclass(frozen=True, kw_only=True)
class TritonKernels:
    """Fused pack and unpack + merge.

    Attributes:
        pack_bytes: bytes of the partial output that one program of `pack` moves.
        merge_elements: elements of the result that one program of `unpack_merge` makes.
        num_warps: warps of a program.
    """

    pack_bytes: int = 4096
    merge_elements: int = 8192
    num_warps: int = 8

    def pack(
        self,
        out_BHD: torch.Tensor,
        lse_BH: torch.Tensor,
        send_CBNP: torch.Tensor,
        seq_lens: torch.Tensor | None,
        query_start_loc: torch.Tensor | None,
    ) -> None:
        """Fill `send_CBNP`; the mask is part of the kernel."""
        rows, heads, dim = out_BHD.shape
        if rows == 0:
            return
        raw = torch.int32 if _in_words(out_BHD) else RAW[out_BHD.dtype]
        source, send = out_BHD.view(raw), send_CBNP.view(raw)
        dim = source.shape[2]
        columns = block_dim(dim)
        block_rows = _block_rows(self.pack_bytes // raw.itemsize, columns)
        has_mask = seq_lens is not None
        _pack[(triton.cdiv(rows * heads, block_rows),)](
            source,
            lse_BH,
            send,
            seq_lens if has_mask else lse_BH,
            query_start_loc if has_mask else lse_BH,
            rows,
            seq_lens.shape[0] if seq_lens is not None else 0,
            *source.stride(),
            *lse_BH.stride(),
            H=heads,
            N=send_CBNP.shape[2],
            D=dim,
            L=send.shape[3] - dim,
            HAS_MASK=has_mask,
            BLOCK_R=block_rows,
            BLOCK_D=columns,
            num_warps=self.num_warps,
        )

    def unpack_merge(
        self, recv_CBNP: torch.Tensor, head_dim: int, is_lse_base_on_e: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, N, D]` and `[B, N]` fp32."""
        world_size, rows, heads, _ = recv_CBNP.shape
        merged = torch.empty((rows, heads, head_dim), dtype=recv_CBNP.dtype, device=recv_CBNP.device)
        merged_lse = torch.empty((rows, heads), dtype=torch.float32, device=recv_CBNP.device)
        if rows == 0:
            return merged, merged_lse
        columns = block_dim(head_dim)
        block_rows = _block_rows(self.merge_elements, columns)
        _unpack_merge[(triton.cdiv(rows * heads, block_rows),)](
            recv_CBNP.view(RAW[recv_CBNP.dtype]),
            merged,
            merged_lse,
            rows * heads,
            WORLD=world_size,
            D=head_dim,
            L=lse_pack_dim(recv_CBNP.dtype),
            BASE_E=is_lse_base_on_e,
            BLOCK_R=block_rows,
            BLOCK_D=columns,
            num_warps=self.num_warps,
        )
        return merged, merged_lse


TRITON_KERNELS = TritonKernels()
