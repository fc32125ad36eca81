"""Needs torch and Triton. The kernel of `a2a_direct`: push into the peers' memory, wait for their flags, merge.

Protocol, proof and layout: `dbo.dcp.direct`. The kernel takes addresses (`peers`, int64 `[C]`, in the caller's address
space), so it does not care whether they come from virtual ranks on one device, from CUDA IPC or from symmetric memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu.kernels.rows import clean, logarithm, masked_lse_bits, power


@triton.jit
def _region(peers, rank, offset, like):
    """Pointer, of the type of `like`, to byte `offset` (a multiple of 16) of a rank's region."""
    address = tl.load(peers + rank) + offset
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit
def _push_rows(raw, source, stride_dim, bits, target, target_lse, flat, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows of the partial output, and their LSE bits, at rows `flat` of a peer's slabs."""
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        inside = live[:, None] & (dim < D)[None, :]
        values = tl.load(raw + source[:, None] + dim[None, :] * stride_dim, mask=inside)
        tl.store(target + flat[:, None] * D + dim[None, :], values, mask=inside)
    tl.store(target_lse + flat, bits.to(tl.float32, bitcast=True), mask=live)


@triton.jit
def _wait(flag, epoch, spin_limit):
    """Poll until `flag` reaches `epoch`; the last value seen, which is smaller only when `spin_limit` ran out."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    polls = 0
    while (seen < epoch) & (polls < spin_limit):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls += 1
    return seen


@triton.jit
def _part_lse(slab_lse, flat, live):
    # .cg here and below: a line of two epochs ago may still lie in L1.
    return clean(tl.load(slab_lse + flat, mask=live, other=float("-inf"), cache_modifier=".cg"))


@triton.jit
def _weighted(bits, weight, like):
    """Partial output times weight in fp32; selected away, not multiplied by 0, where the weight is 0."""
    part = bits.to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    return tl.where(weight[:, None] > 0, part * weight[:, None], 0.0)


@triton.jit(do_not_specialize=["rank", "num_rows", "num_requests", "spin_limit", "lag_tiles"])
def direct_kernel(
    raw,
    lse,
    merged,
    merged_lse,
    seq_lens,
    query_start_loc,
    peers,
    state,
    rank,
    num_rows,
    num_requests,
    stride_row,
    stride_head,
    stride_dim,
    stride_lse_row,
    stride_lse_head,
    spin_limit,
    lag_tiles,
    WORLD: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    MAX_TILES: tl.constexpr,
    LSE_OFFSET: tl.constexpr,
    LSE_SLAB: tl.constexpr,
    DATA_OFFSET: tl.constexpr,
    DATA_SLAB: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BASE_E: tl.constexpr,
    PUSH: tl.constexpr,
    MERGE: tl.constexpr,
    TILE_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One exchange of one rank. `raw` is the partial output `[B, H, D]` seen as integers, `merged` `[B, N, D]`
    floating.

    `PUSH` and `MERGE` switch the halves, so that an interpreter, which runs one program at a time, can push for all
    ranks before it merges for any. Only the merging half advances the epoch.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(state) + 1
    parity = epoch % 2
    num_flat = num_rows.to(tl.int64) * N
    tiles = tl.maximum((num_flat + TILE_R - 1) // TILE_R, 1)
    mine = (tiles - program + programs - 1) // programs
    step = 0
    while step < mine + lag_tiles:
        if PUSH:
            if step < mine:
                tile = program + step * programs
                flat = tile * TILE_R + tl.arange(0, TILE_R).to(tl.int64)
                live = flat < num_flat
                row = flat // N
                slab = parity * WORLD + rank
                for hop in tl.static_range(1, WORLD):  # each rank begins with another peer: no link is asked twice
                    peer = (rank + hop) % WORLD
                    head = flat % N + peer * N
                    bits = masked_lse_bits(
                        lse,
                        row,
                        head,
                        live,
                        stride_lse_row,
                        stride_lse_head,
                        seq_lens,
                        query_start_loc,
                        num_requests,
                        HAS_MASK,
                    )
                    target = _region(peers, peer, DATA_OFFSET + slab * DATA_SLAB, raw)
                    target_lse = _region(peers, peer, LSE_OFFSET + slab * LSE_SLAB, merged_lse)
                    source = row * stride_row + head * stride_head
                    _push_rows(raw, source, stride_dim, bits, target, target_lse, flat, live, D, BLOCK_D)
                tl.debug_barrier()  # every thread has stored; the one that releases covers them all
                for hop in tl.static_range(1, WORLD):
                    flags = _region(peers, (rank + hop) % WORLD, 0, state)
                    tl.atomic_xchg(flags + rank * MAX_TILES + tile, epoch, sem="release", scope="sys")
        if MERGE:
            if step >= lag_tiles:
                tile = program + (step - lag_tiles) * programs
                flags = _region(peers, rank, 0, state)
                for hop in tl.static_range(1, WORLD):
                    index = ((rank + hop) % WORLD) * MAX_TILES + tile
                    seen = _wait(flags + index, epoch, spin_limit)
                    if seen < epoch:
                        tl.store(state + 2, index + 1)
                tl.debug_barrier()  # no thread reads a slab before the thread that polled has acquired it
                flat = tile * TILE_R + tl.arange(0, TILE_R).to(tl.int64)
                live = flat < num_flat
                row = flat // N
                head = flat % N + rank * N
                bits = masked_lse_bits(
                    lse,
                    row,
                    head,
                    live,
                    stride_lse_row,
                    stride_lse_head,
                    seq_lens,
                    query_start_loc,
                    num_requests,
                    HAS_MASK,
                )
                own_lse = clean(bits.to(tl.float32, bitcast=True))
                peak = own_lse
                for hop in tl.static_range(1, WORLD):
                    slab = parity * WORLD + (rank + hop) % WORLD
                    slab_lse = _region(peers, rank, LSE_OFFSET + slab * LSE_SLAB, merged_lse)
                    peak = tl.maximum(peak, _part_lse(slab_lse, flat, live))
                shift = tl.where(peak == float("-inf"), 0.0, peak)
                own_weight = power(own_lse - shift, BASE_E)
                total = own_weight
                for hop in tl.static_range(1, WORLD):
                    slab = parity * WORLD + (rank + hop) % WORLD
                    slab_lse = _region(peers, rank, LSE_OFFSET + slab * LSE_SLAB, merged_lse)
                    total += power(_part_lse(slab_lse, flat, live) - shift, BASE_E)
                whole = tl.where(total > 0, shift + logarithm(total, BASE_E), float("-inf"))
                tl.store(merged_lse + flat, whole, mask=live)
                source = row * stride_row + head * stride_head
                for start in range(0, D, BLOCK_D):
                    dim = start + tl.arange(0, BLOCK_D)
                    inside = live[:, None] & (dim < D)[None, :]
                    own = tl.load(raw + source[:, None] + dim[None, :] * stride_dim, mask=inside, other=0)
                    acc = _weighted(own, own_weight, merged)
                    for hop in tl.static_range(1, WORLD):
                        slab = parity * WORLD + (rank + hop) % WORLD
                        slab_lse = _region(peers, rank, LSE_OFFSET + slab * LSE_SLAB, merged_lse)
                        weight = power(_part_lse(slab_lse, flat, live) - shift, BASE_E)
                        data = _region(peers, rank, DATA_OFFSET + slab * DATA_SLAB, raw)
                        place = data + flat[:, None] * D + dim[None, :]
                        acc += _weighted(tl.load(place, mask=inside, other=0, cache_modifier=".cg"), weight, merged)
                    acc = tl.where(total[:, None] > 0, acc / total[:, None], 0.0)
                    tl.store(merged + flat[:, None] * D + dim[None, :], acc.to(merged.dtype.element_ty), mask=inside)
        step += 1
    if MERGE:
        tl.debug_barrier()
        finished = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
        if finished == programs - 1:  # all programs have read the old epoch; the next kernel starts after this one
            tl.store(state + 1, 0)
            tl.store(state, epoch)
