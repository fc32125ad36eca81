"""Slices and plans: what a ubatch gets equals what it would get alone."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo.batch import slicing
from dbo.batch.slicing import (
    FIELD_RULES,
    NULL_SLOT,
    BatchPlan,
    DCPLayout,
    UBatchSlice,
    default_split_points,
    maybe_create_ubatch_slices,
    slice_plan,
)
from dbo.errors import MetadataError
from tests.unit.plan_builder import batches, build, local_keys, part, request


def slices_of(scheduled, padded=None, reqs_padded=None, num_ubatches=2, split_point=None):
    return maybe_create_ubatch_slices(
        True, scheduled, padded or sum(scheduled), reqs_padded or len(scheduled), num_ubatches, split_point
    )


def bounds(slices):
    return [(s.request_slice.start, s.request_slice.stop, s.token_slice.start, s.token_slice.stop) for s in slices]


def cut_points(points, num_tokens):
    return list(zip((0, *points), (*points, num_tokens), strict=True))


# --- slices


def test_a_step_that_is_not_split_has_no_slices():
    assert maybe_create_ubatch_slices(False, np.array([4, 4]), 8, 2, 2) == (None, None)


CASES = [
    ("on a boundary", {"scheduled": [4, 4]}, [(0, 1, 0, 4), (1, 2, 4, 8)]),
    ("straddling: in both", {"scheduled": [3, 5]}, [(0, 2, 0, 4), (1, 2, 4, 8)]),
    ("one request, both", {"scheduled": [8]}, [(0, 1, 0, 4), (0, 1, 4, 8)]),
    ("the remainder is last", {"scheduled": [5, 4]}, [(0, 1, 0, 4), (0, 2, 4, 9)]),
    ("decode", {"scheduled": [1] * 6}, [(0, 3, 0, 3), (3, 6, 3, 6)]),
    ("explicit", {"scheduled": [1] * 6, "split_point": [2]}, [(0, 2, 0, 2), (2, 6, 2, 6)]),
    ("three", {"scheduled": [2, 5, 2], "num_ubatches": 3}, [(0, 2, 0, 3), (1, 2, 3, 6), (1, 3, 6, 9)]),
    ("stride", {"scheduled": [1] * 6, "num_ubatches": 3, "split_point": 1}, [(0, 1, 0, 1), (1, 2, 1, 2), (2, 6, 2, 6)]),
    (
        "a request in four",
        {"scheduled": [1, 6, 1], "num_ubatches": 4},
        [(0, 2, 0, 2), (1, 2, 2, 4), (1, 2, 4, 6), (1, 3, 6, 8)],
    ),
    ("a request without tokens", {"scheduled": [4, 0, 4]}, [(0, 1, 0, 4), (2, 3, 4, 8)]),
]


@pytest.mark.parametrize(("args", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_slice_takes_the_requests_that_overlap_its_tokens(args, expected):
    unpadded, padded = slices_of(**args)
    assert bounds(unpadded) == bounds(padded) == expected


def test_padding_stretches_only_the_last_slice():
    unpadded, padded = slices_of([3, 4], padded=12, reqs_padded=5)
    assert bounds(unpadded) == [(0, 2, 0, 6), (1, 2, 6, 7)]
    assert bounds(padded) == [(0, 2, 0, 6), (1, 5, 6, 12)]
    assert [s.num_tokens for s in padded] == [6, 6] and [s.num_requests for s in padded] == [2, 4]


def test_a_slice_of_nothing_but_padding_is_empty_and_says_so():
    """The faults of empty ubatches go through here; a decision never does."""
    unpadded, padded = slices_of([3], padded=8)
    assert [s.is_empty() for s in unpadded] == [False, True]
    assert [s.num_tokens for s in padded] == [4, 4]
    assert UBatchSlice(slice(0, 0), slice(0, 4)).is_empty() and UBatchSlice(slice(0, 1), slice(4, 4)).is_empty()


def test_default_points_leave_the_remainder_to_the_last():
    assert default_split_points(64, 2) == (32,) and default_split_points(11, 4) == (2, 4, 6)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"scheduled": [4, 4], "num_ubatches": 1}, "num_ubatches=1"),
        ({"scheduled": [4, 4], "split_point": [0]}, r"split_points=\(0,\)"),
        ({"scheduled": [4, 4], "split_point": [8]}, r"split_points=\(8,\)"),
        ({"scheduled": [4, 4], "num_ubatches": 3, "split_point": [5, 5]}, r"split_points=\(5, 5\)"),
        ({"scheduled": [4, 4], "num_ubatches": 3, "split_point": [5]}, r"split_points=\(5,\), num_ubatches=3"),
        ({"scheduled": [1], "num_ubatches": 2}, r"split_points=\(0,\)"),
        ({"scheduled": [4, 4], "padded": 7}, "num_tokens_padded=7, num_tokens=8"),
        ({"scheduled": [4, 4], "reqs_padded": 1}, "num_reqs_padded=1, num_reqs=2"),
    ],
)
def test_points_and_paddings_that_cannot_be_are_refused(args, words):
    with pytest.raises(ValueError, match=words):
        slices_of(**args)


@given(batch=batches())
def test_slices_cover_every_row_once(batch):
    requests, points, padded_tokens, padded_reqs, _ = batch
    scheduled = [r["scheduled"] for r in requests]
    unpadded, padded = slices_of(scheduled, padded_tokens, padded_reqs, len(points) + 1, points)
    owner = [i for i, n in enumerate(scheduled) for _ in range(n)]
    for s, (start, stop) in zip(unpadded, cut_points(points, len(owner)), strict=True):
        assert (s.token_slice.start, s.token_slice.stop) == (start, stop)
        assert list(range(*s.request_slice.indices(len(requests)))) == sorted(set(owner[start:stop]))
    assert [r for s in padded for r in range(s.token_slice.start, s.token_slice.stop)] == list(range(padded_tokens))
    assert padded[:-1] == unpadded[:-1] and padded[-1].request_slice.stop == padded_reqs


# --- plans


@given(batch=batches())
def test_a_cut_plan_equals_the_plan_built_alone(batch):
    requests, points, _, _, dcp = batch
    plan = build(requests, dcp=dcp)
    unpadded, _ = slices_of([r["scheduled"] for r in requests], num_ubatches=len(points) + 1, split_point=points)
    for s, (start, stop) in zip(unpadded, cut_points(points, plan.num_actual_tokens), strict=True):
        assert slice_plan(plan, s).to_dict() == build(part(requests, start, stop), dcp=dcp).to_dict()


@given(batch=batches())
def test_a_padded_cut_equals_the_padded_plan_built_alone(batch):
    requests, points, padded_tokens, padded_reqs, dcp = batch
    plan = build(requests, num_tokens_padded=padded_tokens, num_reqs_padded=padded_reqs, dcp=dcp)
    before = plan.to_dict()
    scheduled = [r["scheduled"] for r in requests]
    unpadded, padded = slices_of(scheduled, padded_tokens, padded_reqs, len(points) + 1, points)
    cuts = [slice_plan(plan, s) for s in padded]
    bare = build(requests, dcp=dcp)
    assert [c.to_dict() for c in cuts[:-1]] == [slice_plan(bare, s).to_dict() for s in unpadded[:-1]]
    alone = part(requests, points[-1], plan.num_actual_tokens)
    extra_reqs = padded_reqs - len(requests)
    assert (
        cuts[-1].to_dict()
        == build(
            alone,
            num_tokens_padded=padded_tokens - points[-1],
            num_reqs_padded=len(alone) + extra_reqs,
            dcp=dcp,
        ).to_dict()
    )
    assert plan.to_dict() == before


@given(batch=batches())
def test_invariants_of_every_cut(batch):
    requests, points, padded_tokens, padded_reqs, dcp = batch
    plan = build(requests, num_tokens_padded=padded_tokens, num_reqs_padded=padded_reqs, dcp=dcp)
    scheduled = [r["scheduled"] for r in requests]
    _, padded = slices_of(scheduled, padded_tokens, padded_reqs, len(points) + 1, points)
    cuts = [slice_plan(plan, s) for s in padded]
    for c in cuts:
        assert (c.seq_lens - np.diff(c.query_start_loc) == c.num_computed_tokens).all()
        assert c.query_start_loc[0] == 0 and c.query_start_loc[-1] == c.num_actual_tokens
        for name, value in vars(c).items():
            if isinstance(value, np.ndarray):
                assert value.dtype == getattr(plan, name).dtype
                assert not np.shares_memory(value, getattr(plan, name))
    for name in ("positions", "slot_mapping"):
        assert np.concatenate([getattr(c, name) for c in cuts]).tolist() == getattr(plan, name).tolist()
    assert sum(c.num_actual_tokens for c in cuts) == plan.num_actual_tokens


def test_a_continuation_knows_what_its_first_part_computed():
    """vllm#56031: computed 24, scheduled 8, cut after 4."""
    plan = build([request(24, 8)])
    first, second = (slice_plan(plan, s) for s in slices_of([8])[0])
    assert (first.seq_lens.tolist(), first.num_computed_tokens.tolist()) == ([28], [24])
    assert (second.seq_lens.tolist(), second.num_computed_tokens.tolist()) == ([32], [28])
    assert plan.num_computed_tokens.tolist() == [24]


def test_each_ubatch_has_lengths_and_blocks_of_its_own():
    """vllm#48659: 3 requests in the first ubatch, 2 in the second; no field keeps the sibling's shape."""
    lens = [5, 9, 2, 7, 1]
    plan = build([request(n - 1, 1, blocks=[10 * i + j for j in range(8)]) for i, n in enumerate(lens, 1)])
    first, second = (slice_plan(plan, s) for s in slices_of([1] * 5, split_point=[3])[0])
    assert (first.seq_lens.tolist(), first.query_start_loc.tolist()) == ([5, 9, 2], [0, 1, 2, 3])
    assert (second.seq_lens.tolist(), second.query_start_loc.tolist()) == ([7, 1], [0, 1, 2])
    assert second.block_table[:, 0].tolist() == [40, 50] and second.max_seq_len == 7


def test_every_ubatch_has_as_many_padding_flags_as_rows():
    """vllm#57502: per-token fields are as long as the ubatch's rows, the last one included."""
    plan = build([request(0, 40)], num_tokens_padded=64)
    cuts = [slice_plan(plan, s) for s in slices_of([40], padded=64)[1]]
    assert [(len(c.positions), len(c.slot_mapping), c.num_tokens_padded) for c in cuts] == [(32, 32, 32)] * 2
    assert [c.num_actual_tokens for c in cuts] == [32, 8]
    assert (cuts[1].slot_mapping[8:] == NULL_SLOT).all() and (cuts[1].positions[8:] == 0).all()


def test_local_key_counts_are_counted_anew():
    """Cut after 3 of 8 tokens: peer 1 of 2 holds positions 1 and, in the second half, 1 3 5 7."""
    dcp = DCPLayout(size=2, rank=1)
    plan = build([request(0, 8)], dcp=dcp)
    cuts = [slice_plan(plan, s) for s in slices_of([8], split_point=[3])[0]]
    assert [c.dcp_local_seq_lens.tolist() for c in cuts] == [[1], [4]]


@given(size=st.integers(1, 8), interleave=st.integers(1, 5), lens=st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_local_keys_add_up_over_the_group(size, interleave, lens):
    layouts = [DCPLayout(size=size, rank=r, interleave=interleave) for r in range(size)]
    counts = [layout.local_seq_lens(np.array(lens, dtype=np.int32)) for layout in layouts]
    assert [c.tolist() for c in counts] == [[local_keys(n, layout) for n in lens] for layout in layouts]
    assert sum(counts).tolist() == lens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LargerPlan(BatchPlan):
    """A plan that somebody extended."""

    lora_id: np.ndarray


def larger(plan):
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return LargerPlan(**fields, lora_id=np.arange(plan.num_reqs))


def test_a_field_without_a_rule_is_an_error():
    plan = larger(build([request(0, 8)]))
    with pytest.raises(MetadataError, match="field=lora_id"):
        slice_plan(plan, slices_of([8])[0][0])


def test_a_field_with_a_rule_is_cut_by_it():
    plan = larger(build([request(0, 4), request(0, 4)]))
    cut = slice_plan(plan, slices_of([4, 4])[0][1], rules=FIELD_RULES | {"lora_id": "per_request"})
    assert isinstance(cut, LargerPlan) and cut.lora_id.tolist() == [1]


def test_every_field_has_a_rule_and_every_rule_a_meaning():
    assert set(FIELD_RULES) == {f.name for f in dataclasses.fields(BatchPlan)}
    assert set(FIELD_RULES.values()) == set(slicing._RULES)


@pytest.mark.parametrize(
    "bad",
    [
        UBatchSlice(slice(1, 2), slice(0, 6)),
        UBatchSlice(slice(0, 1), slice(0, 6)),
        UBatchSlice(slice(0, 3), slice(0, 8)),
        UBatchSlice(slice(0, 2), slice(0, 9)),
    ],
)
def test_a_slice_that_does_not_fit_its_parent_is_refused(bad):
    with pytest.raises(ValueError, match="takes every request that overlaps its tokens"):
        slice_plan(build([request(0, 4), request(0, 4)]), bad)


def test_key_counts_without_a_layout_are_refused():
    plan = dataclasses.replace(build([request(0, 8)], dcp=DCPLayout(size=2, rank=0)), dcp_layout=None)
    with pytest.raises(MetadataError, match="dcp_layout=None"):
        slice_plan(plan, slices_of([8])[0][0])


def test_a_plan_is_json():
    plan = build([request(0, 4)], num_tokens_padded=6, dcp=DCPLayout(size=2, rank=1, interleave=2))
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
    assert plan.to_dict()["dcp_layout"] == {"size": 2, "rank": 1, "interleave": 2}
