"""Index arithmetic of ragged attention over a paged cache, once a forward pass. Needs torch.

Requests of a batch have different lengths. To run all of them in one batched product, queries are padded to
`[R requests, Q = longest query]` and contexts to `[R, S = longest context]`. Only the bounds R, Q and S are host
integers; every index is computed on the device, so nothing here waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """Where the rows of one (u)batch come from and go to.

    Attributes:
        slot_mapping: `[T]` cache slot that each row's latent is written to; padding rows name the null block.
        padding_rows: `[T, 1]` bool, rows that carry no request's token.
        query_rows: `[R * Q]` row of each padded query; those beyond a request's length repeat some row.
        row_queries: `[T]` padded query of each row, the inverse; padding rows repeat some query.
        context_slots: `[R * S]` cache slot of each context position.
        context_padding: `[R, S, 1]` bool, positions that the request does not have (yet).
        hidden_keys: `[R, Q, 1, S]` bool, keys that a query must not see.
        empty: no request at all (a host fact): there is nothing to attend to.
        local_seq_lens, query_start_loc: `[R]` keys of each request on this DCP peer and `[R + 1]` first rows; None without
            DCP. With it, contexts are what lies on this peer: S is the most keys that a request can have here.
        last_keys: `[T]` the last of its request's keys here that each row sees, -1: none; None without DCP.
    """

    slot_mapping: torch.Tensor
    padding_rows: torch.Tensor
    query_rows: torch.Tensor
    row_queries: torch.Tensor
    context_slots: torch.Tensor
    context_padding: torch.Tensor
    hidden_keys: torch.Tensor
    empty: bool
    local_seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    last_keys: torch.Tensor | None = None


def plan_paged_batch(metadata: Any, positions: torch.Tensor, *, block_size: int) -> PagedBatch:
    """Derive the indices of a batch of T rows from its `CommonAttentionMetadata` and `positions` `[T]`."""
    num_rows, num_reqs = positions.shape[0], metadata.num_reqs
    num_queries, layout = metadata.max_query_len, metadata.dcp_layout
    num_keys = metadata.max_seq_len if layout is None else layout.max_local_len(metadata.max_seq_len)
    starts = metadata.query_start_loc[: num_reqs + 1].long()
    rows, queries, keys = (torch.arange(n, device=positions.device) for n in (num_rows, num_queries, num_keys))
    # Either bound alone is exact in eager mode; a captured graph sees only the device's.
    padding_rows = ((rows >= starts[-1]) | (rows >= metadata.num_actual_tokens))[:, None]

    query_rows = (starts[:-1, None] + queries).clamp(max=max(num_rows - 1, 0))
    request = (rows[:, None] >= starts[1:]).sum(dim=-1).clamp(max=max(num_reqs - 1, 0))
    offset = (rows - starts.index_select(0, request)).clamp(min=0, max=max(num_queries - 1, 0))

    blocks = metadata.block_table_tensor[:num_reqs].long().index_select(1, keys // block_size)
    # On a DCP peer a block holds its own keys only, side by side in order of position.
    lens, key_positions = metadata.seq_lens, keys
    if layout is not None:
        lens, key_positions = metadata.dcp_local_seq_lens, layout.positions(keys)
    context_padding = keys >= lens[:num_reqs, None]
    query_positions = positions.index_select(0, query_rows.flatten()).view_as(query_rows)
    after_query = key_positions > query_positions[:, :, None]
    return PagedBatch(
        slot_mapping=metadata.slot_mapping.long(),
        padding_rows=padding_rows,
        query_rows=query_rows.flatten(),
        row_queries=request * num_queries + offset,
        context_slots=(blocks * block_size + keys % block_size).flatten(),
        context_padding=context_padding[:, :, None],
        hidden_keys=(after_query | context_padding[:, None, :])[:, :, None, :],
        empty=metadata.num_actual_tokens == 0,
        local_seq_lens=None if layout is None else lens[:num_reqs],
        query_start_loc=None if layout is None else metadata.query_start_loc[: num_reqs + 1],
        last_keys=None if layout is None else layout.count_before(positions + 1) - 1,
    )
