"""The text of `dbo check`: every fact is there, rows are in proportion, nothing shouts in colour into a file."""

import io
import re

from dbo.check import verdict
from dbo.check.violation import Violation
from dbo.cli import render
from dbo.cli.rows import draw
from dbo.cli.terminal import colours
from dbo.export.rows import Span
from dbo.job.types import CheckResult, Invariants, OverlapFigures, Reference, SteadyLayer, StepReport

SPLIT = StepReport(
    step=0,
    phase="prefill",
    split=True,
    tokens=(64, 60),
    padded_tokens=(64, 64),
    ubatches=2,
    votes=(True, True),
    slices=(((0, 32), (32, 64)), ((0, 32), (32, 60))),
)
WHOLE = StepReport(
    step=1, phase="decode", split=False, tokens=(4, 0), padded_tokens=(4, 1), votes=(True, False), why="rank 1 votes no"
)


def result(**changes):
    values = {
        "verdict": verdict.proved(),
        "ranks": 2,
        "steps": (SPLIT, WHOLE),
        "order": ("D1.send", "A0_0"),
        "order_exchanged": True,
        "steady_layer": SteadyLayer(rank=0, step=0, layer=3, comp=(span("A0_0", 0, 5),), comm=(span("D_1", 5, 9),)),
        "overlap": OverlapFigures(hidden_share=0.931, ideal_share=0.95, exposed_us=12.34),
        "invariants": Invariants(checked=10, failed=0, by_detector={"deadlock": 4, "stream-race": 6}),
        "reference": Reference(tokens_equal=True, max_rel_err=2.5e-7),
        "backend": "deepep_low_latency",
        "schedule": "mlp_shared_overlap",
        "seed": 11,
        "replay": "dbo check --seed 11",
    }
    return CheckResult(**(values | changes))


def span(label, start_us, end_us):
    return Span(label=label, start_us=start_us, end_us=end_us)


def test_the_report_holds_every_fact():
    lines = render.text(result()).splitlines()
    split = next(line for line in lines if line.lstrip().startswith("0 "))
    assert re.split(r"\s{2,}", split.strip()) == [
        "0",
        "prefill",
        "yes yes",
        "2 ubatches",
        "64 60",
        "64 64",
        "NONE",
        "0:32|32:64 0:32|32:60",
    ]
    whole = next(line for line in lines if line.lstrip().startswith("1 "))
    assert whole.endswith("rank 1 votes no")
    text = "\n".join(lines)
    assert "Order: D1.send A0_0 (ubatches exchanged" in text
    assert "93.1% of communication hidden (the schedule's own ideal: 95.0%), 12.3 µs exposed" in text
    assert "10 checked, 0 failed (deadlock 4, stream-race 6)" in text
    assert "greedy tokens equal to" in text and "2.5e-07" in text
    assert lines[-3:] == ["verdict: proved", "seed: 11", "replay: dbo check --seed 11"]


def test_a_violation_is_shown_with_its_place_its_report_and_its_replay():
    found = Violation(id="deadlock", sentence="nobody can run\nrank 0 u1 waits", rank=0, step=4, replay="dbo check -x")
    text = render.text(result(verdict=verdict.violated("deadlock"), violations=(found,)))
    assert (
        "violation deadlock (rank 0 step 4)\n    nobody can run\n    rank 0 u1 waits\n    replay: dbo check -x" in text
    )
    assert "verdict: violated(deadlock)" in text


def test_a_run_that_never_split_says_so_instead_of_showing_zeros():
    nothing = OverlapFigures(hidden_share=None, ideal_share=None, exposed_us=0.0)
    apart = Reference(tokens_equal=None, max_rel_err=None, why_not="ordering mode has no numbers")
    text = render.text(result(steps=(WHOLE,), order=(), steady_layer=None, overlap=nothing, reference=apart))
    assert "steady layer: none" in text
    assert "overlap: not measured" in text
    assert "not compared: ordering mode has no numbers" in text


def test_colour_is_for_terminals_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colours(Terminal()) and not colours(io.StringIO())
    assert "\x1b" in render.text(result(), colour=True)
    assert "\x1b" not in render.text(result(), colour=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours(Terminal())


def test_many_ranks_are_cut_short_by_number():
    many = StepReport(step=0, split=False, tokens=tuple(range(64)), padded_tokens=(1,) * 64)
    assert "0 1 2 3 4 5 6 7 (+56 ranks)" in render.text(result(steps=(many,)))


def test_rows_share_their_columns():
    comp = (span("A0_0", 0, 40), span("MLP_1", 40, 100))
    comm = (span("D_1", 0, 50), span("D_0", 60, 100))
    assert draw({"Comp": comp, "Comm": comm}, width=51) == [
        "Comp |-------A0_0--------|------------MLP_1------------|",
        "Comm |----------D_1-----------|    |--------D_0--------|",
    ]


def test_a_short_span_still_has_room_for_its_label():
    rows = draw({"Comp": (span("A", 0, 1000), span("short", 1000, 1001))}, width=20)
    assert "|short|" in rows[0] or "|-short-|" in rows[0]


def test_the_operations_of_one_point_are_drawn_as_one():
    apart = (span("MLP_0", 6, 9), span("A0_1", 0, 2), span("A0_1", 2, 4), span("A0_1", 5, 6))
    whole = (span("A0_1", 0, 6), span("MLP_0", 6, 9))
    assert draw({"Comp": apart}) == draw({"Comp": whole})


def test_no_span_draws_nothing():
    assert draw({"Comp": (), "Comm": ()}) == []
