"""From a scheduled batch to integers: every field written down for one small batch, then padding, idle and DCP."""

from __future__ import annotations

import numpy as np
import pytest

from dbo.batch.slicing import DCPLayout
from dbo.engine.batch import build_batch
from dbo.engine.sampling import SamplingParams
from dbo.engine.scheduled import ScheduledBatch, ScheduledRequest, reads_new_kv, uniform_query_len
from dbo.errors import EngineError


def row(
    request_id: str, tokens: tuple[int, ...], computed: int, blocks: tuple[int, ...], *, prefill: bool, samples: bool
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        token_ids=tokens,
        num_computed_tokens=computed,
        block_ids=blocks,
        is_prefilling=prefill,
        samples=samples,
        sampling=SamplingParams(),
        output_index=0,
    )


DECODE = row("d", (41,), 5, (3, 1), prefill=False, samples=True)
LAST_CHUNK = row("p", (11, 12, 13), 2, (2, 5), prefill=True, samples=True)
FIRST_CHUNK = row("q", (21, 22), 0, (4,), prefill=True, samples=False)
MIXED = ScheduledBatch(requests=(DECODE, LAST_CHUNK, FIRST_CHUNK), block_tokens=4)
IDLE = ScheduledBatch(requests=(), block_tokens=4)


def test_every_field_of_a_mixed_batch() -> None:
    plan, input_ids, logit_rows, request_ids = build_batch(MIXED, num_tokens_padded=8)
    assert plan.to_dict() == {
        "query_start_loc": [0, 1, 4, 6],
        "seq_lens": [6, 5, 2],
        "num_computed_tokens": [5, 2, 0],
        "num_reqs": 3,
        "num_actual_tokens": 6,
        "num_tokens_padded": 8,
        "max_query_len": 3,
        "max_seq_len": 6,
        "block_table": [[3, 1], [2, 5], [4, 0]],
        # position 5 of "d" is offset 1 of its second block, 1; positions 2 and 3 of "p" lie in block 2, 4 in block 5.
        "slot_mapping": [1 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 5 * 4, 4 * 4, 4 * 4 + 1, 0, 0],
        "positions": [5, 2, 3, 4, 0, 1, 0, 0],
        "causal": True,
        "is_prefilling": [False, True, True],
        "dcp_local_seq_lens": None,
        "dcp_layout": None,
    }
    assert input_ids.tolist() == [41, 11, 12, 13, 21, 22, 0, 0]
    assert logit_rows.tolist() == [0, 3]
    assert request_ids == ("d", "p", "q")
    assert [r.request_id for r in MIXED.sampled] == ["d", "p"]
    dtypes = {name: value.dtype.name for name, value in vars(plan).items() if isinstance(value, np.ndarray)}
    assert dtypes == {
        "query_start_loc": "int32",
        "seq_lens": "int32",
        "num_computed_tokens": "int32",
        "block_table": "int32",
        "slot_mapping": "int64",
        "positions": "int64",
        "is_prefilling": "bool",
    }
    assert (input_ids.dtype, logit_rows.dtype) == (np.int64, np.int64)


def test_an_idle_rank_gets_a_dummy_of_padding() -> None:
    plan, input_ids, logit_rows, request_ids = build_batch(IDLE, num_tokens_padded=3)
    assert (plan.num_reqs, plan.num_actual_tokens, plan.max_query_len, plan.max_seq_len) == (0, 0, 0, 0)
    assert (plan.query_start_loc.tolist(), plan.block_table.shape) == ([0], (0, 1))
    assert [a.tolist() for a in (input_ids, plan.positions, plan.slot_mapping)] == [[0, 0, 0]] * 3
    assert (logit_rows.tolist(), request_ids) == ([], ())
    assert build_batch(IDLE, num_tokens_padded=0).input_ids.shape == (0,)


def test_request_rows_and_blocks_can_be_padded_for_a_graph() -> None:
    plan, _, logit_rows, request_ids = build_batch(MIXED, num_tokens_padded=8, num_reqs_padded=5, block_table_width=3)
    assert plan.query_start_loc.tolist() == [0, 1, 4, 6, 6, 6]
    assert plan.seq_lens.tolist() == [6, 5, 2, 0, 0]
    assert plan.block_table.tolist() == [[3, 1, 0], [2, 5, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert (plan.num_reqs, logit_rows.tolist(), request_ids) == (5, [0, 3], ("d", "p", "q"))


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"num_tokens_padded": 5}, "what=num_tokens, real=6, padded=5"),
        ({"num_tokens_padded": 6, "num_reqs_padded": 2}, "what=num_reqs, real=3, padded=2"),
        ({"num_tokens_padded": 6, "block_table_width": 1}, "what=blocks, real=2, padded=1"),
    ],
)
def test_padding_below_the_real_size_is_refused(sizes: dict[str, int], what: str) -> None:
    with pytest.raises(EngineError, match=what):
        build_batch(MIXED, **sizes)


def test_each_key_of_a_dcp_group_lives_on_one_peer_and_its_keys_lie_side_by_side() -> None:
    # Two peers with blocks of 4, interleave 2: positions 0 1 | 4 5 on peer 0, 2 3 | 6 7 on peer 1, then block 9.
    whole = row("a", tuple(range(10)), 0, (7, 9), prefill=True, samples=True)
    batch = ScheduledBatch(requests=(whole,), block_tokens=8)
    slots, local_lens = [], []
    for rank in range(2):
        plan = build_batch(batch, num_tokens_padded=10, dcp_layout=DCPLayout(size=2, rank=rank, interleave=2)).plan
        slots.append(plan.slot_mapping.tolist())
        assert plan.dcp_local_seq_lens is not None
        local_lens.append(plan.dcp_local_seq_lens.tolist())
    assert slots[0] == [28, 29, 0, 0, 30, 31, 0, 0, 36, 37]
    assert slots[1] == [0, 0, 28, 29, 0, 0, 30, 31, 0, 0]
    assert local_lens == [[6], [4]]


def test_an_interleave_across_a_block_boundary_is_refused() -> None:
    batch = ScheduledBatch(requests=(row("a", (1,), 0, (1,), prefill=True, samples=True),), block_tokens=8)
    with pytest.raises(EngineError, match="interleave=3"):
        build_batch(batch, num_tokens_padded=1, dcp_layout=DCPLayout(size=2, rank=0, interleave=3))


def test_uniform_query_len_of_longer_decodes() -> None:
    def decodes(*lengths: int) -> ScheduledBatch:
        rows = (row(f"r{i}", (1,) * n, 4, (i + 1, i + 9), prefill=False, samples=True) for i, n in enumerate(lengths))
        return ScheduledBatch(requests=tuple(rows), block_tokens=4)

    assert uniform_query_len(decodes(2, 2)) == 2
    assert uniform_query_len(decodes(2, 1)) == 0


def test_reads_new_kv_needs_a_write_of_this_step_by_another() -> None:
    writer = row("w", (1, 2), 3, (1, 2), prefill=True, samples=False)  # writes blocks 1 and 2
    later = row("x", (1,), 8, (1, 2, 3), prefill=True, samples=True)
    old = row("y", (1,), 4, (5, 6), prefill=True, samples=True)
    shares_old = row("z", (1,), 4, (5, 7), prefill=True, samples=True)  # block 5 was full before
    assert reads_new_kv(ScheduledBatch(requests=(writer, later), block_tokens=4))
    assert reads_new_kv(ScheduledBatch(requests=(later, writer), block_tokens=4))
    assert not reads_new_kv(ScheduledBatch(requests=(writer, old, shares_old), block_tokens=4))
