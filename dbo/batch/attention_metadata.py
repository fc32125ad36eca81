"""Needs torch. What attention is told about a (u)batch, as device tensors, and how a batch's is cut for ubatches.

Shape symbols: R request rows, T token rows, MB blocks a request. "Device" tensors live where the model runs; "host"
ones are CPU tensors, read without waiting for a stream. Cutting reads host tensors only, so it never waits.

`split_attn_metadata` follows the same rules as `dbo.batch.slicing.slice_plan`, computed on the device: what it returns equals
`from_plan(slice_plan(plan, s), ...)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbo.batch.plan import BatchPlan, DCPLayout
from dbo.batch.slicing import Cut, UBatchSlice, make_cut, rule_of
from dbo.errors import MetadataError


@dataclass(frozen=True, kw_only=True, eq=False)
class CommonAttentionMetadata:
    """What every attention layer of a forward pass shares.

    Attributes:
        query_start_loc: int32 `[R + 1]`, device; tokens of request i are rows [loc[i], loc[i + 1]).
        query_start_loc_cpu: the same, host.
        seq_lens: int32 `[R]`, device; keys of a request after this (u)batch.
        seq_lens_cpu: int32 `[R]`, host; an upper bound of `seq_lens`, equal to it unless a step was planned ahead.
        num_computed_tokens: int32 `[R]`, device; keys before this (u)batch: seq_lens - query length.
        num_reqs: R.
        num_actual_tokens: real tokens.
        num_tokens_padded: T; rows from num_actual_tokens on are padding.
        max_query_len, max_seq_len: over the R requests, from the host tensors.
        block_table_tensor: int32 `[R, MB]`, device.
        slot_mapping, positions: int64 `[T]`, device.
        causal: attention is causal.
        is_prefilling: bool `[R]`, host; it chooses kernels, which the host does.
        dcp_local_seq_lens: int32 `[R]`, device; keys on this DCP peer, None without DCP.
        dcp_layout: how keys are spread over the DCP group, None without DCP.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    num_computed_tokens: Tensor
    num_reqs: int
    num_actual_tokens: int
    num_tokens_padded: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    positions: Tensor
    causal: bool
    is_prefilling: Tensor
    dcp_local_seq_lens: Tensor | None = None
    dcp_layout: DCPLayout | None = None

    def copy_device_(self, other: CommonAttentionMetadata) -> None:
        """Overwrite the device tensors with `other`'s: a graph reads new values at the addresses it captured."""
        for name in DEVICE_FIELDS:
            mine = getattr(self, name)
            if mine is not None:
                mine.copy_(getattr(other, name))


DEVICE_FIELDS = (
    "query_start_loc",
    "seq_lens",
    "num_computed_tokens",
    "block_table_tensor",
    "slot_mapping",
    "positions",
    "dcp_local_seq_lens",
)


def from_plan(plan: BatchPlan, to_device: Callable[[np.ndarray], Tensor]) -> CommonAttentionMetadata:
    """Make the tensors of a plan. Host tensors are copies too, so the plan may be reused at once.

    Args:
        to_device: copies an array to the device; the only way in which anything gets there.
    """

    def to_host(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy())

    return CommonAttentionMetadata(
        query_start_loc=to_device(plan.query_start_loc),
        query_start_loc_cpu=to_host(plan.query_start_loc),
        seq_lens=to_device(plan.seq_lens),
        seq_lens_cpu=to_host(plan.seq_lens),
        num_computed_tokens=to_device(plan.num_computed_tokens),
        num_reqs=plan.num_reqs,
        num_actual_tokens=plan.num_actual_tokens,
        num_tokens_padded=plan.num_tokens_padded,
        max_query_len=plan.max_query_len,
        max_seq_len=plan.max_seq_len,
        block_table_tensor=to_device(plan.block_table),
        slot_mapping=to_device(plan.slot_mapping),
        positions=to_device(plan.positions),
        causal=plan.causal,
        is_prefilling=to_host(plan.is_prefilling),
        dcp_local_seq_lens=None if plan.dcp_local_seq_lens is None else to_device(plan.dcp_local_seq_lens),
        dcp_layout=plan.dcp_layout,
    )


FIELD_RULES: dict[str, str] = {
    "query_start_loc": "rebased_offsets",
    "query_start_loc_cpu": "rebased_offsets",
    "seq_lens": "without_later_tokens",
    "seq_lens_cpu": "without_later_tokens_host",
    "num_computed_tokens": "with_earlier_tokens",
    "num_reqs": "count_requests",
    "num_actual_tokens": "count_real_tokens",
    "num_tokens_padded": "count_rows",
    "max_query_len": "longest_query",
    "max_seq_len": "longest_sequence",
    "block_table_tensor": "per_request",
    "slot_mapping": "per_token",
    "positions": "per_token",
    "causal": "shared",
    "is_prefilling": "per_request",
    "dcp_local_seq_lens": "recount_local_keys",
    "dcp_layout": "shared",
}
"""How every field of a `CommonAttentionMetadata` is cut; the rules are in `_RULES`."""


def split_attn_metadata(
    ubatch_slices: Sequence[UBatchSlice],
    common_attn_metadata: CommonAttentionMetadata,
    *,
    rules: Mapping[str, str] = FIELD_RULES,
) -> list[CommonAttentionMetadata]:
    """The metadata of each ubatch, equal to that of its tokens built alone. New tensors, never views of the parent's.

    Device work is queued on the current stream.

    Args:
        ubatch_slices: unpadded ones for eager attention, padded ones for graphs.
        common_attn_metadata: of the whole batch, padded to the rows of the slices.
        rules: field -> rule name, for metadata with more fields.

    Raises:
        MetadataError: a field without a rule, or DCP key counts without a layout.
        ValueError: a slice that does not fit the batch.
    """
    return [_slice(common_attn_metadata, s, rules) for s in ubatch_slices]


def _slice(parent: CommonAttentionMetadata, ubatch_slice: UBatchSlice, rules: Mapping[str, str]) -> Any:
    cut = make_cut(
        ubatch_slice,
        parent.query_start_loc_cpu.numpy(),
        parent.seq_lens_cpu.numpy(),
        parent.num_actual_tokens,
        rows=parent.num_tokens_padded,
    )
    fields = {f.name: getattr(parent, f.name) for f in dataclasses.fields(parent)}
    return type(parent)(**{name: _RULES[rule_of(name, rules)](parent, cut, value) for name, value in fields.items()})


Parent = CommonAttentionMetadata


def _rebased_offsets(parent: Parent, cut: Cut, value: Tensor) -> Tensor:
    start, stop = (min(t, parent.num_actual_tokens) for t in (cut.tokens.start, cut.tokens.stop))
    return value[cut.requests.start : cut.requests.stop + 1].clamp(start, stop) - start


def _later_tokens(parent: Parent, cut: Cut) -> Tensor:
    """A request's tokens of this step in later slices, int32 `[R]`, device."""
    starts, ends = _offsets(parent, cut)
    return (ends - cut.tokens.stop).clamp(min=0).minimum(ends - starts)


def _earlier_tokens(parent: Parent, cut: Cut) -> Tensor:
    """A request's tokens of this step in earlier slices, int32 `[R]`, device."""
    starts, ends = _offsets(parent, cut)
    return (cut.tokens.start - starts).clamp(min=0).minimum(ends - starts)


def _offsets(parent: Parent, cut: Cut) -> tuple[Tensor, Tensor]:
    """Where each request of the slice starts and ends in the parent, device."""
    offsets = parent.query_start_loc[cut.requests.start : cut.requests.stop + 1]
    return offsets[:-1], offsets[1:]


def _recount_local_keys(parent: Parent, cut: Cut, value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    layout = parent.dcp_layout
    if layout is None:
        raise MetadataError.of(
            "local key counts are counted anew for a slice", fix="give the metadata its layout", dcp_layout=None
        )
    return layout.count_before(parent.seq_lens[cut.requests] - _later_tokens(parent, cut))


_RULES: dict[str, Callable[[Parent, Cut, Any], Any]] = {
    "rebased_offsets": _rebased_offsets,
    "without_later_tokens": lambda parent, cut, value: value[cut.requests] - _later_tokens(parent, cut),
    "without_later_tokens_host": lambda parent, cut, value: torch.from_numpy(cut.seq_lens).to(value.dtype),
    "with_earlier_tokens": lambda parent, cut, value: value[cut.requests] + _earlier_tokens(parent, cut),
    "count_requests": lambda parent, cut, value: cut.requests.stop - cut.requests.start,
    "count_real_tokens": lambda parent, cut, value: int(cut.query_start_loc[-1]),
    "count_rows": lambda parent, cut, value: cut.tokens.stop - cut.tokens.start,
    "longest_query": lambda parent, cut, value: int(np.diff(cut.query_start_loc).max(initial=0)),
    "longest_sequence": lambda parent, cut, value: int(cut.seq_lens.max(initial=0)),
    "per_request": lambda parent, cut, value: value[cut.requests].clone(),
    "per_token": lambda parent, cut, value: value[cut.tokens].clone(),
    "recount_local_keys": _recount_local_keys,
    "shared": lambda parent, cut, value: value,
}
