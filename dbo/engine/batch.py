"""A scheduled batch as integers for the device: the plan of its attention, and the model's inputs. numpy, no torch.

Rows, from top to bottom: the tokens of each scheduled request, request after request, then padding. A padding row has
input id 0 and position 0 and writes its KV to the null slot.

R request rows (padding included), T token rows (padding included), MB blocks a request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dbo.batch.slicing import NULL_BLOCK, NULL_SLOT, BatchPlan, DCPLayout
from dbo.engine.scheduled import ScheduledBatch, ScheduledRequest
from dbo.errors import EngineError


class ModelInputs(NamedTuple):
    """What a step hands to slicing, to the model and to the sampler.

    Attributes:
        plan: the integer form of the attention metadata.
        input_ids: int64 [T].
        logit_rows: int64, the token rows whose logits choose a token; the i-th belongs to `ScheduledBatch.sampled[i]`.
        request_ids: one for each request, in row order (padding request rows have none).
    """

    plan: BatchPlan
    input_ids: np.ndarray
    logit_rows: np.ndarray
    request_ids: tuple[str, ...]


def build_batch(
    batch: ScheduledBatch,
    *,
    num_tokens_padded: int,
    num_reqs_padded: int | None = None,
    block_table_width: int | None = None,
    dcp_layout: DCPLayout | None = None,
) -> ModelInputs:
    """Lay out a scheduled batch. An empty one gives a dummy plan: no requests, all rows padding.

    Args:
        num_tokens_padded: T, as coordination decided; at least the batch's tokens.
        num_reqs_padded: R; None: no padding request rows. A graph needs a fixed number.
        block_table_width: MB; None: as many as the longest request needs (at least 1). A graph needs a fixed number.
        dcp_layout: how keys are spread over the DCP group, and which peer this is; None without DCP.

    Raises:
        EngineError: the batch has more tokens, requests or blocks than the padded sizes.
    """
    requests = batch.requests
    num_reqs = _padded("num_reqs", len(requests), num_reqs_padded)
    num_tokens = batch.num_tokens
    _padded("num_tokens", num_tokens, num_tokens_padded)
    width = _padded("blocks", max((len(r.block_ids) for r in requests), default=1), block_table_width)

    query_lens_R, seq_lens_R, computed_R = np.zeros((3, num_reqs), dtype=np.int32)
    is_prefilling_R = np.zeros(num_reqs, dtype=bool)
    block_table = np.full((num_reqs, width), NULL_BLOCK, dtype=np.int32)
    for i, r in enumerate(requests):
        query_lens_R[i], seq_lens_R[i], computed_R[i] = r.query_len, r.seq_len, r.num_computed_tokens
        is_prefilling_R[i] = r.is_prefilling
        block_table[i, : len(r.block_ids)] = r.block_ids
    query_start_loc = np.concatenate(([0], np.cumsum(query_lens_R))).astype(np.int32)

    input_ids = np.zeros(num_tokens_padded, dtype=np.int64)
    positions = np.zeros(num_tokens_padded, dtype=np.int64)
    slot_mapping = np.full(num_tokens_padded, NULL_SLOT, dtype=np.int64)
    for start, r in zip(query_start_loc.tolist(), requests, strict=False):
        rows = slice(start, start + r.query_len)
        input_ids[rows] = r.token_ids
        positions[rows] = np.arange(r.num_computed_tokens, r.seq_len)
        slot_mapping[rows] = _slots(r, positions[rows], batch.block_tokens, dcp_layout)

    plan = BatchPlan(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens_R,
        num_computed_tokens=computed_R,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        num_tokens_padded=num_tokens_padded,
        max_query_len=int(query_lens_R.max(initial=0)),
        max_seq_len=int(seq_lens_R.max(initial=0)),
        block_table=block_table,
        slot_mapping=slot_mapping,
        positions=positions,
        causal=True,
        is_prefilling=is_prefilling_R,
        dcp_local_seq_lens=None if dcp_layout is None else dcp_layout.local_seq_lens(seq_lens_R),
        dcp_layout=dcp_layout,
    )
    samples = np.array([r.samples for r in requests], dtype=bool)
    logit_rows = query_start_loc[1 : len(requests) + 1][samples].astype(np.int64) - 1
    return ModelInputs(plan, input_ids, logit_rows, tuple(r.request_id for r in requests))


def dummy_batch(
    *, num_reqs: int, query_len: int, block_table_width: int, dcp_layout: DCPLayout | None = None
) -> ModelInputs:
    """A uniform decode batch of made-up requests that touch the null block only: what a graph is captured with."""
    num_tokens = num_reqs * query_len
    ones_R = np.ones(num_reqs, dtype=np.int32)
    plan = BatchPlan(
        query_start_loc=np.arange(num_reqs + 1, dtype=np.int32) * np.int32(query_len),
        seq_lens=ones_R * np.int32(query_len),
        num_computed_tokens=np.zeros(num_reqs, dtype=np.int32),
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        num_tokens_padded=num_tokens,
        max_query_len=query_len,
        max_seq_len=query_len,
        block_table=np.full((num_reqs, block_table_width), NULL_BLOCK, dtype=np.int32),
        slot_mapping=np.full(num_tokens, NULL_SLOT, dtype=np.int64),
        positions=np.tile(np.arange(query_len, dtype=np.int64), num_reqs),
        causal=True,
        is_prefilling=np.zeros(num_reqs, dtype=bool),
        dcp_local_seq_lens=None if dcp_layout is None else dcp_layout.local_seq_lens(ones_R * np.int32(query_len)),
        dcp_layout=dcp_layout,
    )
    no_rows = np.zeros(0, dtype=np.int64)
    return ModelInputs(
        plan, np.zeros(num_tokens, dtype=np.int64), no_rows, tuple(f"dummy-{i}" for i in range(num_reqs))
    )


def _slots(
    request: ScheduledRequest, positions: np.ndarray, block_tokens: int, dcp_layout: DCPLayout | None
) -> np.ndarray:
    """The cache slots of a request's positions on this rank; the null slot for positions that live on a DCP peer."""
    blocks = np.array(request.block_ids, dtype=np.int64)[positions // block_tokens]
    offsets = positions % block_tokens
    if dcp_layout is None:
        return blocks * block_tokens + offsets
    size, interleave = dcp_layout.size, dcp_layout.interleave
    if block_tokens % (size * interleave):
        rule = "the interleave divides the block size of a rank"
        fix = "change cp_kv_cache_interleave_size or block_size"
        raise EngineError.of(rule, fix=fix, interleave=interleave, group_block_tokens=block_tokens, dcp_size=size)
    # A block of the group is one block on each peer; there the peer's keys lie side by side, in order of position.
    local_offsets = offsets // (size * interleave) * interleave + offsets % interleave
    here = positions // interleave % size == dcp_layout.rank
    return np.where(here, blocks * (block_tokens // size) + local_offsets, NULL_SLOT)


def _padded(what: str, real: int, padded: int | None) -> int:
    if padded is None:
        return real
    if padded < real:
        rule = "a padded size is at least the real one"
        raise EngineError.of(
            rule, fix="pad after scheduling, for the largest batch", what=what, real=real, padded=padded
        )
    return padded
