"""Device metadata of ubatches: cutting tensors gives what cutting the plan gives, and nothing is shared."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from tests.unit.plan_builder import batches, build, part, request

torch = pytest.importorskip("torch", reason="device metadata needs torch")

from dbo.batch import attention_metadata as am  # noqa: E402
from dbo.batch.attention_metadata import CommonAttentionMetadata, from_plan, split_attn_metadata  # noqa: E402
from dbo.batch.slicing import DCPLayout, UBatchSlice, maybe_create_ubatch_slices, slice_plan  # noqa: E402
from dbo.errors import MetadataError  # noqa: E402

HOST_FIELDS = ("query_start_loc_cpu", "seq_lens_cpu", "is_prefilling")


def to_device(array):
    return torch.tensor(array)


def tensors(metadata):
    return {n: v for n, v in vars(metadata).items() if isinstance(v, torch.Tensor)}


def comparable(metadata):
    """Every field by name, tensors as (dtype, values)."""
    return {n: (str(v.dtype), v.tolist()) if isinstance(v, torch.Tensor) else v for n, v in vars(metadata).items()}


def slices_of(requests, points, tokens, reqs):
    scheduled = [r["scheduled"] for r in requests]
    return maybe_create_ubatch_slices(True, scheduled, tokens, reqs, len(points) + 1, points)


@given(batch=batches())
def test_cutting_tensors_equals_cutting_the_plan(batch):
    requests, points, tokens, reqs, dcp = batch
    plan = build(requests, num_tokens_padded=tokens, num_reqs_padded=reqs, dcp=dcp)
    parent = from_plan(plan, to_device)
    before = comparable(parent)
    for slices in slices_of(requests, points, tokens, reqs):
        cuts = split_attn_metadata(slices, parent)
        assert [comparable(c) for c in cuts] == [comparable(from_plan(slice_plan(plan, s), to_device)) for s in slices]
    assert comparable(parent) == before


@given(batch=batches())
def test_a_slice_equals_the_metadata_built_alone(batch):
    requests, points, _, _, dcp = batch
    plan = build(requests, dcp=dcp)
    unpadded, _ = slices_of(requests, points, plan.num_actual_tokens, plan.num_reqs)
    ends = (*points, plan.num_actual_tokens)
    for cut, start, stop in zip(
        split_attn_metadata(unpadded, from_plan(plan, to_device)), (0, *points), ends, strict=True
    ):
        assert comparable(cut) == comparable(from_plan(build(part(requests, start, stop), dcp=dcp), to_device))
        queries = cut.query_start_loc[1:] - cut.query_start_loc[:-1]
        assert torch.equal(cut.seq_lens - queries, cut.num_computed_tokens)


@given(batch=batches())
def test_per_token_fields_joined_give_the_parent(batch):
    requests, points, tokens, reqs, dcp = batch
    parent = from_plan(build(requests, num_tokens_padded=tokens, num_reqs_padded=reqs, dcp=dcp), to_device)
    cuts = split_attn_metadata(slices_of(requests, points, tokens, reqs)[1], parent)
    for name in ("positions", "slot_mapping"):
        assert torch.equal(torch.cat([getattr(c, name) for c in cuts]), getattr(parent, name))


def test_a_slice_of_nothing_but_padding_is_cut_like_its_plan():
    """Coordination never makes one; the faults of empty ubatches do."""
    plan = build([request(5, 3)], num_tokens_padded=8, num_reqs_padded=3)
    _, padded = maybe_create_ubatch_slices(True, [3], 8, 3, 2)
    cuts = split_attn_metadata(padded, from_plan(plan, to_device))
    assert [comparable(c) for c in cuts] == [comparable(from_plan(slice_plan(plan, s), to_device)) for s in padded]
    assert (cuts[1].num_actual_tokens, cuts[1].num_reqs, cuts[1].num_computed_tokens.tolist()) == (0, 2, [0, 0])


def test_no_tensor_is_shared_with_the_parent_or_a_sibling():
    parent = from_plan(build([request(0, 4), request(3, 4)], dcp=DCPLayout(size=2, rank=0)), to_device)
    cuts = split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(1, 2), slice(4, 8))], parent)
    storages = [t.untyped_storage().data_ptr() for m in (parent, *cuts) for t in tensors(m).values()]
    assert len(storages) == len(set(storages)) == 3 * len(tensors(parent))


def test_a_cut_over_the_whole_batch_is_still_a_copy():
    parent = from_plan(build([request(0, 8)]), to_device)
    (cut,) = split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 8))], parent)
    cut.positions.zero_()
    cut.block_table_tensor.zero_()
    assert parent.positions.tolist() == list(range(8)) and parent.block_table_tensor.any()


def test_the_plan_may_be_reused_at_once():
    plan = build([request(0, 4)])
    metadata = from_plan(plan, to_device)
    for array in vars(plan).values():
        if isinstance(array, np.ndarray):
            array.fill(0)
    assert metadata.query_start_loc_cpu.tolist() == [0, 4] and metadata.seq_lens_cpu.tolist() == [4]


class OnDevice(torch.Tensor):
    """A tensor whose values the host must not ask for; so is everything computed from it."""

    HOST_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__index__", "__array__")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in cls.HOST_READS:
            raise RuntimeError(f"the host waits for the device in {name}")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_cutting_reads_no_device_tensor_from_the_host():
    parent = from_plan(build([request(24, 8), request(2, 1)], dcp=DCPLayout(size=2, rank=1)), to_device)
    on_device = {n: t.as_subclass(OnDevice) for n, t in tensors(parent).items() if n not in HOST_FIELDS}
    with pytest.raises(RuntimeError, match="the host waits for the device in item"):
        on_device["seq_lens"].max().item()
    cuts = split_attn_metadata(
        [UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(0, 2), slice(4, 9))],
        dataclasses.replace(parent, **on_device),
    )
    assert [c.max_seq_len for c in cuts] == [28, 32] and [c.num_actual_tokens for c in cuts] == [4, 5]
    assert all(isinstance(tensors(cuts[1])[n], OnDevice) is (n not in HOST_FIELDS) for n in tensors(parent))


def test_the_host_bound_may_be_larger_than_the_device_lengths():
    """A step planned ahead: the host allows for tokens that the device then rejected."""
    parent = from_plan(build([request(24, 8)]), to_device)
    parent = dataclasses.replace(parent, seq_lens_cpu=parent.seq_lens_cpu + 2, max_seq_len=34)
    first, second = split_attn_metadata(
        [UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(0, 1), slice(4, 8))], parent
    )
    assert (first.seq_lens.tolist(), first.seq_lens_cpu.tolist(), first.max_seq_len) == ([28], [30], 30)
    assert (second.seq_lens.tolist(), second.seq_lens_cpu.tolist(), second.max_seq_len) == ([32], [34], 34)


def test_every_field_has_a_rule_and_every_rule_a_meaning():
    assert set(am.FIELD_RULES) == {f.name for f in dataclasses.fields(CommonAttentionMetadata)}
    assert set(am.FIELD_RULES.values()) == set(am._RULES)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LargerMetadata(CommonAttentionMetadata):
    """Metadata that somebody extended."""

    encoder_seq_lens: torch.Tensor


def test_a_field_without_a_rule_is_an_error_and_with_one_it_is_cut():
    parent = LargerMetadata(
        **vars(from_plan(build([request(0, 4), request(0, 4)]), to_device)), encoder_seq_lens=torch.tensor([5, 6])
    )
    second = UBatchSlice(slice(1, 2), slice(4, 8))
    with pytest.raises(MetadataError, match="field=encoder_seq_lens"):
        split_attn_metadata([second], parent)
    rules = am.FIELD_RULES | {"encoder_seq_lens": "per_request"}
    assert split_attn_metadata([second], parent, rules=rules)[0].encoder_seq_lens.tolist() == [6]


def test_key_counts_without_a_layout_are_refused():
    parent = from_plan(build([request(0, 8)], dcp=DCPLayout(size=2, rank=0)), to_device)
    with pytest.raises(MetadataError, match="dcp_layout=None"):
        split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 8))], dataclasses.replace(parent, dcp_layout=None))
