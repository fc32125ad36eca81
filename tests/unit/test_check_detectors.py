"""Every detector: silent on a good run with something checked, and firing on that run with one thing changed.

A changed run is the good one with a record edited, moved or removed; nothing else tells a detector what was done.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from dbo.check import DETECTORS, hook_late, judge, metadata_slice, unequal_yields
from dbo.check.causes import CAUSES
from dbo.check.happens import HappensBefore
from dbo.errors import UsageError
from dbo.trace import Trace
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_queries import found, named, only
from tests.unit.trace_step import low_latency_run, split_slices

GOOD = low_latency_run(ranks=2, layers=3)


@pytest.fixture
def run() -> Trace:
    return copy.deepcopy(GOOD)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.ID)
def test_a_good_run_is_silent_and_was_looked_at(detector: ModuleType) -> None:
    findings = detector.detect(GOOD, HappensBefore(GOOD))
    assert findings.violations == [] and findings.checked > 0
    assert findings.id == detector.ID and detector.SENTENCE and detector.UNIT


def test_every_detector_has_a_place_among_the_causes() -> None:
    order = [id for id, _ in CAUSES]
    ids = [d.ID for d in DETECTORS]
    assert len(set(order)) == len(order) and set(ids) <= set(order)
    assert sorted(ids, key=order.index) == ids


@pytest.mark.parametrize(
    ("detector", "kind", "attribute"),
    [
        ("config", "config", "config"),
        ("dp-disagreement", "decide", "decision"),
        ("dp-disagreement", "decide", "table"),
        ("empty-ubatch", "slices", "ubatches"),
        ("metadata-slice", "slices", "parent"),
        ("padding-leak", "send", "rows"),
        ("padding-leak", "send", "real"),
        ("unequal-yields", "ubatch.exit", "declared_yields"),
        ("hook-lost", "hook.register", "holder"),
        ("hook-twice", "hook.run", "hook"),
        ("swallowed-error", "step.end", "expected_rows"),
        ("swallowed-error", "step.end", "live_threads"),
        ("collective-mismatch", "collective", "dtype"),
        ("buffer-reuse", "recv", "call"),
    ],
)
def test_a_missing_attribute_is_an_error_that_names_it(run: Trace, detector: str, kind: str, attribute: str) -> None:
    del only(run, kind).attrs[attribute]
    with pytest.raises(UsageError, match=f"{kind} carries attrs {attribute}"):
        found(run, detector)


# -- configuration and coordination ---------------------------------------------------------------------------------


def test_config_names_the_field_and_both_values(run: Trace) -> None:
    only(run, "config", rank=1).attrs["config"]["ubatch_size"] = 3
    violation = named(run, "config")
    assert violation.rank == 1 and "ubatch_size=2" in violation.sentence and "ubatch_size=3" in violation.sentence


def test_config_compares_nested_and_absent_fields(run: Trace) -> None:
    only(run, "config", rank=0).attrs["config"]["graph"] = {"sizes": [4, 8]}
    only(run, "config", rank=1).attrs["config"]["graph"] = {"sizes": [4]}
    assert "graph.sizes=[4, 8]" in named(run, "config").sentence
    del only(run, "config", rank=1).attrs["config"]["graph"]
    assert "(absent)" in named(run, "config").sentence


@pytest.mark.parametrize("field", ["split", "num_tokens_padded", "cudagraph_mode", "num_ubatches"])
def test_dp_disagreement_on_any_part_of_the_decision(run: Trace, field: str) -> None:
    decision = only(run, "decide", rank=1).attrs["decision"]
    decision[field] = {"split": True, "num_tokens_padded": [6, 8], "cudagraph_mode": "FULL", "num_ubatches": 3}[field]
    decision["split"] = field != "split"
    violations = found(run, "dp-disagreement")
    assert {v.rank for v in violations} == {1} and field in violations[0].sentence
    assert judge(run).verdict.id == "dp-disagreement"


def test_dp_disagreement_when_a_rank_acts_against_the_decision(run: Trace) -> None:
    run.records = [r for r in run.records if not (r.rank == 1 and r.line == "u1" and r.kind == "ubatch.enter")]
    (violation,) = found(run, "dp-disagreement")
    assert violation.rank == 1 and "ran 1 ubatches" in violation.sentence


def test_dp_disagreement_when_a_rank_runs_other_rows_than_decided(run: Trace) -> None:
    only(run, "slices", rank=0).attrs["parent"]["num_tokens_padded"] = 5
    (violation,) = found(run, "dp-disagreement")
    assert violation.rank == 0 and "5 token rows" in violation.sentence


def test_dp_disagreement_when_a_rank_skips_a_decision() -> None:
    run = low_latency_run(steps=2, layers=2)
    run.records = [r for r in run.records if not (r.kind == "decide" and (r.rank, r.step) == (1, 1))]
    (violation,) = found(run, "dp-disagreement")
    assert violation.rank == 1 and violation.step == 1 and "no decision" in violation.sentence


# -- slices ---------------------------------------------------------------------------------------------------------


def test_an_empty_ubatch_is_named(run: Trace) -> None:
    only(run, "slices", rank=1).attrs["ubatches"][1]["num_actual_tokens"] = 0
    (violation,) = found(run, "empty-ubatch")
    assert (violation.rank, violation.ubatch, violation.step) == (1, 1, 0)
    assert judge(run).verdict.id == "empty-ubatch"


@pytest.mark.parametrize("field", sorted(split_slices()["parent"]))
@pytest.mark.parametrize("ubatch", [0, 1])
def test_every_field_of_every_ubatch_is_recomputed(run: Trace, field: str, ubatch: int) -> None:
    plan = only(run, "slices", rank=1).attrs["ubatches"][ubatch]
    value = plan[field]
    plan[field] = {"size": 2, "rank": 0} if value is None else [] if isinstance(value, list) else int(value) + 7
    violations = found(run, "metadata-slice")
    assert [(v.rank, v.ubatch) for v in violations] == [(1, ubatch)] and violations[0].sentence.startswith(field)


def test_a_missing_field_is_a_violation_and_an_unknown_one_is_refused(run: Trace) -> None:
    plan = only(run, "slices", rank=0).attrs["ubatches"][1]
    del plan["seq_lens"]
    (violation,) = found(run, "metadata-slice")
    assert "(missing)" in violation.sentence
    plan["colour"] = 1
    with pytest.raises(UsageError, match="unknown=.*colour"):
        found(run, "metadata-slice")


def test_metadata_of_three_ubatches_with_padded_requests_and_dcp() -> None:
    layout = {"size": 2, "rank": 1, "interleave": 2}
    parent = {
        "query_start_loc": [0, 9, 10, 10],
        "seq_lens": [12, 6, 0],
        "num_computed_tokens": [3, 5, 0],
        "num_reqs": 3,
        "num_actual_tokens": 10,
        "num_tokens_padded": 12,
        "max_query_len": 9,
        "max_seq_len": 12,
        "block_table": [[1], [2], [0]],
        "slot_mapping": list(range(20, 30)) + [0, 0],
        "positions": list(range(12)),
        "causal": True,
        "is_prefilling": [True, False, False],
        "dcp_local_seq_lens": [6, 2, 0],
        "dcp_layout": layout,
    }
    middle = metadata_slice.expected(parent, 4, 8, rows=4)
    assert middle["query_start_loc"] == [0, 4] and middle["seq_lens"] == [11] and middle["num_computed_tokens"] == [7]
    assert middle["dcp_local_seq_lens"] == [5], "positions 2 3 6 7 10 of 0 to 10 live on peer 1"
    last = metadata_slice.expected(parent, 8, 12, rows=4, requests_stop=3)
    assert last["query_start_loc"] == [0, 1, 2, 2] and last["seq_lens"] == [12, 6, 0]
    assert last["num_computed_tokens"] == [11, 5, 0] and last["num_reqs"] == 3 and last["num_actual_tokens"] == 2
    for plan in (middle, last):
        queries = [b - a for a, b in zip(plan["query_start_loc"], plan["query_start_loc"][1:], strict=False)]
        assert [s - q for s, q in zip(plan["seq_lens"], queries, strict=True)] == plan["num_computed_tokens"]


def test_padding_that_is_dispatched_and_padding_that_writes_a_real_block(run: Trace) -> None:
    only(run, "send", rank=1, ubatch=1, op="dispatch").attrs["rows"] = 3
    violation = named(run, "padding-leak")
    assert (violation.rank, violation.ubatch) == (1, 1) and "3 rows" in violation.sentence
    run = copy.deepcopy(GOOD)
    only(run, "slices", rank=0).attrs["ubatches"][1]["slot_mapping"][-1] = 9
    (violation,) = found(run, "padding-leak")
    assert (violation.rank, violation.ubatch) == (0, 1) and "slot 9 (block 2)" in violation.sentence


# -- the ring -------------------------------------------------------------------------------------------------------


def test_unequal_yields_says_whether_a_plain_ring_would_hang(run: Trace) -> None:
    only(run, "ubatch.exit", rank=1, ubatch=0).attrs["yields"] = 5
    violation = named(run, "unequal-yields")
    assert (violation.rank, violation.ubatch) == (1, 0) and "would hang (y0=5, y1=6)" in violation.sentence
    only(run, "ubatch.exit", rank=1, ubatch=0).attrs["yields"] = 7
    assert "would end" in named(run, "unequal-yields").sentence


@pytest.mark.parametrize("yields", [[2, 2], [3, 2], [3, 3, 2], [], [0]])
def test_a_plain_ring_ends(yields: list[int]) -> None:
    assert unequal_yields.plain_ring_ends(yields)


@pytest.mark.parametrize("yields", [[2, 3], [4, 2], [3, 2, 3], [0, 1]])
def test_a_plain_ring_hangs(yields: list[int]) -> None:
    assert not unequal_yields.plain_ring_ends(yields)


def test_a_ubatch_that_never_exits_is_compared_by_its_yields_so_far(run: Trace) -> None:
    gone = only(run, "ubatch.exit", rank=0, ubatch=1)
    run.records.remove(gone)
    run.meta["complete"] = False
    run.records = [replace(r, after=tuple(x for x in r.after if x != gone.id)) for r in run.records]
    assert found(run, "unequal-yields") == []
    only(run, "ubatch.enter", rank=0, ubatch=1).attrs["declared_yields"] = 5
    (violation,) = found(run, "unequal-yields")
    assert (violation.rank, violation.ubatch) == (0, 1) and "has yielded 6 times and waits" in violation.sentence


def test_a_cancelled_ubatch_may_yield_less(run: Trace) -> None:
    only(run, "ubatch.exit", rank=0, ubatch=1).attrs.update(yields=1, error="UBatchCancelled")
    assert found(run, "unequal-yields") == []


def test_two_awake_when_the_baton_is_given_before_it_is_laid_down(run: Trace) -> None:
    resume = only(run, "resume", rank=1, ubatch=0)
    resume.after = ()
    violation = named(run, "two-awake")
    assert (violation.rank, violation.ubatch) == (1, 0) and violation.records[0] == resume.id


def test_two_awake_when_the_holder_never_laid_it_down(run: Trace) -> None:
    given = only(run, "yield", rank=0, ubatch=1)
    run.records = [replace(r, after=tuple(x for x in r.after if x != given.id)) for r in run.records if r is not given]
    assert "still holds the baton" in found(run, "two-awake")[0].sentence


# -- hooks ----------------------------------------------------------------------------------------------------------


def test_a_hook_that_never_runs_is_lost(run: Trace) -> None:
    number = only(run, "hook.run", rank=1, owner=1).attrs["hook"]
    drop = only(run, "hook.run", rank=1, hook=number)
    drop.kind = "hook.drop"
    (violation,) = found(run, "hook-lost")
    assert (violation.rank, violation.ubatch) == (1, 1) and "was dropped" in violation.sentence
    assert judge(run).verdict.id == "hook-lost"
    run.records.append(replace(drop, id=10_000, line="u1", kind="error", attrs={"type": "X", "message": ""}, after=()))
    assert found(run, "hook-lost") == [], "a step that raised drops its hooks"


def test_an_overwritten_hook_is_lost_and_names_the_later_one(run: Trace) -> None:
    first = only(run, "hook.register", rank=0, owner=0)
    run.records = [r for r in run.records if not (r.kind == "hook.run" and r.rank == 0 and r.attrs["hook"] == 0)]
    dead = {r.id for r in GOOD.of_kind("hook.run") if r.rank == 0 and r.attrs["hook"] == 0}
    run.records = [replace(r, after=tuple(x for x in r.after if x not in dead)) for r in run.records]
    (violation,) = found(run, "hook-lost")
    assert violation.records[0] == first.id and "overwritten by hook 2" in violation.sentence


def test_a_hook_that_runs_again_is_twice(run: Trace) -> None:
    again = only(run, "hook.run", rank=1, owner=0)
    at = run.records.index(again) + 4
    run.records.insert(at, replace(again, id=10_000, after=()))
    (violation,) = found(run, "hook-twice")
    assert (violation.rank, violation.ubatch) == (1, 0) and "2 times" in violation.sentence
    assert judge(run).verdict.id == "hook-twice"


def late_hook() -> Trace:
    """u0's MLP is launched before u1 runs u0's hook; everything stays ordered on the one stream."""
    b = TraceBuilder()
    x, landing = b.buffer("xin"), b.buffer("landing")
    b.add("hook.register", "u0", ubatch=0, hook=0, owner=0, holder=1)
    early = b.op("MLP", ubatch=0, reads=[x], point="MLP")
    b.add("hook.run", "u1", ubatch=1, hook=0, owner=0, runner=1)
    b.add("recv", "compute", ubatch=0, reads=[landing], writes=[x], call=0, buffer=0, op="dispatch")
    b.op("MLP", ubatch=1, reads=[landing])
    assert early == 1
    return b.trace


def test_a_hook_after_its_reader_is_late() -> None:
    trace = late_hook()
    (violation,) = found(trace, "hook-late")
    assert violation.records[:2] == (1, 2) and violation.ubatch == 0
    assert found(trace, "stream-race") == [], "one stream: ordered, in the wrong order"
    assert judge(trace).verdict.id == "hook-late"


def test_a_receive_that_names_no_bytes_is_an_error() -> None:
    trace = late_hook()
    only(trace, "recv").writes = ()
    with pytest.raises(UsageError, match="bytes that it completes"):
        hook_late.detect(trace, HappensBefore(trace))


# -- errors ---------------------------------------------------------------------------------------------------------


def failing(**end: Any) -> Trace:
    b = TraceBuilder()
    b.add("error", "u1", ubatch=1, step=3, type="ValueError", message="boom")
    if end:
        base = {"status": "error", "error": "ubatch 1 of rank 0 raised ValueError: boom", "rows": 0, "expected_rows": 4}
        b.add("step.end", "main", step=3, **{**base, "live_threads": 0, **end})
    return b.trace


@pytest.mark.parametrize(
    ("end", "words", "handled"),
    [
        ({"live_threads": 0}, "handled", True),
        ({}, "hung", False),
        ({"status": "ok", "rows": 2}, "2 of 4 rows as if nothing", False),
        ({"live_threads": 2}, "2 of its threads still running", False),
        ({"error": "TypeError: list is empty"}, "another error: TypeError", False),
    ],
)
def test_a_raise_in_a_ubatch_and_how_its_step_ended(end: dict[str, Any], words: str, handled: bool) -> None:
    trace = failing(**end)
    (violation,) = found(trace, "swallowed-error")
    assert (violation.rank, violation.ubatch, violation.step) == (0, 1, 3)
    assert words in violation.sentence and violation.handled is handled and "ValueError: boom" in violation.sentence
    assert judge(trace).verdict.text == "violated(swallowed-error)"
    assert judge(trace, expect_raise=True).verdict.good is handled


def test_only_the_first_error_counts_and_peers_that_fail_after_it_do_not() -> None:
    b = TraceBuilder(ranks=2)
    b.add("error", "u0", ubatch=0, type="ValueError", message="first")
    b.add("error", "u1", ubatch=1, type="KeyError", message="second")
    b.add("error", "main", rank=1, type="PeerFailed", message="rank 0 failed")
    for rank in (0, 1):
        b.add(
            "step.end",
            "main",
            rank=rank,
            status="error",
            error="ValueError: first",
            rows=0,
            expected_rows=1,
            live_threads=0,
        )
    (violation,) = found(b.trace, "swallowed-error")
    assert "first" in violation.sentence and violation.handled


def test_short_rows_and_left_threads_without_an_error(run: Trace) -> None:
    only(run, "step.end", rank=1).attrs["rows"] = 3
    violation = named(run, "swallowed-error")
    assert violation.rank == 1 and "3 rows instead of 5" in violation.sentence
    only(run, "step.end", rank=1).attrs.update(rows=5, live_threads=1)
    assert "1 of its threads" in named(run, "swallowed-error").sentence
