"""Packing: bits survive, masks are right, wrong inputs are refused."""

from __future__ import annotations

import math

import pytest
import torch

from dbo.dcp import empty_rows, lse_pack_dim, pack, unpack

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
RAW = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
# -inf, +inf, quiet NaN with a payload, signalling NaN, negative NaN, 0, -0, smallest denormal, a denormal, 1e4,
# 5.2578125
HARD_BITS = [
    -0x800000,
    0x7F800000,
    0x7FC12345,
    0x7F800001,
    -0x3EDCBA,
    0,
    -0x80000000,
    1,
    0x7FFFFF,
    0x461C4000,
    0x40A84000,
]


def packed(out: torch.Tensor, lse: torch.Tensor, world: int, empty: torch.Tensor | None = None) -> torch.Tensor:
    rows, heads, dim = out.shape
    send = torch.full((world, rows, heads // world, dim + lse_pack_dim(out.dtype)), math.nan, dtype=out.dtype)
    pack(out, lse, send, empty)
    return send


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_output_bit_pattern_arrives(dtype: torch.dtype, world: int) -> None:
    raw = RAW[dtype]
    if raw is torch.int16:
        bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(raw).view(64, 8, 128)
    else:
        bits = torch.randint(-(1 << 31), 1 << 31, (64, 8, 128), dtype=torch.int64).to(raw)
    out, _ = unpack(packed(bits.view(dtype), torch.zeros(64, 8), world), 128)
    assert torch.equal(out.permute(1, 0, 2, 3).reshape(64, 8, 128).view(raw), bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_bits_round_trip(dtype: torch.dtype) -> None:
    random = torch.randint(-(1 << 31), 1 << 31, (53,), dtype=torch.int64).tolist()
    bits = torch.tensor(HARD_BITS + random, dtype=torch.int64).to(torch.int32).view(32, 2)
    _, lse = unpack(packed(torch.zeros(32, 2, 5, dtype=dtype), bits.view(torch.float32), 2), 5)
    assert torch.equal(lse.view(torch.int32).permute(1, 0, 2).reshape(32, 2), bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_half_comes_first(dtype: torch.dtype) -> None:
    lse = torch.tensor([[0x40A81234]], dtype=torch.int32).view(torch.float32)
    lanes = packed(torch.zeros(1, 1, 3, dtype=dtype), lse, 1).view(torch.int16)[0, 0, 0, 3:]
    assert [lane & 0xFFFF for lane in lanes.tolist()] == [0x1234, 0x40A8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lse_dtype", [torch.float16, torch.bfloat16])
def test_16_bit_lse_is_widened_first(dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    """local-inference-lab#339: two neighbouring heads must not be read as one number."""
    lse_in = torch.tensor([[5.25, 1.0], [-math.inf, 0.0]], dtype=lse_dtype)
    _, lse = unpack(packed(torch.zeros(2, 2, 4, dtype=dtype), lse_in, 1), 4)
    assert torch.equal(lse[0], lse_in.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype) -> None:
    wide = torch.randn(3, 7, 6, 11).to(dtype)
    out, lse = wide[1].transpose(0, 1)[..., 1:10:2], torch.randn(7, 6).t()
    assert not out.is_contiguous() and not lse.is_contiguous()
    plain = packed(out.contiguous(), lse.contiguous(), 7)
    assert torch.equal(packed(out, lse, 7).view(RAW[dtype]), plain.view(RAW[dtype]))


def test_destination_rank_gets_its_heads() -> None:
    out = torch.arange(6.0).view(1, 6, 1).expand(2, 6, 3).contiguous()
    send = packed(out, torch.arange(6.0).expand(2, 6) * 10, 3)
    for rank in range(3):
        assert send[rank, :, :, :3].unique().tolist() == [2.0 * rank, 2.0 * rank + 1]
        assert send[rank, 0, :, 3].tolist() == [20.0 * rank, 20.0 * rank + 10]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_empty_rows(index: torch.dtype) -> None:
    """Requests with 2, 0, 1, 3 rows, local lengths 4, 9, 0, 1; two rows of graph padding."""
    seq_lens, starts = torch.tensor([4, 9, 0, 1], dtype=index), torch.tensor([0, 2, 2, 3, 6], dtype=index)
    assert empty_rows(8, seq_lens, starts).tolist() == [False, False, True, False, False, False, True, True]


def test_empty_rows_without_requests_or_rows() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert empty_rows(3, none, torch.zeros(1, dtype=torch.int32)).tolist() == [True] * 3
    assert empty_rows(0, torch.tensor([3]), torch.tensor([0, 1])).tolist() == []


def test_masked_rows_carry_minus_infinity_and_keep_their_output() -> None:
    lse = torch.tensor([[math.nan], [2.0]])
    out, back = unpack(packed(torch.ones(2, 1, 3), lse, 1, torch.tensor([True, False])), 3)
    assert back.flatten().tolist() == [-math.inf, 2.0] and torch.equal(out, torch.ones(1, 2, 1, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.float8_e4m3fn])
def test_lse_pack_dim_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype={dtype}"):
        lse_pack_dim(dtype)
