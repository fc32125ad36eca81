"""Verdicts: which one, and when none may be given."""

from __future__ import annotations

import copy
import json

import pytest

from dbo.check import judge, verdict
from dbo.check.causes import in_causal_order
from dbo.check.choices import observed
from dbo.check.happens import HappensBefore
from dbo.check.violation import Violation
from dbo.errors import UsageError
from dbo.trace import Trace
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_step import low_latency_run


def test_a_complete_good_run_without_a_choice_is_proved() -> None:
    report = judge(low_latency_run())
    assert report.verdict == verdict.proved() and report.verdict.good
    assert report.invariants["failed"] == 0 and report.invariants["checked"] == sum(report.checked.values()) > 100
    assert json.loads(json.dumps(report.to_dict()))["verdict"] == "proved"


@pytest.mark.parametrize("trace", [Trace(), Trace(meta={"complete": True}), Trace(meta={"complete": False})])
def test_a_run_that_checked_nothing_cannot_pass(trace: Trace) -> None:
    assert str(judge(trace).verdict) == "inconclusive(nothing was checked)" and not judge(trace).verdict.good


def test_no_detector_means_nothing_was_checked() -> None:
    assert judge(low_latency_run(), detectors=[]).verdict.name == "inconclusive"


def test_a_run_that_was_cut_short_proves_nothing() -> None:
    run = low_latency_run()
    run.meta.update(complete=False, why_cut="10 steps are enough")
    assert str(judge(run).verdict) == "inconclusive(the run was cut short: 10 steps are enough)"
    del run.meta["complete"]
    assert judge(run).verdict.name == "inconclusive", "a run that does not say that it is complete is not"


def test_an_observed_choice_makes_one_run_a_sample() -> None:
    run = low_latency_run()
    for n in range(3):
        last = run.records[-1]
        run.records.append(type(last)(id=20_000 + n, rank=0, line="main", kind="choice", name="query"))
    assert str(judge(run).verdict) == "sampled(1 of about 8)" and len(judge(run).choices) == 3


def test_enqueues_of_two_host_lines_in_no_fixed_order_are_a_choice() -> None:
    run = copy.deepcopy(low_latency_run())
    assert observed(run, HappensBefore(run)) == []
    resume = next(r for r in run.of_kind("resume") if r.rank == 1)
    resume.after = ()
    (choice, *_) = observed(run, HappensBefore(run))
    assert "compute of rank 1" in choice.what and "no fixed order" in choice.what


def test_the_hand_off_has_to_come_after_the_launch_and_not_only_after_the_record_before_it() -> None:
    b = TraceBuilder()
    first = b.add("point", "u0")
    b.op("a", after=[first])
    second = b.add("resume", "u1", after=[first])
    b.op("b", after=[second])
    assert len(observed(b.trace, HappensBefore(b.trace))) == 1, "a may be launched after b"


def test_a_launch_that_names_no_host_line_is_a_choice_too() -> None:
    b = TraceBuilder()
    b.op("a", after=[b.add("point", "u0")])
    b.op("b")
    (choice,) = observed(b.trace, HappensBefore(b.trace))
    assert "which host line" in choice.what


def test_causes_come_before_effects_and_handled_errors_last() -> None:
    def v(id: str, step: int = 0, handled: bool = False) -> Violation:
        return Violation(id=id, sentence="", step=step, handled=handled)

    given = [
        v("deadlock"),
        v("stream-race", 2),
        v("stream-race", 1),
        v("hook-late"),
        v("config", handled=True),
        v("collective-mismatch"),
        v("dp-disagreement", 9),
        v("brand-new"),
    ]
    assert [(x.id, x.step) for x in in_causal_order(given)] == [
        ("dp-disagreement", 9),
        ("hook-late", 0),
        ("collective-mismatch", 0),
        ("stream-race", 1),
        ("stream-race", 2),
        ("deadlock", 0),
        ("brand-new", 0),
        ("config", 0),
    ]


def test_the_spelling_of_verdicts() -> None:
    texts = [
        verdict.proved(),
        verdict.proved(synchronisation_only=True),
        verdict.exhausted(924),
        verdict.bounded(2),
        verdict.sampled(100, 8e9),
        verdict.inconclusive("no time left"),
        verdict.violated("deadlock"),
    ]
    assert [str(t) for t in texts] == [
        "proved",
        "proved (synchronisation only)",
        "exhausted(924)",
        "bounded(2)",
        "sampled(100 of about 8e9)",
        "inconclusive(no time left)",
        "violated(deadlock)",
    ]
    assert [t.good for t in texts] == [True] * 5 + [False] * 2
    assert {t.name for t in texts} == {"proved", "exhausted", "bounded", "sampled", "inconclusive", "violated"}


@pytest.mark.parametrize("make", [lambda: verdict.exhausted(0), lambda: verdict.sampled(0, 5.0)])
def test_no_run_no_verdict(make: object) -> None:
    with pytest.raises(UsageError, match="runs=0"):
        make()  # type: ignore[operator]
