"""`dbo bench moe` without ranks: what is derived from samples, which targets that reaches, flags, tables, exit codes."""

from __future__ import annotations

import json
import math
import shlex
from argparse import Namespace
from dataclasses import replace

import pytest

from dbo.bench import moe
from dbo.bench.moe import MoEBench, options
from dbo.bench.moe_figures import LONG, VARIANTS, MoERow, beside, best_without, gain_over_best, hidden_share, verdicts
from dbo.bench.moe_shapes import SHAPES
from dbo.bench.moe_table import Measured, page, table
from dbo.cli.dispatch import main
from dbo.errors import NotAvailable, ScheduleError, UsageError

MS = {"no_dbo": 10.2, "dbo": 6.6, "compute": 6.0, "halves": 6.4, "comm": 4.0, "comm_halves": 4.4}


def row(ms=None, long=None, **changes) -> MoERow:
    """Four layers; marginal times are a quarter of `long` - `ms`."""
    times = MS | (ms or {})
    samples = {name: (value * 0.9, value, value * 1.3) for name, value in times.items()}
    samples |= {name + LONG: (value,) for name, value in (long or {}).items()}
    fields = {
        "shape": "wide-256",
        "tokens": 8192,
        "mode": "graph",
        "backend": "symm_copy",
        "comm_sms": 0,
        "schedule": "ascend_d0d1c0c1",
        "layers": 4,
        "limit": 0.05,
        "samples_ms": samples,
    }
    return MoERow(**(fields | changes))


def reached(rows, host=None) -> list[bool | None]:
    return [verdict.reached for verdict in verdicts(rows, host)]


def test_what_is_derived_follows_the_rules():
    one = row(long={name: 2 * value - 0.4 for name, value in MS.items()})
    assert one.ideal_gain == pytest.approx((6.0 + 4.0) / 6.4)
    assert one.own_gain == pytest.approx(10.2 / 6.6)
    assert one.realised == pytest.approx(one.own_gain / one.ideal_gain)
    assert one.serial_overhead == pytest.approx(1.02)
    assert one.hidden == pytest.approx((6.4 + 4.0 - 6.6) / 4.0)
    assert one.ratio == pytest.approx(4 / 6)
    assert one.marginal_ms("dbo") == pytest.approx((6.6 - 0.4) / 4)
    assert one.steady_hidden == pytest.approx((6.0 + 3.6 - 6.2) / 3.6)
    assert row().steady_hidden is None and row().timed and not row(samples_ms={}).timed


def test_where_communication_is_longer_it_is_the_ideal():
    assert row({"comm": 8.0}).ideal_gain == pytest.approx(14.0 / 8.0)


@pytest.mark.parametrize(("dbo", "share"), [(6.4, 1.0), (6.0, 1.0), (10.4, 0.0), (12.0, 0.0), (8.4, 0.5)])
def test_the_hidden_share_stays_between_nothing_and_all(dbo, share):
    assert hidden_share(6.4, 4.0, dbo) == pytest.approx(share)


def test_the_best_run_without_dbo_is_of_any_backend_mode_and_sms():
    mine, other = row(), row({"no_dbo": 8.0}, backend="deepep_v2", comm_sms=24, mode="eager")
    elsewhere = row({"no_dbo": 1.0}, tokens=4096)
    rows = [mine, other, elsewhere]
    assert best_without(rows, "wide-256", 8192) is other
    assert gain_over_best(mine, rows) == pytest.approx(8.0 / 6.6)


REACHED = {"no_dbo": 10.2, "dbo": 6.5}
STEADY = {name: 2 * value for name, value in (MS | REACHED).items()}


def test_targets_that_are_reached():
    lite = row({"dbo": 9.5}, shape="lite")
    assert reached([row(REACHED, STEADY, beside_compute=0.97), lite], 2.5) == [True, True, True, True, True, True]


@pytest.mark.parametrize(
    ("target", "rows", "host"),
    [
        (0, [row({"dbo": 7.3})], None),
        (1, [row({"no_dbo": 10.6})], None),
        (2, [row(REACHED), row({"no_dbo": 8.7, "dbo": 8.0}, backend="nccl")], None),
        (3, [row(REACHED, STEADY, beside_compute=0.9)], None),
        (4, [row({"dbo": 9.9}, shape="lite")], None),
        (5, [], 1.9),
    ],
)
def test_a_figure_that_misses_its_target_is_told(target, rows, host):
    verdict = verdicts(rows, host)[target]
    assert verdict.reached is False and str(verdict).startswith("MISSED: ") and verdict.detail


def test_what_runs_beside_exchanges_is_told_without_the_first_and_the_last_layer():
    """Three layers of one exchange each; kernels overlap one another, and cover three quarters of the second one."""
    moving = [(40.0, 60.0), (0.0, 10.0), (100.0, 130.0)]
    computing = [(30.0, 50.0), (45.0, 55.0), (200.0, 300.0)]
    assert beside(moving, computing, 3) == pytest.approx(15 / 20)
    assert beside(moving, computing, 1) is None and beside([], computing, 3) is None
    assert beside([*moving, (300.0, 301.0), (400.0, 401.0), (500.0, 501.0)], [], 3) == 0.0


def test_nothing_is_judged_by_what_was_not_measured():
    few, wrong = row(tokens=64), row(error=0.4, samples_ms={})
    outside = row({"comm": 0.6, "no_dbo": 6.6, "dbo": 6.6})  # the sweep begins at 0.2
    assert reached([few, wrong]) == [None] * 6
    assert reached([outside])[0] is None and reached([outside])[1] is True


def test_a_batch_is_judged_by_its_fastest_run():
    slow = row({"dbo": 9.0}, schedule="sglang_prefill")
    assert reached([slow])[0] is False and reached([slow, row(REACHED)])[0] is True


def test_rows_say_what_they_are_in_text_and_json():
    timed, wrong = row(what="prefill"), row(error=0.4, samples_ms={}, note="wrong: not timed", backend="nccl")
    shown = table(("wide-256", 8192, "graph"), [timed, wrong], [timed])
    assert (
        "## wide-256, 8192 tokens a rank (prefill; 4 layers), graph; best without DBO: symm_copy graph, 2.550" in shown
    )
    assert "2.550 ±20%" in shown and "4.0e-01 WRONG" in shown and "wrong: not timed" in shown
    measured = Measured(machine=["2 x H200"], rows=[timed, wrong], skipped=["lite: no time"], host={"events": 9.0})
    text = page("dbo bench moe", measured, verdicts(measured.rows))
    for part in ("2 x H200", "again: dbo bench moe", "skipped: lite: no time", "events 9 us", "not measured: "):
        assert part in text
    first, second = json.loads(json.dumps(measured.to_json(), allow_nan=False))["rows"]
    assert first["best_without_dbo"] == "symm_copy graph" and first["median_ms"]["dbo"] == 6.6
    assert first["correct"] and not second["correct"] and "own_gain" not in second


FLAGS = {
    "device": "auto",
    "ranks": 2,
    "shape": None,
    "tokens": None,
    "backend": None,
    "comm_sms": [0],
    "schedule": [],
    "mode": None,
    "layers": 4,
    "no_steady": False,
    "prompt_tokens": None,
    "context_tokens": None,
    "repeat": 5,
    "vehicle": "thread",
    "budget": None,
    "save": None,
    "seed": 0,
}


def flags(**changes) -> Namespace:
    return Namespace(**(FLAGS | changes))


def test_devices_get_real_shapes_and_a_cpu_a_tiny_one():
    on_devices, on_cpu = options(flags(), devices=2), options(flags(), devices=1)
    assert on_devices.shapes == ("wide-64", "wide-128", "wide-256", "wide-512", "lite")
    assert (on_devices.device, on_devices.tokens, on_devices.modes) == ("cuda", (8192, 4096), ("eager", "graph"))
    assert (on_cpu.device, on_cpu.shapes, on_cpu.modes) == ("cpu", ("tiny",), ("eager",))


@pytest.mark.parametrize(
    ("changes", "devices", "error"),
    [
        ({"device": "cuda"}, 1, NotAvailable),
        ({"mode": ["graph"]}, 0, NotAvailable),
        ({"comm_sms": [8, 7]}, 2, UsageError),
        ({"ranks": 3}, 0, UsageError),
        ({"schedule": ["no_such"]}, 0, ScheduleError),
        ({"schedule": ["ascend_d0d1c0c1"], "backend": ["deepep_low_latency"]}, 0, UsageError),
    ],
)
def test_flags_that_cannot_work_are_refused(changes, devices, error):
    with pytest.raises(error):
        options(flags(**changes), devices=devices)


BENCH = MoEBench(device="cpu", ranks=2, shapes=("tiny",), tokens=(8,), backends=("nccl", "deepep_v2"), comm_sms=(8, 24))


def test_the_command_measures_the_same_again(monkeypatch: pytest.MonkeyPatch):
    asked: list[MoEBench] = []

    class Stub:
        cuda_devices = staticmethod(lambda: 0)

        @staticmethod
        def measure(bench):
            asked.append(bench)
            return Measured(machine=[], rows=[row()])

    monkeypatch.setattr(moe, "moe_bench", lambda: Stub)
    bench = replace(BENCH, steady=False, budget_s=60.0, schedules=("all",), repeat=7, layers=3, vehicle="greenlet")
    assert main(shlex.split(bench.command)[1:]) == 0
    assert asked == [replace(bench, prompt_tokens=2048, context_tokens=1024)]


def test_a_page_without_a_figure_is_no_answer(monkeypatch: pytest.MonkeyPatch, capsys):
    measured = Measured(machine=["here"], skipped=["tiny 8 eager deepep_v2: no device"])
    monkeypatch.setattr(moe, "moe_bench", lambda: Namespace(cuda_devices=lambda: 0, measure=lambda bench: measured))
    assert main(["bench", "moe", "--device", "cpu", "--backend", "deepep_v2"]) == 3
    assert "deepep_v2: no device" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(0.01, 0), (0.4, 1)])
def test_a_wrong_result_ends_with_a_violation(error, code, monkeypatch: pytest.MonkeyPatch, capsys):
    measured = Measured(machine=["here"], rows=[row(error=error, samples_ms={})])
    stub = Namespace(cuda_devices=lambda: 0, measure=lambda bench: measured)
    monkeypatch.setattr(moe, "moe_bench", lambda: stub)
    assert main(["bench", "moe", "--device", "cpu", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["rows"][0]["correct"] is (code == 0)


def test_each_backend_gets_schedules_and_sms_that_suit_it():
    assert [s.name for s in BENCH.schedules_for("nccl")][0] == "mlp_shared_overlap"
    every = replace(BENCH, schedules=("all",))
    assert "sglang_prefill" in {s.name for s in every.schedules_for("nccl")}
    assert "sglang_prefill" not in {s.name for s in every.schedules_for("deepep_low_latency")}
    assert BENCH.sms_for("nccl") == (0,) and BENCH.sms_for("deepep_v2") == (8, 24)


def test_shapes_are_the_published_one_and_synthetic_ones():
    lite = SHAPES["lite"].config(4)
    assert (lite.hidden_size, lite.num_experts_per_tok, lite.moe_intermediate_size) == (2048, 6, 1408)
    assert not SHAPES["lite"].synthetic and all(SHAPES[f"wide-{w}"].synthetic for w in (64, 128, 256, 512))
    assert all(math.isfinite(value) for value in MS.values()) and set(MS) == set(VARIANTS)
