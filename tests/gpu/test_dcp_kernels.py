"""The Triton kernels against plain torch: on a device where there is one, else under Triton's interpreter on the
CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when a kernel is defined, Triton's own included: before the first import
    )
triton = pytest.importorskip("triton", reason="triton is not installed (extra `kernels`)")

from dbo.dcp import empty_rows, lse_pack_dim, merge  # noqa: E402
from dbo.dcp.direct import DirectLayout, num_tiles, tile_rows  # noqa: E402
from dbo.dcp.exchange import TORCH_KERNELS  # noqa: E402
from dbo.dcp.local import LocalDCPGroup, run_ranks  # noqa: E402
from dbo.errors import PeerFailed, UsageError  # noqa: E402
from gpu.kernels.exchange import DirectExchange, ExchangeTuning, dcp_direct_lse_reduce, new_region  # noqa: E402
from gpu.kernels.packed import TritonKernels  # noqa: E402
from gpu.kernels.rows import RAW, block_dim  # noqa: E402

INTERPRETED = not isinstance(triton.language.max, triton.runtime.JITFunction)
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED,
    reason="triton was imported before this file could ask for its interpreter: test_kernels_apart runs this file",
)

# Small blocks, so that small shapes have several programs, and a last one that is not full.
KERNELS = TritonKernels(pack_bytes=2048, merge_elements=1024)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = ((2, 5, 3, 80), (4, 3, 1, 96), (2, 7, 1, 192), (3, 2, 2, 576), (2, 1, 1, 7), (1, 3, 2, 16))  # C, B, N, D
HARD_BITS = [-0x800000, 0x7F800000, 0x7FC12345, -0x3EDCBA, 0, 1, 0x461C4000, 0x40A84000]
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """Under the interpreter a kernel is numpy, which warns of the 0 / 0 and log 0 that a `where` then discards."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        yield


def inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, strided: str = "no", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    world, rows, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(world * heads, rows, 2 * dim + 4, generator=generator).to(dtype).to(DEVICE)
    lse = (torch.randn(world * heads, rows, generator=generator) * 3).to(DEVICE)
    if strided == "columns":
        return wide[..., 1 : 2 * dim + 1 : 2].transpose(0, 1), lse.t()
    out = wide[..., 2 : dim + 2].transpose(0, 1)
    return (out, lse.t()) if strided == "rows" else (out.contiguous(), lse.t().contiguous())


def masks(rows: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four requests: one row, no row, one row, the rest but one; the last row is padding."""
    last = max(0, rows - 1)
    starts = [0, min(1, last), min(1, last), min(2, last), last]
    lens = [5 * (rank % 2), 9, 0 if rank == 0 else 3, 1]
    return torch.tensor(lens, dtype=torch.int32, device=DEVICE), torch.tensor(starts, dtype=torch.int32, device=DEVICE)


def close(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    limit = LIMITS[got[0].dtype]
    torch.testing.assert_close(got[0], want[0], rtol=limit, atol=limit)
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", ["no", "rows", "columns"])
@pytest.mark.parametrize("masked", [False, True])
def test_pack_equals_plain_torch(
    shape: tuple[int, int, int, int], dtype: torch.dtype, strided: str, masked: bool
) -> None:
    world, rows, heads, dim = shape
    out, lse = inputs(shape, dtype, strided=strided)
    lens, starts = masks(rows) if masked else (None, None)
    got, want = (
        torch.full((world, rows, heads, dim + lse_pack_dim(dtype)), fill, dtype=dtype, device=DEVICE) for fill in (1, 2)
    )
    KERNELS.pack(out, lse, got, lens, starts)
    TORCH_KERNELS.pack(out, lse, want, lens, starts)
    assert torch.equal(got.view(RAW[dtype]), want.view(RAW[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lse_dtype", DTYPES)
def test_pack_keeps_hard_lse_bits(dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    bits = torch.tensor(HARD_BITS, dtype=torch.int32, device=DEVICE).view(torch.float32)
    lse = bits.to(lse_dtype).view(4, 2)
    out = torch.ones(4, 2, 6, dtype=dtype, device=DEVICE)
    got, want = (torch.empty(2, 4, 1, 6 + lse_pack_dim(dtype), dtype=dtype, device=DEVICE) for _ in range(2))
    KERNELS.pack(out, lse, got, None, None)
    TORCH_KERNELS.pack(out, lse, want, None, None)
    assert torch.equal(got.view(RAW[dtype]), want.view(RAW[dtype]))


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 7, 8, 11])
def test_pack_searches_the_owner_of_a_row(requests: int) -> None:
    """Requests of no to four rows, so that the guess "row b is request b" is wrong for nearly all of them."""
    generator = torch.Generator().manual_seed(requests)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    starts[1:] = torch.randint(0, 5, (requests,), generator=generator).cumsum(0)
    lens = torch.randint(0, 2, (requests,), generator=generator).to(torch.int32).to(DEVICE)
    rows, starts = int(starts[-1]) + 2, starts.to(DEVICE)
    send = torch.empty(1, rows, 1, 5, device=DEVICE)
    KERNELS.pack(torch.ones(rows, 1, 4, device=DEVICE), torch.ones(rows, 1, device=DEVICE), send, lens, starts)
    assert torch.equal(send[0, :, 0, 4] == -math.inf, empty_rows(rows, lens, starts))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base_e", [True, False])
def test_unpack_merge_equals_plain_torch(shape: tuple[int, int, int, int], dtype: torch.dtype, base_e: bool) -> None:
    world, rows, heads, dim = shape
    out, lse = inputs(shape, dtype)
    lse[0] = -math.inf  # all shards empty
    lse[-1, :heads] = math.nan
    lse[-1, -1] = math.inf
    out[lse == -math.inf] = math.nan
    recv = torch.empty(world, rows, heads, dim + lse_pack_dim(dtype), dtype=dtype, device=DEVICE)
    TORCH_KERNELS.pack(out, lse, recv, None, None)
    close(KERNELS.unpack_merge(recv, dim, base_e), TORCH_KERNELS.unpack_merge(recv, dim, base_e))


def test_huge_shifts_are_stable() -> None:
    for shift in (-3e38, -1e30, 1e30, 3e38):
        recv = torch.empty(2, 1, 1, 4, device=DEVICE)
        lse = torch.tensor([[shift, shift]], device=DEVICE)
        TORCH_KERNELS.pack(torch.ones(1, 2, 3, device=DEVICE), lse, recv, None, None)
        merged, _ = KERNELS.unpack_merge(recv, 3, True)
        assert torch.equal(merged, torch.ones(1, 1, 3, device=DEVICE))


def test_no_rows_is_no_launch() -> None:
    recv = torch.empty(2, 0, 3, 18, dtype=torch.bfloat16, device=DEVICE)
    KERNELS.pack(torch.empty(0, 6, 16, dtype=torch.bfloat16, device=DEVICE), torch.empty(0, 6), recv, None, None)
    merged, lse = KERNELS.unpack_merge(recv, 16, True)
    assert merged.shape == (0, 3, 16) and lse.shape == (0, 3)


@pytest.mark.parametrize("dim", [1, 16, 80, 96, 192, 320, 512, 576])
def test_blocks_waste_little(dim: int) -> None:
    block = block_dim(dim)
    assert block & (block - 1) == 0
    assert dim <= 128 or -(-dim // block) * block * 3 <= dim * 4


# ---- the direct path
# ----------------------------------------------------------------------------------------------------


def exchanges(world: int, *, spin_limit: int = 4, max_rows: int = 64, programs: int = 3) -> list[DirectExchange]:
    """C virtual ranks that see each other's regions."""
    layout = DirectLayout(world_size=world, max_rows=max_rows, row_bytes=576 * 4)
    regions = [new_region(layout, DEVICE) for _ in range(world)]
    return [
        DirectExchange(
            layout=layout,
            rank=rank,
            region=regions[rank],
            peer_addresses=[region.data_ptr() for region in regions],
            tuning=ExchangeTuning(programs=programs, spin_limit=spin_limit),
        )
        for rank in range(world)
    ]


def reference(
    outs: list[torch.Tensor], lses: list[torch.Tensor], rank: int, heads: int, base_e: bool, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    lses = [lse.clone() for lse in lses]
    if masked:
        for source, lse in enumerate(lses):
            lse[empty_rows(lse.shape[0], *masks(lse.shape[0], source))] = -math.inf
    mine = slice(rank * heads, (rank + 1) * heads)
    return merge(torch.stack(outs)[:, :, mine], torch.stack(lses)[:, :, mine], base_e)


def push_then_merge(
    ends: list[DirectExchange], outs: list[torch.Tensor], lses: list[torch.Tensor], *, base_e: bool, masked: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The two halves one after the other for all ranks: what an interpreter can run."""
    results = []
    for half in ("push", "merge"):
        for rank, end in enumerate(ends):
            lens, starts = masks(outs[rank].shape[0], rank) if masked else (None, None)
            result = end.launch(
                outs[rank],
                lses[rank],
                is_lse_base_on_e=base_e,
                seq_lens=lens,
                query_start_loc=starts,
                push=half == "push",
                merge=half == "merge",
            )
            if half == "merge":
                results.append(result)
    return results


@pytest.mark.parametrize("shape", [(2, 5, 3, 80), (4, 3, 1, 96), (2, 3, 1, 192), (2, 1, 1, 576), (2, 0, 2, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_direct_equals_plain_torch(shape: tuple[int, int, int, int], dtype: torch.dtype, masked: bool) -> None:
    world, rows, heads, _ = shape
    ends = exchanges(world)
    for epoch in range(3):  # both parities, and the first of them again
        base_e = epoch != 1
        outs, lses = zip(
            *(
                inputs(shape, dtype, strided=("no", "rows", "columns")[epoch], seed=10 * epoch + r)
                for r in range(world)
            ),
            strict=True,
        )
        if masked:
            for rank, out in enumerate(outs):
                out[empty_rows(rows, *masks(rows, rank))] = math.nan
        results = push_then_merge(ends, list(outs), list(lses), base_e=base_e, masked=masked)
        for rank, result in enumerate(results):
            close(result, reference(list(outs), list(lses), rank, heads, base_e, masked))
            ends[rank].check()
            assert ends[rank].epoch() == epoch + 1


def test_direct_shapes_may_change_from_call_to_call() -> None:
    """Flags of tiles that a smaller call did not have are older than the epoch; those of a larger one may be newer."""
    ends = exchanges(2)
    for seed, rows in enumerate((9, 1, 0, 5, 9, 2)):
        shape = (2, rows, 3, 24)
        outs, lses = zip(*(inputs(shape, torch.bfloat16, seed=10 * seed + r) for r in range(2)), strict=True)
        for rank, result in enumerate(push_then_merge(ends, list(outs), list(lses), base_e=True, masked=False)):
            close(result, reference(list(outs), list(lses), rank, 3, True, False))
            ends[rank].check()


def test_direct_finds_a_missing_signal() -> None:
    ends = exchanges(3)
    out, lse = inputs((3, 4, 1, 16), torch.float32)
    for sender in (0, 1):
        ends[sender].launch(out, lse, merge=False)
    ends[0].launch(out, lse, push=False)
    with pytest.raises(PeerFailed, match="rank 2 failed .* rank 0 waited in vain for its signal of tile 0"):
        ends[0].check()


def test_direct_an_empty_batch_signals_too() -> None:
    """Without a flag for B = 0 nothing would keep a rank from running two epochs ahead, into a parity still read."""
    ends = exchanges(2)
    out, lse = inputs((2, 0, 1, 16), torch.float32)
    ends[0].launch(out, lse, merge=False)
    ends[0].launch(out, lse, push=False)
    with pytest.raises(PeerFailed, match="rank 1 failed"):
        ends[0].check()
    ends[1].launch(out, lse, push=False)
    ends[1].check()


def test_direct_finds_a_stale_signal() -> None:
    """Rank 1 does not push the second epoch; its flags of the first one must not pass for it."""
    ends = exchanges(2)
    out, lse = inputs((2, 4, 1, 16), torch.float32)
    push_then_merge(ends, [out, out], [lse, lse], base_e=True, masked=False)
    ends[0].check()
    ends[0].launch(out, lse, merge=False)
    ends[0].launch(out, lse, push=False)
    with pytest.raises(PeerFailed) as failed:
        ends[0].check()
    assert failed.value.rank == 1


def test_direct_parities_keep_two_epochs_apart() -> None:
    """Rank 0 may push epoch 2 before rank 1 has merged epoch 1; a single buffer would lose epoch 1."""
    ends = exchanges(2)
    shape = (2, 3, 2, 16)
    first = [inputs(shape, torch.float32, seed=r) for r in range(2)]
    second = [inputs(shape, torch.float32, seed=10 + r) for r in range(2)]
    for rank in range(2):
        ends[rank].launch(*first[rank], merge=False)
    ends[0].launch(*first[0], push=False)
    ends[0].launch(*second[0], merge=False)
    late = ends[1].launch(*first[1], push=False)
    close(late, reference([o for o, _ in first], [s for _, s in first], 1, 2, True, False))
    ends[1].launch(*second[1], merge=False)
    for rank in range(2):
        got = ends[rank].launch(*second[rank], push=False)
        close(got, reference([o for o, _ in second], [s for _, s in second], rank, 2, True, False))


def test_direct_falls_back_to_a2a_beyond_its_capacity() -> None:
    shape = (2, 40, 2, 8)
    outs, lses = zip(*(inputs(shape, torch.float32, seed=r) for r in range(2)), strict=True)
    ends = exchanges(2, max_rows=16)

    def program(group: LocalDCPGroup) -> tuple[torch.Tensor, torch.Tensor]:
        rank = group.rank
        # Threads, so plain torch packs and merges: Triton's interpreter is not made for two at a time.
        direct = partial(dcp_direct_lse_reduce, exchange=ends[rank], kernels=TORCH_KERNELS)
        result = direct(outs[rank], lses[rank], group, True)
        assert group.calls == ["all_to_all_single"] and ends[rank].fallbacks == 1 and ends[rank].epoch() == 0
        return result

    for rank, result in enumerate(run_ranks(2, program)):
        close(result, reference(list(outs), list(lses), rank, 2, True, False))


def test_direct_refuses_addresses_that_cannot_be_right() -> None:
    layout = DirectLayout(world_size=2, max_rows=4, row_bytes=64)
    region = new_region(layout, DEVICE)
    address = region.data_ptr()
    for addresses, message in (([address], "addresses=1"), ([1, 2], "rank=0"), ([address, address + 8], "256 bytes")):
        with pytest.raises(UsageError, match=message):
            DirectExchange(
                layout=layout, rank=0, region=region, peer_addresses=addresses, tuning=ExchangeTuning(programs=1)
            )


def test_layout_regions_do_not_overlap_and_hold_every_tile() -> None:
    for max_rows in (0, 1, 17, 4095, 4096, 8191, 8192, 300000):
        layout = DirectLayout(world_size=4, max_rows=max_rows, row_bytes=1152)
        assert 4 * layout.max_tiles * 8 <= layout.lse_offset
        assert layout.lse_offset + 2 * 4 * max_rows * 4 <= layout.data_offset
        assert layout.data_offset + 2 * 4 * max_rows * 1152 <= layout.total_bytes
        for rows in {0, min(1, max_rows), max_rows // 2, max(0, max_rows - 1), max_rows}:
            assert 1 <= num_tiles(rows) <= layout.max_tiles and num_tiles(rows) * tile_rows(rows) >= rows
            assert layout.fits(rows, 1152)
        assert not layout.fits(max_rows + 1, 1)


def test_a_part_of_no_weight_is_selected_away_whenever_it_comes() -> None:
    """A finite LSE so far below another that its weight is 0: its NaN must not leak, whichever source is read first."""
    for order in ((0, 1), (1, 0)):
        recv = torch.empty(2, 1, 1, 4, device=DEVICE)
        out = torch.stack([torch.full((1, 1, 3), math.nan), torch.ones(1, 1, 3)])[list(order)].to(DEVICE)
        lse = torch.tensor([-300.0, 5.0], device=DEVICE)[list(order)].view(2, 1, 1)
        for source in range(2):
            TORCH_KERNELS.pack(out[source], lse[source], recv[source : source + 1], None, None)
        merged, whole = KERNELS.unpack_merge(recv, 3, True)
        assert torch.equal(merged, torch.ones(1, 1, 3, device=DEVICE)) and whole.item() == 5.0
