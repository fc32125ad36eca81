"""Batch plans built token by token, slowly and obviously: the reference that cut plans are compared with."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from dbo.batch.slicing import NULL_SLOT, BatchPlan, DCPLayout

MB = 8
BLOCK_SIZE = 8


def request(computed, scheduled, *, blocks=None, prefilling=False, first_block=1):
    """One request as a dict; it owns `MB` blocks from `first_block` on unless they are given."""
    return {
        "computed": computed,
        "scheduled": scheduled,
        "blocks": list(range(first_block, first_block + MB)) if blocks is None else blocks,
        "prefilling": prefilling,
    }


def build(requests, *, num_tokens_padded=None, num_reqs_padded=None, dcp=None, causal=True):
    """The plan of `requests`, alone in their batch, with padding rows appended."""
    offsets, slots, positions = [0], [], []
    for r in requests:
        for position in range(r["computed"], r["computed"] + r["scheduled"]):
            positions.append(position)
            slots.append(slot(r["blocks"], position, dcp))
        offsets.append(offsets[-1] + r["scheduled"])
    num_tokens, num_reqs = len(positions), len(requests)
    more_tokens = (num_tokens_padded or num_tokens) - num_tokens
    more_reqs = (num_reqs_padded or num_reqs) - num_reqs
    seq_lens = [r["computed"] + r["scheduled"] for r in requests] + [0] * more_reqs
    table = [r["blocks"] for r in requests] + [[0] * MB] * more_reqs
    return BatchPlan(
        query_start_loc=np.array(offsets + [num_tokens] * more_reqs, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        num_computed_tokens=np.array([r["computed"] for r in requests] + [0] * more_reqs, dtype=np.int32),
        num_reqs=num_reqs + more_reqs,
        num_actual_tokens=num_tokens,
        num_tokens_padded=num_tokens + more_tokens,
        max_query_len=max((r["scheduled"] for r in requests), default=0),
        max_seq_len=max(seq_lens, default=0),
        block_table=np.array(table, dtype=np.int32).reshape(-1, MB),
        slot_mapping=np.array(slots + [NULL_SLOT] * more_tokens, dtype=np.int64),
        positions=np.array(positions + [0] * more_tokens, dtype=np.int64),
        causal=causal,
        is_prefilling=np.array([r["prefilling"] for r in requests] + [False] * more_reqs, dtype=bool),
        dcp_local_seq_lens=dcp and np.array([local_keys(n, dcp) for n in seq_lens], dtype=np.int32),
        dcp_layout=dcp,
    )


def local_keys(seq_len, dcp):
    """Keys of a sequence that live on this peer, counted one by one."""
    return sum(position // dcp.interleave % dcp.size == dcp.rank for position in range(seq_len))


def slot(blocks, position, dcp):
    """The slot of a position: its index among this peer's keys, through the block table."""
    if dcp is not None and position // dcp.interleave % dcp.size != dcp.rank:
        return NULL_SLOT
    index = position if dcp is None else local_keys(position, dcp)
    return blocks[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE


def part(requests, start, stop):
    """The requests as they look to somebody who runs only their tokens [start, stop)."""
    parts, offset = [], 0
    for r in requests:
        lo, hi = max(start, offset), min(stop, offset + r["scheduled"])
        if lo < hi:
            parts.append(r | {"computed": r["computed"] + lo - offset, "scheduled": hi - lo})
        offset += r["scheduled"]
    return parts


@st.composite
def batches(draw):
    """(requests, split points, padded tokens, padded requests, DCP layout): every U from 2 to 4, any points.

    Every ubatch gets a real token, as coordination guarantees.
    """
    num_ubatches = draw(st.integers(2, 4))
    requests = [
        request(
            draw(st.integers(0, 20)),
            draw(st.integers(1, 12)),
            prefilling=draw(st.booleans()),
            first_block=1 + MB * i,
        )
        for i in range(draw(st.integers(1, 5)))
    ]
    while sum(r["scheduled"] for r in requests) < num_ubatches:
        requests.append(request(0, num_ubatches, first_block=1 + MB * len(requests)))
    num_tokens = sum(r["scheduled"] for r in requests)
    cuts = st.sets(st.integers(1, num_tokens - 1), min_size=num_ubatches - 1, max_size=num_ubatches - 1)
    points = tuple(sorted(draw(cuts)))
    dcp = draw(st.none() | st.builds(_layout, st.integers(1, 4), st.integers(0, 3), st.sampled_from([1, 2, 4])))
    return requests, points, num_tokens + draw(st.integers(0, 5)), len(requests) + draw(st.integers(0, 3)), dcp


def _layout(size, rank, interleave):
    return DCPLayout(size=size, rank=rank % size, interleave=interleave)
