"""Which tokens and requests each ubatch gets, and the integer plan of a batch cut accordingly. Numpy only.

Shape symbols: R request rows (padding rows of a graph included), T token rows (padding included), MB blocks a request.

A cut at token p may fall
inside a request, which then appears in both slices: its first part as if the rest were not scheduled yet, its second
part as if the first part were already computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbo.batch.plan import NULL_BLOCK, NULL_SLOT, BatchPlan, DCPLayout
from dbo.errors import ArgumentError, MetadataError

__all__ = [
    "FIELD_RULES",
    "NULL_BLOCK",
    "NULL_SLOT",
    "BatchPlan",
    "Cut",
    "DCPLayout",
    "UBatchSlice",
    "UBatchSlices",
    "default_split_points",
    "make_cut",
    "maybe_create_ubatch_slices",
    "rule_of",
    "slice_plan",
]


@dataclass(frozen=True)
class UBatchSlice:
    """The requests and the tokens of one ubatch, as slices of the parent batch."""

    request_slice: slice
    token_slice: slice

    @property
    def num_tokens(self) -> int:
        return self.token_slice.stop - self.token_slice.start

    @property
    def num_requests(self) -> int:
        return self.request_slice.stop - self.request_slice.start

    def is_empty(self) -> bool:
        """True when there is nothing to run: no request, or no token."""
        return self.num_tokens == 0 or self.num_requests == 0


UBatchSlices = list[UBatchSlice]


def default_split_points(num_tokens_padded: int, num_ubatches: int) -> tuple[int, ...]:
    """The U - 1 points k * (P // U) that cut P tokens in U ubatches; the last ubatch takes the remainder."""
    return tuple(k * (num_tokens_padded // num_ubatches) for k in range(1, num_ubatches))


def maybe_create_ubatch_slices(
    should_ubatch: bool,
    num_scheduled_tokens: Sequence[int] | np.ndarray,
    num_tokens_padded: int,
    num_reqs_padded: int,
    num_ubatches: int,
    split_point: int | Sequence[int] | None = None,
) -> tuple[UBatchSlices, UBatchSlices] | tuple[None, None]:
    """Cut a batch in `num_ubatches` slices, or say (None, None) when the step is not split.

    Args:
        should_ubatch: the group's decision; it is not questioned here.
        num_scheduled_tokens: tokens of each real request in this step, `[num_reqs]`.
        num_tokens_padded: P, token rows that this rank runs, padding included.
        num_reqs_padded: request rows of a graph, padding included; the number of real requests when eager.
        num_ubatches: U >= 2.
        split_point: the U - 1 points, or one stride p (points k * p), or None: k * (P // U).

    Returns:
        (unpadded, padded): eager attention takes the first, whose slices end with the last real token; graphs and the
        model's inputs take the second, whose last slice reaches to P and to the last padded request. A slice that
        holds padding only is empty in the first list; a decision by `coordinate.decide` never leads there.

    Raises:
        ValueError: U < 2, points that are not 0 < p1 < ... < P, or padded counts below the real ones.
    """
    if not should_ubatch:
        return None, None
    scheduled_R = np.asarray(num_scheduled_tokens, dtype=np.int64)
    points = _points(int(num_tokens_padded), num_ubatches, split_point)
    starts_R1 = np.concatenate(([0], np.cumsum(scheduled_R)))
    num_tokens, num_reqs = int(starts_R1[-1]), len(scheduled_R)
    if num_tokens_padded < num_tokens or num_reqs_padded < num_reqs:
        raise ArgumentError.of(
            "padded counts are at least the real ones",
            fix="pad before you slice",
            num_tokens_padded=num_tokens_padded,
            num_tokens=num_tokens,
            num_reqs_padded=num_reqs_padded,
            num_reqs=num_reqs,
        )
    bounds = (0, *points, int(num_tokens_padded))
    unpadded, padded = [], []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        real = slice(min(start, num_tokens), min(stop, num_tokens))
        requests = _overlapping(starts_R1, real)
        unpadded.append(UBatchSlice(requests, real))
        padded.append(UBatchSlice(requests, slice(start, stop)))
    last = padded[-1]
    padded[-1] = UBatchSlice(slice(last.request_slice.start, num_reqs_padded), last.token_slice)
    return unpadded, padded


def _points(num_tokens_padded: int, num_ubatches: int, split_point: int | Sequence[int] | None) -> tuple[int, ...]:
    """The U - 1 split points, checked."""
    if num_ubatches < 2:
        raise ArgumentError.of(
            "a split step has at least two ubatches", fix="pass should_ubatch=False", num_ubatches=num_ubatches
        )
    if split_point is None:
        points = default_split_points(num_tokens_padded, num_ubatches)
    elif isinstance(split_point, (int, np.integer)):
        points = tuple(k * int(split_point) for k in range(1, num_ubatches))
    else:
        points = tuple(int(p) for p in split_point)
    bounds = (0, *points, num_tokens_padded)
    if len(points) != num_ubatches - 1 or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ArgumentError.of(
            "split points are num_ubatches - 1 increasing token counts strictly between 0 and the padded tokens",
            fix="run the step unsplit or move the points",
            split_points=points,
            num_ubatches=num_ubatches,
            num_tokens_padded=num_tokens_padded,
        )
    return points


def _overlapping(starts_R1: np.ndarray, tokens: slice) -> slice:
    """Requests that have a token in `tokens`; empty, at the place where they would be, when there is none."""
    if tokens.start == tokens.stop:
        here = int(np.searchsorted(starts_R1[:-1], tokens.start, side="left"))
        return slice(here, here)
    first = int(np.searchsorted(starts_R1, tokens.start, side="right")) - 1
    last = int(np.searchsorted(starts_R1, tokens.stop, side="left"))
    return slice(first, last)


FIELD_RULES: dict[str, str] = {
    "query_start_loc": "rebased_offsets",
    "seq_lens": "without_later_tokens",
    "num_computed_tokens": "with_earlier_tokens",
    "num_reqs": "count_requests",
    "num_actual_tokens": "count_real_tokens",
    "num_tokens_padded": "count_rows",
    "max_query_len": "longest_query",
    "max_seq_len": "longest_sequence",
    "block_table": "per_request",
    "slot_mapping": "per_token",
    "positions": "per_token",
    "causal": "shared",
    "is_prefilling": "per_request",
    "dcp_local_seq_lens": "recount_local_keys",
    "dcp_layout": "shared",
}
"""How every field of a `BatchPlan` is cut; the rules are in `_RULES`."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A slice seen from its parent: what is left of each request.

    Attributes:
        requests, tokens: rows of the parent that the slice takes; token rows may end in padding.
        query_start_loc: int64 `[R + 1]`, rebased to 0; R requests of the slice.
        earlier, later: int64 `[R]`, a request's tokens of this step in earlier and in later slices.
        seq_lens: int64 `[R]`, after the slice.
    """

    requests: slice
    tokens: slice
    query_start_loc: np.ndarray
    earlier: np.ndarray
    later: np.ndarray
    seq_lens: np.ndarray


_RULES: dict[str, Callable[[BatchPlan, Cut, Any], Any]] = {
    "rebased_offsets": lambda plan, cut, value: cut.query_start_loc.astype(value.dtype),
    "without_later_tokens": lambda plan, cut, value: cut.seq_lens.astype(value.dtype),
    "with_earlier_tokens": lambda plan, cut, value: (value[cut.requests] + cut.earlier).astype(value.dtype),
    "count_requests": lambda plan, cut, value: cut.requests.stop - cut.requests.start,
    "count_real_tokens": lambda plan, cut, value: int(cut.query_start_loc[-1]),
    "count_rows": lambda plan, cut, value: cut.tokens.stop - cut.tokens.start,
    "longest_query": lambda plan, cut, value: int(np.diff(cut.query_start_loc).max(initial=0)),
    "longest_sequence": lambda plan, cut, value: int(cut.seq_lens.max(initial=0)),
    "per_request": lambda plan, cut, value: value[cut.requests].copy(),
    "per_token": lambda plan, cut, value: value[cut.tokens].copy(),
    "recount_local_keys": lambda plan, cut, value: None if value is None else _local(plan, cut),
    "shared": lambda plan, cut, value: value,
}


def slice_plan(plan: BatchPlan, ubatch_slice: UBatchSlice, *, rules: Mapping[str, str] = FIELD_RULES) -> BatchPlan:
    """The plan of one ubatch, equal to the plan of its tokens built alone; shares no array with the parent.

    Args:
        plan: the whole batch; for a padded slice, padded to the same rows.
        ubatch_slice: from `maybe_create_ubatch_slices`.
        rules: field -> rule name, for a plan with more fields than `BatchPlan`.

    Raises:
        MetadataError: a field of `plan` that has no rule, or DCP key counts without a layout.
        ValueError: a slice that reaches past the parent, or that leaves out a request some of whose tokens it takes.
    """
    cut = make_cut(
        ubatch_slice, plan.query_start_loc, plan.seq_lens, plan.num_actual_tokens, rows=plan.num_tokens_padded
    )
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return type(plan)(**{name: _RULES[rule_of(name, rules)](plan, cut, value) for name, value in fields.items()})


def rule_of(field: str, rules: Mapping[str, str]) -> str:
    """The name of the rule that cuts `field`.

    Raises:
        MetadataError: it has none.
    """
    if field not in rules:
        raise MetadataError.of(
            "every metadata field says how it is cut", fix="add it to FIELD_RULES with a rule", field=field
        )
    return rules[field]


def make_cut(
    ubatch_slice: UBatchSlice, query_start_loc: np.ndarray, seq_lens: np.ndarray, num_actual_tokens: int, *, rows: int
) -> Cut:
    """Intersect the requests of a slice with its tokens.

    Args:
        query_start_loc, seq_lens: the parent's, `[R + 1]` and `[R]`.
        num_actual_tokens, rows: the parent's real tokens, and its token rows.

    Raises:
        ValueError: as `slice_plan`.
    """
    requests, tokens = ubatch_slice.request_slice, ubatch_slice.token_slice
    offsets_R1 = np.asarray(query_start_loc, dtype=np.int64)[requests.start : requests.stop + 1]
    start, stop = min(tokens.start, num_actual_tokens), min(tokens.stop, num_actual_tokens)
    inside_R1 = np.clip(offsets_R1, start, stop) - start
    if tokens.stop > rows or requests.stop >= len(query_start_loc) or inside_R1[0] or inside_R1[-1] != stop - start:
        raise ArgumentError.of(
            "a slice lies inside its parent and takes every request that overlaps its tokens",
            fix="make slices with maybe_create_ubatch_slices, and pad the plan to the rows of padded slices",
            request_slice=requests,
            token_slice=tokens,
            num_reqs=len(query_start_loc) - 1,
            num_token_rows=rows,
        )
    queries_R = np.diff(offsets_R1)
    earlier_R = np.minimum(np.maximum(start - offsets_R1[:-1], 0), queries_R)
    later_R = np.minimum(np.maximum(offsets_R1[1:] - stop, 0), queries_R)
    return Cut(
        requests=requests,
        tokens=tokens,
        query_start_loc=inside_R1,
        earlier=earlier_R,
        later=later_R,
        seq_lens=np.asarray(seq_lens, dtype=np.int64)[requests] - later_R,
    )


def _local(plan: BatchPlan, cut: Cut) -> np.ndarray:
    if plan.dcp_layout is None:
        raise MetadataError.of(
            "local key counts are counted anew for a slice", fix="give the plan its DCP layout", dcp_layout=None
        )
    return plan.dcp_layout.local_seq_lens(cut.seq_lens)
