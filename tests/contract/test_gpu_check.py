"""`dbo check --world gpu` and `python -m gpu.check` on CPU tensors: from the command line to the verdict."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from dbo.cli import frame
from gpu import check
from tests.meta.source_tree import ROOT


def answer(capsys, *words):
    code = frame.main(["check", "--world", "gpu", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_main_job_passes_between_processes(capsys):
    code, found = answer(capsys, "--device", "cpu", "--all2all-backend", "nccl", "--steps", "3")
    assert code == 0, found
    assert (found["world"], found["device"], found["verdict"]) == ("gpu", "cpu", "proved")
    assert found["verdict_text"] == "proved (synchronisation only)", "no world of real devices knows the bytes"
    reference = found["reference"]
    assert reference["tokens_equal"] and reference["serial_equal"] and reference["order_as_simulated"]
    assert reference["ties"] == 0 and reference["max_rel_err"] < 1e-4
    assert any(step["split"] for step in found["steps"]) and not all(step["split"] for step in found["steps"])
    assert found["replay"].endswith("--device cpu")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--data-parallel-size", "64"), 3, "one visible device a rank"),
        (("--device", "cpu", "--share-device"), 2, "device=cpu, share_device=True"),
        (("--device", "cpu", "--mode", "ordering"), 2, "mode=ordering"),
        (("--device", "cpu", "--all2all-backend", "deepep_high_throughput"), 3, "runs on devices"),
        (("--device", "cpu", "--all2all-backend", "nccl", "--cudagraph-mode", "FULL"), 3, "graphs are CUDA graphs"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(capsys, words, code, says):
    found = answer(capsys, *words)
    assert found[0] == code and says in found[1]["error"], found


def test_world_sim_takes_no_device(capsys):
    assert frame.main(["check", "--device", "cpu"]) == 2
    assert "only world gpu takes devices" in capsys.readouterr().err


def test_the_device_check_says_what_it_found(capsys):
    parts = ["--only", "watchdog", "--only", "soak", "--soak", "40", "--backend", "nccl"]
    assert check.main(["--device", "cpu", *parts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok") and "watchdog nccl" in line for line in lines), lines
    assert any("40 steps" in line for line in lines) and lines[-1].startswith("2 checks, 0 failed")


def test_the_device_check_refuses_where_devices_are_missing(capsys):
    assert check.main(["--device", "cuda", "--ranks", "64"]) == 3
    assert "num_ranks=64" in capsys.readouterr().err


def test_a_failing_part_makes_the_check_fail(capsys, monkeypatch):
    monkeypatch.setattr(check, "_handoff", lambda: (False, "planted"))
    assert check.main(["--device", "cpu", "--only", "handoff"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_suite_runs_under_torchrun():
    """Two processes that torchrun started; rank 0 prints the table."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}",
        "-m", "gpu.check", "--device", "cpu", "--only", "conformance", "--backend", "nccl",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok ") == 1 and "1 checks, 0 failed" in done.stdout, done.stdout
