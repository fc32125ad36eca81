"""The decision over all ranks: cases line by line, their neighbours, every rule alone, and a slow oracle."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo.batch import coordinate as co
from dbo.batch.coordinate import Common, RankColumn, decide, vote
from dbo.config import DBOConfig
from dbo.errors import StepDrift

DECODE = DBOConfig(enable_dbo=True, dbo_decode_token_threshold=32)


def columns(tokens, *, threshold=32, full=False, q=1, padded=None, step=7, new_kv=()):
    """One column a rank, as a runner would fill it in: 0 tokens is an idle rank."""
    wants = full if isinstance(full, (list, tuple)) else [full] * len(tokens)
    lens = q if isinstance(q, (list, tuple)) else [q] * len(tokens)
    rows = padded or tokens
    config = DBOConfig(enable_dbo=True, dbo_decode_token_threshold=threshold, dbo_prefill_token_threshold=threshold)
    return [
        RankColumn(
            step=step,
            real_tokens=t,
            padded_tokens=p,
            vote=vote(config, num_tokens=t, uniform_decode=n > 0, allowed=r not in new_kv),
            wants_full=w,
            uniform_query_len=n,
            reads_new_kv=r in new_kv,
        )
        if t
        else RankColumn.idle(step)
        for r, (t, p, w, n) in enumerate(zip(tokens, rows, wants, lens, strict=True))
    ]


def table_of(cols):
    return np.stack([c.to_array() for c in cols], axis=1)


def outcome(cols, **common):
    d = decide(table_of(cols), Common(**common))
    return d.split, d.cudagraph_mode, d.num_tokens_padded


S, N = True, False
CASES = [
    # a case, then its neighbours
    ("both at 64", {"tokens": [64, 64]}, {}, (S, "NONE", (64, 64))),
    ("8 votes no", {"tokens": [64, 8]}, {}, (N, "NONE", (64, 8))),
    (
        "8 votes no, FULL pads",
        {"tokens": [64, 8], "full": True},
        {"cudagraph_capture_sizes": (64,)},
        (N, "FULL", (64, 64)),
    ),
    ("33 has a token after 32", {"tokens": [64, 33]}, {}, (S, "NONE", (64, 64))),
    ("32 has none", {"tokens": [64, 32]}, {}, (N, "NONE", (64, 32))),
    ("31 votes no", {"tokens": [64, 31]}, {}, (N, "NONE", (64, 31))),
    (
        "one token joins the graph",
        {"tokens": [100, 1], "full": True},
        {"cudagraph_capture_sizes": (16, 64, 128)},
        (N, "FULL", (128, 128)),
    ),
    (
        "an idle rank joins the graph",
        {"tokens": [100, 0], "full": True},
        {"cudagraph_capture_sizes": (16, 64, 128)},
        (N, "FULL", (128, 128)),
    ),
    (
        "modes differ: no padding",
        {"tokens": [40, 8], "full": [True, False]},
        {"cudagraph_capture_sizes": (64,)},
        (N, "NONE", (40, 8)),
    ),
    (
        "mode first, then P",
        {"tokens": [40, 30], "threshold": 30, "full": [True, False]},
        {"cudagraph_capture_sizes": (64,)},
        (S, "NONE", (40, 40)),
    ),
    (
        "the same under FULL is empty",
        {"tokens": [40, 30], "threshold": 30, "full": True},
        {"cudagraph_capture_sizes": (64,)},
        (N, "FULL", (64, 64)),
    ),
    (
        "FULL, one more than the half",
        {"tokens": [40, 33], "threshold": 30, "full": True},
        {"cudagraph_capture_sizes": (64,)},
        (S, "FULL", (64, 64)),
    ),
    (
        "no size is large enough",
        {"tokens": [65, 40], "full": True},
        {"cudagraph_capture_sizes": (16, 64)},
        (S, "NONE", (65, 65)),
    ),
    (
        "exactly the largest size",
        {"tokens": [64, 40], "full": True},
        {"cudagraph_capture_sizes": (16, 64)},
        (S, "FULL", (64, 64)),
    ),
    (
        "query lengths differ",
        {"tokens": [64, 40], "full": True, "q": [1, 2]},
        {"cudagraph_capture_sizes": (64,)},
        (S, "NONE", (64, 64)),
    ),
    (
        "a mixed batch is never FULL",
        {"tokens": [64, 64], "full": True, "q": 0},
        {"cudagraph_capture_sizes": (64,)},
        (S, "NONE", (64, 64)),
    ),
    ("an idle rank votes no", {"tokens": [64, 0]}, {}, (N, "NONE", (64, 1))),
    ("nobody has work", {"tokens": [0, 0]}, {}, (N, "NONE", (0, 0))),
    ("own padding counts for P", {"tokens": [60, 33], "padded": [64, 40]}, {}, (S, "NONE", (64, 64))),
    ("own padding can empty the end", {"tokens": [60, 33], "padded": [68, 40]}, {}, (N, "NONE", (68, 40))),
    ("three ubatches: 2 * 21 < 43", {"tokens": [64, 43]}, {"num_ubatches": 3}, (S, "NONE", (64, 64))),
    ("three ubatches: 42 is empty", {"tokens": [64, 42]}, {"num_ubatches": 3}, (N, "NONE", (64, 42))),
    ("an explicit point", {"tokens": [64, 33]}, {"split_points": (33,)}, (N, "NONE", (64, 33))),
    ("an explicit point below", {"tokens": [64, 34]}, {"split_points": (33,)}, (S, "NONE", (64, 64))),
    ("a request reads new KV", {"tokens": [64, 64], "new_kv": (1,)}, {}, (N, "NONE", (64, 64))),
    ("eager steps stay unpadded (vllm#26375)", {"tokens": [8000, 200], "threshold": 512}, {}, (N, "NONE", (8000, 200))),
    (
        "half of the graph is empty (vllm#57020)",
        {"tokens": [64, 128], "full": True},
        {"cudagraph_capture_sizes": (128,)},
        (N, "FULL", (128, 128)),
    ),
    (
        "… one more is not",
        {"tokens": [65, 128], "full": True},
        {"cudagraph_capture_sizes": (128,)},
        (S, "FULL", (128, 128)),
    ),
    (
        "one mixed rank, all eager (vllm#25625)",
        {"tokens": [64, 64], "full": [True, False], "q": [1, 0]},
        {"cudagraph_capture_sizes": (64,)},
        (S, "NONE", (64, 64)),
    ),
    (
        "soft threshold is an AND here (ATOM#1627)",
        {"tokens": [9000, 100], "threshold": 8192},
        {},
        (N, "NONE", (9000, 100)),
    ),
]


@pytest.mark.parametrize(("cols", "common", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_case(cols, common, expected):
    assert outcome(columns(**cols), **common) == expected


@pytest.mark.parametrize(("tokens", "wanted"), [(31, False), (32, True), (33, True)])
def test_vote_is_at_or_above_the_decode_threshold(tokens, wanted):
    assert vote(DECODE, num_tokens=tokens, uniform_decode=True) is wanted


@pytest.mark.parametrize(("tokens", "wanted"), [(32, False), (511, False), (512, True)])
def test_a_batch_with_a_prefill_uses_the_prefill_threshold(tokens, wanted):
    assert vote(DECODE, num_tokens=tokens, uniform_decode=False) is wanted


def test_no_vote_without_dbo_or_when_the_batch_must_stay_whole():
    assert not vote(DBOConfig(), num_tokens=64, uniform_decode=True)
    assert not vote(DECODE, num_tokens=64, uniform_decode=True, allowed=False)
    assert not vote(DBOConfig(enable_dbo=True, dbo_decode_token_threshold=0), num_tokens=0, uniform_decode=True)


@pytest.mark.parametrize(
    ("cols", "common", "words"),
    [
        ({"tokens": [64, 8, 8]}, {}, "ranks 1, 2 voted no"),
        ({"tokens": [64, 32]}, {}, "from token 32 on, would be empty on rank 1"),
        ({"tokens": [0, 0]}, {}, "all ranks are idle"),
        ({"tokens": [1, 1], "threshold": 1}, {}, "1 tokens do not make 2 ubatches"),
        (
            {"tokens": [64, 64], "full": True, "q": 2},
            {"cudagraph_capture_sizes": (64,), "split_points": (33,)},
            "cut inside a query of length 2",
        ),
    ],
)
def test_an_unsplit_step_says_why_in_one_sentence(cols, common, words):
    d = decide(table_of(columns(**cols)), Common(**common))
    assert not d.split and words in d.reason and d.split_points == () and d.num_ubatches == 1


def test_new_kv_is_named_even_when_its_rank_voted_yes():
    cols = columns([64, 64])
    cols[1] = RankColumn(**(cols[1].to_dict() | {"reads_new_kv": True}))
    assert "a request of rank 1 reads KV" in decide(table_of(cols), Common()).reason


def test_explicit_points_that_respect_the_query_length_split_a_graph():
    d = decide(table_of(columns([64, 64], full=True, q=2)), Common(cudagraph_capture_sizes=(64,), split_points=(34,)))
    assert (d.split, d.split_points, d.uniform_query_len) == (True, (34,), 2)


def test_all_idle_means_no_forward_anywhere():
    d = decide(table_of(columns([0, 0, 0])), Common())
    assert d.all_idle and d.num_tokens_padded == (0, 0, 0)


def test_drift_names_the_step_of_every_rank():
    cols = [RankColumn.idle(5), RankColumn.idle(6), RankColumn.idle(5)]
    with pytest.raises(StepDrift, match="rank0=5, rank1=6, rank2=5") as caught:
        decide(table_of(cols), Common())
    assert caught.value.steps == [5, 6, 5]


def test_a_rank_that_skipped_one_coordination_is_found_in_the_step_where_it_did():
    """vllm#43547: at its second call rank 1 is one step ahead; the payload shows it long before anything hangs."""
    with pytest.raises(StepDrift):
        decide(table_of([columns([8], step=1)[0], columns([4], step=2)[0]]), Common())


@pytest.mark.parametrize(
    "column",
    [
        {"real_tokens": 4, "padded_tokens": 3},
        {"real_tokens": 0, "padded_tokens": 1, "vote": True},
        {"real_tokens": 0, "padded_tokens": 2},
        {"real_tokens": -1, "padded_tokens": 1},
    ],
)
def test_a_column_that_contradicts_itself_is_refused_with_its_rank(column):
    with pytest.raises(ValueError, match="rank=1"):
        decide(table_of([RankColumn(step=0, real_tokens=4, padded_tokens=4), RankColumn(step=0, **column)]), Common())


def test_a_table_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="one column a rank"):
        decide(np.zeros((6, 2), dtype=np.int32), Common())


def test_columns_round_trip_and_are_int32():
    column = columns([64], full=True, q=3, new_kv=(0,))[0]
    array = column.to_array()
    assert array.dtype == np.int32 and array.shape == (co.NUM_ROWS,) and RankColumn.from_array(array) == column


def test_a_decision_is_json():
    d = decide(table_of(columns([64, 64])), Common())
    assert json.loads(json.dumps(d.to_dict())) == d.to_dict()
    assert d.to_dict()["num_tokens_padded"] == [64, 64]


def test_a_whole_configuration_is_a_common_configuration():
    config = DBOConfig(enable_dbo=True, cudagraph_mode="FULL", max_num_seqs=128)
    assert decide(table_of(columns([100, 90], full=True)), config).num_tokens_padded == (112, 112)


class HostGroup:
    """An all-reduce over threads: what a rank gets when everybody has called."""

    def __init__(self, size):
        self.size, self.tables, self.tags = size, {}, []
        self._met = threading.Barrier(size)

    def member(self, rank):
        group = self

        class Member:
            size = group.size

            def all_reduce(self, table, *, tag):
                group.tables[rank], _ = table.copy(), group.tags.append(tag)
                group._met.wait(timeout=5)
                return sum(group.tables.values())

        member = Member()
        member.rank = rank
        return member


def test_every_rank_reaches_the_same_decision_through_one_all_reduce():
    group, cols = HostGroup(3), columns([64, 50, 40])
    seen = [None] * 3

    def rank_main(rank):
        seen[rank] = decide(co.exchange(group.member(rank), cols[rank]), Common())

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=10)
    assert seen[0] == seen[1] == seen[2] == decide(table_of(cols), Common())
    assert seen[0].split and group.tags == [7, 7, 7]
    assert all(not np.delete(table, rank, axis=1).any() for rank, table in group.tables.items())


def oracle(cols, num_ubatches, split_points, captured):
    """The rules of the decision, one by one, without sharing a line with the code: (split, mode, padded, points)."""
    busy = [c for c in cols if c["real"] > 0]
    if len(busy) == 0:
        return False, "NONE", [0] * len(cols), []
    mode = "FULL"
    for c in busy:
        if not c["full"] or c["q"] == 0 or c["q"] != busy[0]["q"]:
            mode = "NONE"
    p = 0
    for c in busy:
        if c["padded"] > p:
            p = c["padded"]
    if mode == "FULL":
        rounded = None
        for size in sorted(captured, reverse=True):
            if size >= p:
                rounded = size
        if rounded is None:
            mode = "NONE"
        else:
            p = rounded
    points = list(split_points) if split_points else [k * (p // num_ubatches) for k in range(1, num_ubatches)]
    t = min(c["real"] for c in cols)
    split = all(c["vote"] for c in cols) and points[-1] < t and not any(c["new_kv"] for c in cols)
    if mode == "FULL" and split_points:
        split = split and all(point % busy[0]["q"] == 0 for point in points)
    if split or mode == "FULL":
        padded = [p] * len(cols)
    else:
        padded = [c["padded"] if c["real"] else 1 for c in cols]
    return split, mode, padded, points if split else []


def rank_columns(num_ubatches):
    def column(real, extra, yes, full, q, new_kv):
        if real == 0:
            return {"real": 0, "padded": 1, "vote": False, "full": False, "q": 0, "new_kv": False}
        # A threshold is at least the number of ubatches, so nobody votes for fewer tokens.
        return {
            "real": real,
            "padded": real + extra,
            "vote": yes and real >= num_ubatches,
            "full": full,
            "q": q,
            "new_kv": new_kv,
        }

    return st.builds(
        column,
        st.integers(0, 40),
        st.sampled_from([0, 0, 0, 1, 5]),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([1, 1, 1, 2, 0]),
        st.sampled_from([False] * 7 + [True]),
    )


@given(data=st.data())
def test_decide_agrees_with_the_slow_oracle(data):
    num_ubatches = data.draw(st.integers(2, 4), label="U")
    cols = data.draw(st.lists(rank_columns(num_ubatches), min_size=1, max_size=4), label="columns")
    captured = data.draw(st.sampled_from([(), (8, 16, 32), (16, 64)]), label="captured")
    points = data.draw(
        st.none()
        | st.sets(st.integers(1, 30), min_size=num_ubatches - 1, max_size=num_ubatches - 1).map(sorted).map(tuple),
        label="points",
    )
    table = table_of(
        [
            RankColumn(
                step=3,
                real_tokens=c["real"],
                padded_tokens=c["padded"],
                vote=c["vote"],
                wants_full=c["full"],
                uniform_query_len=c["q"],
                reads_new_kv=c["new_kv"],
            )
            for c in cols
        ]
    )
    common = Common(num_ubatches=num_ubatches, split_points=points, cudagraph_capture_sizes=captured)
    d = decide(table, common)
    assert (d.split, d.cudagraph_mode, list(d.num_tokens_padded), list(d.split_points)) == oracle(
        cols, num_ubatches, points, captured
    )
    # Pure: the same table gives the same decision, and the order of ranks only permutes the padding.
    assert decide(table.copy(), common) == d
    mirrored = decide(table[:, ::-1], common)
    assert (mirrored.split, mirrored.num_tokens_padded) == (d.split, d.num_tokens_padded[::-1])
    if d.split:
        bounds = (0, *d.split_points)
        assert all(bounds[-1] < c["real"] for c in cols) and list(bounds) == sorted(set(bounds))
    assert bool(d.reason) is not d.split
