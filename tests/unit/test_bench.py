"""The harness around benchmarks, and `dbo bench`: what it prints, what it refuses. Nothing here depends on speed."""

from __future__ import annotations

import json

import pytest

from dbo.bench.table import table, to_json
from dbo.bench.timing import BenchResult, chosen, measure, milliseconds
from dbo.cli.dispatch import main
from dbo.contract.benchmark import Benchmark, Target
from dbo.errors import UsageError
from dbo.registry import BENCHMARKS, benchmarks


def _benchmark(name: str = "b", *, values: list[float] | None = None, **options) -> Benchmark:
    left = list(values or [1.0])
    return Benchmark(name=name, what="a thing", unit="ms", sample=lambda: left.pop(0), **options)


def _result(*samples: float, **options) -> BenchResult:
    return BenchResult(benchmark=_benchmark(**options), samples=samples)


def test_a_result_is_its_median_and_spread() -> None:
    result = _result(3.0, 1.0, 2.0, 9.0, 2.5)
    assert result.median == 2.5 and result.spread == (1.0, 9.0) and result.reached is None


@pytest.mark.parametrize(
    ("target", "value", "reached"),
    [
        (Target(bound=5), 5.0, True),
        (Target(bound=5), 5.1, False),
        (Target(bound=5, at_least=True), 5.0, True),
        (Target(bound=5, at_least=True), 4.9, False),
    ],
)
def test_a_target_is_a_bound_on_one_side(target: Target, value: float, reached: bool) -> None:
    assert _result(value, target=target).reached is reached


def test_one_sample_warms_up() -> None:
    assert measure(_benchmark(values=[99.0, 1.0, 2.0]), 2).samples == (1.0, 2.0)
    assert measure(_benchmark(values=[99.0, 3.0]), 1).samples == (3.0,)


def test_a_long_benchmark_is_repeated_less() -> None:
    assert measure(_benchmark(values=[9.0, 1.0, 2.0, 3.0], most=3), 50).samples == (1.0, 2.0, 3.0)


def test_only_chooses_by_the_beginning_of_a_name() -> None:
    rows = [_benchmark("ring-a"), _benchmark("ring-b"), _benchmark("memory")]
    assert [b.name for b in chosen(rows, ["ring"])] == ["ring-a", "ring-b"]
    assert chosen(rows, []) == rows
    with pytest.raises(UsageError, match="only=speed"):
        chosen(rows, ["ring", "speed"])


def test_the_table_says_reached_or_missed_beside_the_target() -> None:
    text = table(
        [
            _result(4.0, name="good", target=Target(bound=5)),
            _result(6.0, name="bad", target=Target(bound=5), note="since it rains"),
            _result(1234.5, name="told"),
        ]
    )
    lines = text.splitlines()
    assert "≤ 5 ms" in lines[1] and "reached" in lines[1] and "MISSED" in lines[2]
    assert "1,234 ms" in lines[3] and "reached" not in lines[3]
    assert lines[-1] == "bad: since it rains"


def test_json_has_every_sample() -> None:
    (row,) = to_json([_result(2.0, 1.0, 3.0, target=Target(bound=5))])
    assert row["samples"] == [2.0, 1.0, 3.0] and row["median"] == 2.0 and row["reached"] is True
    assert row["target"] == "≤ 5" and json.dumps(row)


def test_cpu_time_is_counted_in_milliseconds() -> None:
    spent = milliseconds(lambda: sum(range(200_000)))
    assert 0 < spent < 10_000


def test_every_world_with_benchmarks_names_them_once() -> None:
    for world in BENCHMARKS:
        names = [b.name for b in benchmarks(world)]
        assert len(names) == len(set(names)) and names


def test_targets_are_those_that_were_set() -> None:
    bounds = {b.name: str(b.target) for b in benchmarks("sim") if b.target is not None}
    wanted = {
        "ring-thread": "≥ 1000",
        "deadlock-report": "≤ 1",
        "compiled-64": "≤ 5",
        "compiled-256": "≤ 20",
        "compiled-1024": "≤ 100",
        "compiled-v3-256": "≤ 3000",
        "real-64": "≤ 50",
        "coordination-8": "≤ 1000",
        "coordination-64": "≤ 180000",
        "memory-1024": "≤ 500",
    }
    assert wanted.items() <= bounds.items()


def test_dbo_bench_prints_a_table_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--only", "compiled-64", "--only", "coordination-8", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert "compiled-64" in out and "coordination-8" in out and "ring" not in out


def test_dbo_bench_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--only", "deadlock-report", "--repeat", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in data["benchmarks"]] == ["deadlock-report"]
    assert len(data["benchmarks"][0]["samples"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [["bench"], ["bench", "moon"], ["bench", "sim", "--only", "nothing"], ["bench", "sim", "--repeat", "0"]],
)
def test_dbo_bench_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_an_interrupted_dbo_bench_prints_what_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(benchmark: Benchmark, repeat: int) -> BenchResult:
        if benchmark.name == "coordination-8":
            raise KeyboardInterrupt
        return BenchResult(benchmark=benchmark, samples=(1.0,))

    monkeypatch.setattr("dbo.cli.bench.measure", measured)
    line = ["bench", "sim", "--only", "compiled-64", "--only", "coordination-8"]
    assert main(line) == 130
    text = capsys.readouterr()
    assert text.err == "dbo: interrupted while timing coordination-8, with 1 of 2 benchmarks timed\n"
    assert "compiled-64" in text.out and "verdict" not in text.out and "coordination" not in text.out
    assert main([*line, "--json"]) == 130
    data = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in data["benchmarks"]] == ["compiled-64"]
    assert (data["interrupted"], data["exit"]) == (True, 130)
