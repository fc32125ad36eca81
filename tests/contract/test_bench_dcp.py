"""`dbo bench dcp` on real processes over gloo: right first, then timed; a wrong path is named and not timed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra `torch`)")

from dbo.bench.dcp import DCPBench, DCPRow, text, to_json  # noqa: E402
from dbo.bench.dcp_processes import Inputs  # noqa: E402
from dbo.dcp import merge  # noqa: E402

BENCH = DCPBench(device="cpu", ranks=2, rows=(5,), heads=4, head_dim=6, dtype="float32")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dbo.cli", "bench", "dcp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_path_is_checked_and_timed_over_gloo() -> None:
    flags = "--device cpu --ranks 2 --rows 0 3 --heads 4 --head-dim 6 --dtype bfloat16 --repeat 2"
    ran = bench(*shlex.split(flags), "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data = json.loads(ran.stdout)
    rows: list[dict[str, Any]] = data["rows"]
    assert {(r["path"], r["rows"]) for r in rows if r["samples_ms"]} == {
        (path, b) for path in ("two_collectives", "ag_rs", "a2a") for b in (0, 3)
    }
    assert all(r["correct"] and len(r["samples_ms"]) in (0, 2) for r in rows)
    assert [r["note"] for r in rows if r["path"] == "a2a_direct"] == [
        "stores into peers' memory: needs CUDA devices"
    ] * 2
    assert shlex.split(data["command"])[:3] == ["dbo", "bench", "dcp"]
    assert bench(*shlex.split(data["command"])[3:], "--json").returncode == 0


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    ran = bench("--device", "cpu", "--ranks", "3", "--heads", "4")
    assert ran.returncode == 2 and "ranks=3" in ran.stderr + ran.stdout


def test_a_wrong_result_is_seen() -> None:
    inputs = [Inputs(BENCH, 5, rank, "cpu") for rank in range(2)]
    out = torch.stack([i.out[:, :2] for i in inputs])
    lse = torch.stack([i.lse[:, :2] for i in inputs])
    right, _ = merge(out, lse)
    assert inputs[0].error(right) < 1e-6
    assert inputs[0].error(out.mean(0)) > 1e-2
    assert inputs[0].error(torch.full_like(right, torch.nan)) == float("inf")


def test_a_wrong_row_is_told_and_has_no_figure() -> None:
    wrong = DCPRow(path="a2a", mode="eager", rows=5, payload_bytes=64, error=0.4, limit=1e-5, note="wrong: not timed")
    good = DCPRow(
        path="ag_rs",
        mode="eager",
        rows=5,
        payload_bytes=2_000_000,
        limit=1e-5,
        samples_ms=(1.0, 3.0, 2.0),
        limit_ms=1.0,
    )
    shown = text(BENCH, [wrong, good], "two")
    assert "4.0e-01 WRONG" in shown and "wrong: not timed" in shown
    assert "2.000" in shown and "1.000 … 3.000" in shown and "1.00  50%" in shown and BENCH.command in shown
    assert [row["correct"] for row in to_json(BENCH, [wrong, good], "two")["rows"]] == [False, True]
