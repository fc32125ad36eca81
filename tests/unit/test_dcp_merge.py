"""Properties of the merge, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.dcp import merge
from dbo.dcp.oracle import attention, merge_float64, peer_of_position, shard_attention

QUICK = settings(max_examples=60, deadline=None)
BASES = st.booleans()
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6}


@st.composite
def shards(draw: st.DrawFn, *, max_world: int = 5, shift: float = 8.0) -> tuple[torch.Tensor, torch.Tensor]:
    """`[C, B, N, D]` and `[C, B, N]`, some shards empty."""
    world, rows, heads, dim = (draw(st.integers(1, n)) for n in (max_world, 4, 3, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(sorted(TOLERANCE, key=str)))
    out = torch.randn(world, rows, heads, dim, generator=generator).to(dtype)
    lse = torch.randn(world, rows, heads, generator=generator) * shift
    empty = torch.rand(world, rows, heads, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8]))
    return out, lse.masked_fill(empty, -math.inf)


def assert_same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = got
    limit = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), want[0].double(), rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), want[1].double(), rtol=3e-6, atol=3e-6)


@QUICK
@given(shards(), BASES)
def test_equals_float64(parts: tuple[torch.Tensor, torch.Tensor], base_e: bool) -> None:
    assert_same(merge(*parts, base_e), merge_float64(*parts, base_e))


@QUICK
@given(shards(), BASES, st.randoms(use_true_random=False))
def test_rank_order_does_not_matter(parts: tuple[torch.Tensor, torch.Tensor], base_e: bool, random: object) -> None:
    order = list(range(len(parts[0])))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert_same(merge(parts[0][order], parts[1][order], base_e), merge(*parts, base_e))


@QUICK
@given(shards(), BASES, st.data())
def test_nested_order_does_not_matter(
    parts: tuple[torch.Tensor, torch.Tensor], base_e: bool, data: st.DataObject
) -> None:
    out, lse = parts[0].float(), parts[1]  # an intermediate result is not rounded to 16 bits twice
    cut = data.draw(st.integers(0, len(out)))
    halves = [merge(out[part], lse[part], base_e) for part in (slice(0, cut), slice(cut, None)) if len(out[part])]
    nested = merge(torch.stack([h[0] for h in halves]), torch.stack([h[1] for h in halves]), base_e)
    assert_same(nested, merge(out, lse, base_e))


@QUICK
@given(shards(), BASES, st.sampled_from([math.nan, math.inf, -math.inf, 65504.0]))
def test_what_an_empty_shard_holds_never_leaks(
    parts: tuple[torch.Tensor, torch.Tensor], base_e: bool, garbage: float
) -> None:
    out, lse = parts
    dirty = out.masked_fill((lse == -math.inf).unsqueeze(-1), garbage)
    for got, want in zip(merge(dirty, lse, base_e), merge(out, lse, base_e), strict=True):
        assert torch.equal(got, want)


@QUICK
@given(shards(), BASES)
def test_padding_rows_never_matter(parts: tuple[torch.Tensor, torch.Tensor], base_e: bool) -> None:
    out, lse = parts
    rows = out.shape[1]
    padded_lse = torch.cat([lse, torch.full_like(lse, -math.inf)], dim=1)
    results = [
        merge(torch.cat([out, torch.full_like(out, filling)], dim=1), padded_lse, base_e)
        for filling in (0.0, 60000.0, math.nan)
    ]
    for merged, merged_lse in results:
        assert torch.equal(merged, results[0][0]) and torch.equal(merged_lse, results[0][1])
        assert not merged[rows:].any() and (merged_lse[rows:] == -math.inf).all()
    assert_same((results[0][0][:rows], results[0][1][:rows]), merge(out, lse, base_e))


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("invalid", [math.nan, math.inf])
def test_invalid_lse_counts_as_empty(base_e: bool, invalid: float) -> None:
    out = torch.tensor([[[[3.0]]], [[[math.nan]]]])
    merged, lse = merge(out, torch.tensor([[[1.5]], [[invalid]]]), base_e)
    assert merged.item() == 3.0 and lse.item() == 1.5


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_all_empty_gives_zero_and_minus_infinity(base_e: bool, dtype: torch.dtype) -> None:
    """vllm#39148; merged again with a real shard it gives the real shard."""
    nothing, no_lse = merge(torch.full((2, 1, 1, 3), math.nan, dtype=dtype), torch.full((2, 1, 1), -math.inf), base_e)
    assert nothing.tolist() == [[[0.0] * 3]] and no_lse.item() == -math.inf
    real = torch.tensor([[[1.0, -2.0, 3.0]]], dtype=dtype)
    again, lse = merge(torch.stack([nothing, real]), torch.stack([no_lse, torch.tensor([[0.25]])]), base_e)
    assert torch.equal(again, real) and lse.item() == 0.25


@QUICK
@given(shards(max_world=4, shift=1.0), BASES, st.sampled_from([-3e38, -1e30, -1e4, 1e4, 1e30, 3e38]))
def test_huge_shift_of_all_shards_is_stable(
    parts: tuple[torch.Tensor, torch.Tensor], base_e: bool, shift: float
) -> None:
    out, lse = parts[0], parts[1] + shift
    assert_same(merge(out, lse, base_e), merge_float64(out, lse, base_e))


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("far", [200.0, 1e5, 3e38])
def test_a_shard_far_below_vanishes(base_e: bool, far: float) -> None:
    """Its weight underflows to 0, so not even a NaN in it shows."""
    out = torch.tensor([[[[math.nan]]], [[[2.0]]]])
    merged, lse = merge(out, torch.tensor([[[-far]], [[far]]]), base_e)
    assert merged.item() == 2.0 and lse.item() == pytest.approx(far)


@QUICK
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 9),
    st.sampled_from(sorted(TOLERANCE, key=str)),
    BASES,
    st.integers(0, 2**31),
)
def test_shards_merge_to_attention_over_all_keys(
    world: int, interleave: int, keys: int, dtype: torch.dtype, base_e: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, keys, generator=generator) * 4
    values = torch.randn(keys, 5, generator=generator)
    peers = peer_of_position(torch.arange(keys), world, interleave)
    parts = shard_attention(scores, values, peers, world, dtype, base_e)
    assert_same(merge(parts.out_CBHD, parts.lse_CBH, base_e), attention(scores, values, base_e))
