"""Overlap, order, and no-overlap: recomputed from hand-made traces."""

from __future__ import annotations

import copy

import pytest

from dbo.check import HappensBefore, judge, measure, no_overlap
from dbo.check.order import SEED_ORDER, exchanged, label, matches_seed, steady_order
from dbo.errors import UsageError
from dbo.trace import Trace
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_step import low_latency_run


def one_exchange(*, event: str, dur: float = 8.0) -> Trace:
    """u0: A, exchange, use; u1: B beside it. `event` says when the exchange's event is recorded on compute."""
    b = TraceBuilder()
    x, y = b.buffer("x"), b.buffer("y")
    b.at(layer=0)
    b.op("A", ubatch=0, dur=5.0, writes=[x], point="A1")
    mark = b.add("record", "compute", ubatch=0, event="u0.compute_done") if event == "before the yield" else None
    b.op("B", ubatch=1, dur=20.0, point="A1")
    if event == "after the yield":
        mark = b.add("record", "compute", ubatch=0, event="u0.compute_done")
    if mark is not None:
        b.add("wait", "comm", ubatch=0, after=[mark], event="u0.compute_done")
    b.op("D", line="comm", ubatch=0, dur=dur, reads=[x], writes=[y], point="D.send")
    b.trace.records[-1].kind = "exchange"
    done = b.add("record", "comm", ubatch=0, event="u0.comm_done")
    b.add("wait", "compute", ubatch=0, after=[done], event="u0.comm_done")
    b.op("MLP", ubatch=0, dur=5.0, reads=[y], point="MLP")
    return b.trace


def test_an_exchange_beside_the_peers_compute_is_hidden() -> None:
    overlap = measure(one_exchange(event="before the yield"))
    assert (overlap.hidden_share, overlap.ideal_share, overlap.exposed_us, overlap.comm_us) == (1.0, 1.0, 0.0, 8.0)


def test_an_exchange_longer_than_what_lies_beside_it_is_partly_exposed() -> None:
    overlap = measure(one_exchange(event="before the yield", dur=40.0))
    assert overlap.hidden_share == overlap.ideal_share == 0.5 and overlap.exposed_us == 20.0


def test_an_event_after_the_yield_hides_nothing_although_the_order_is_the_same() -> None:
    overlap = measure(one_exchange(event="after the yield"))
    assert (overlap.hidden_share, overlap.ideal_share) == (0.0, 1.0)


def test_the_own_shared_expert_hides_too_and_unsplit_steps_are_not_measured() -> None:
    b = TraceBuilder()
    b.op("D", line="comm", ubatch=0, dur=8.0)
    b.op("S", ubatch=0, dur=8.0)
    assert measure(b.trace).hidden_share is None
    b.op("late", ubatch=1, dur=1.0, t=100.0)
    b.trace.records[0].kind = "exchange"
    assert measure(b.trace).hidden_share == 1.0


def test_compute_can_hide_only_one_of_two_exchanges_on_a_line() -> None:
    b = TraceBuilder()
    b.op("A", ubatch=0, dur=1.0)
    b.add("exchange", "comm", ubatch=0, dur=10.0, after=[0])
    b.add("exchange", "comm", ubatch=0, dur=10.0, after=[0])
    b.op("B", ubatch=1, dur=12.0)
    assert measure(b.trace).ideal_share == pytest.approx(12 / 20)


def test_one_rank_at_a_time() -> None:
    run = low_latency_run()
    both, first = measure(run), measure(run, 0)
    assert first.comm_us * 2 == pytest.approx(both.comm_us) and first.hidden_share == pytest.approx(both.hidden_share)
    assert measure(run, 7).hidden_share is None
    assert 0.5 < (both.hidden_share or 0) <= (both.ideal_share or 0) <= 1


def test_no_overlap_names_the_producer_and_what_was_waited_for_instead() -> None:
    good = one_exchange(event="before the yield")
    findings = no_overlap.detect(good, HappensBefore(good))
    assert findings.violations == [] and findings.checked == 4
    late = one_exchange(event="after the yield")
    (violation,) = no_overlap.detect(late, HappensBefore(late)).violations
    assert (violation.rank, violation.ubatch) == (0, 0)
    assert (
        "starts 20.0 us after its producer A" in violation.sentence and "waits for B of ubatch 1" in violation.sentence
    )
    assert judge(late).verdict.text == "violated(no-overlap)"


def test_compute_that_waits_for_the_peers_exchange_is_named_too() -> None:
    b = TraceBuilder().at(layer=0)
    y = b.buffer("y")
    b.add("exchange", "comm", "D", ubatch=0, dur=5.0, writes=[y])
    own = b.add("record", "comm", ubatch=0, event="u0.comm_done")
    b.add("exchange", "comm", "D", ubatch=1, dur=20.0)
    late = b.add("record", "comm", ubatch=0, event="u0.comm_done")
    good = copy.deepcopy(b)
    for builder, event in ((b, late), (good, own)):
        builder.add("wait", "compute", ubatch=0, after=[event], event="u0.comm_done")
        builder.op("MLP", ubatch=0, dur=5.0, reads=[y], point="MLP")
    (violation,) = no_overlap.detect(b.trace, HappensBefore(b.trace)).violations
    assert (
        violation.ubatch == 0
        and "MLP of ubatch 0" in violation.sentence
        and "waits for D of ubatch 1" in violation.sentence
    )
    assert no_overlap.detect(good.trace, HappensBefore(good.trace)).violations == []


def test_too_early_is_a_race_and_not_a_lack_of_overlap() -> None:
    early = one_exchange(event="never")
    assert judge(early).verdict.text == "violated(stream-race)"
    assert no_overlap.detect(early, HappensBefore(early)).violations == []


def test_reading_the_peers_result_is_a_reason_to_wait_for_it() -> None:
    trace = one_exchange(event="after the yield")
    peer = next(r for r in trace.records if r.name == "B")
    peer.writes = next(r for r in trace.records if r.name == "D").reads
    assert all("waits for B" not in v.sentence for v in no_overlap.detect(trace, HappensBefore(trace)).violations)


def test_a_share_far_below_the_ideal_is_named_without_a_late_start() -> None:
    run = low_latency_run()
    for record in run.records:
        if record.kind == "transfer":
            record.t_us += 1e6
    (violation,) = no_overlap.detect(run, HappensBefore(run)).violations
    assert "0% of" in violation.sentence and "the schedule allows 9" in violation.sentence


def test_the_steady_order_of_the_overlap_schedule_is_the_seeds_with_ubatches_exchanged() -> None:
    order = steady_order(low_latency_run(layers=4), rank=1)
    assert order == exchanged(SEED_ORDER) and matches_seed(order) == "exchanged"
    assert matches_seed(exchanged(order)) == "same" and exchanged(exchanged(order)) == order
    assert matches_seed(order[1:]) is None


def test_the_order_is_the_order_of_issue_and_neighbours_collapse() -> None:
    run = copy.deepcopy(low_latency_run(layers=4))
    mlp = [r for r in run.records if r.point == "MLP" and r.line == "compute"]
    for record in mlp:
        record.id, record.point = record.id, "S"
    assert matches_seed(steady_order(run)) is None, "another program gives another order"


@pytest.mark.parametrize(
    ("point", "ubatch", "text"), [("A0", 1, "A0_1"), ("D.send", 0, "D0.send"), ("MLP", 1, "MLP1"), ("S", 0, "S0")]
)
def test_labels(point: str, ubatch: int, text: str) -> None:
    assert label(point, ubatch) == text
    assert exchanged([text]) == [label(point, 1 - ubatch)]


def test_an_order_needs_two_layers_of_a_split_step() -> None:
    with pytest.raises(UsageError, match="two MoE layers"):
        steady_order(low_latency_run(layers=1))
    with pytest.raises(UsageError, match="split_steps=0"):
        steady_order(low_latency_run(), rank=9)
