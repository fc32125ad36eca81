"""`dbo check --world gpu` and `python -m gpu.check` on CPU tensors: from the command line to the verdict."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dbo import registry
from dbo.cli import dispatch as frame
from dbo.engine.components import Components
from gpu.bench import handoff
from gpu.check import command as check
from gpu.check import leftovers, planted_faults, runs
from gpu.check import trace as edges
from gpu.check import watchdog as hangs
from gpu.check.setup import Setup
from gpu.host.threads import ThreadHost
from gpu.world import launch
from tests.meta.source_tree import ROOT


def setup_of(backend):
    run = partial(launch, ranks=2, device="cpu", timeout_s=120.0)
    return Setup(run=run, ranks=2, device="cpu", asked_device="cpu", backends=(backend,))


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


def test_the_watchdog_part_says_when_what_happened(capsys):
    assert check.main(["--device", "cpu", "--only", "watchdog", "--backend", "deepep_low_latency"]) == 0
    out = capsys.readouterr().out
    for fault in ("skip_a_dispatch", "drop_a_yield", "keep_the_baton", "die_in_an_exchange", "die_computing"):
        assert f"{fault}: reported " in out, out
    assert out.count(" s after the fault") == 5 and "WRONG" not in out, out


def test_a_hang_that_is_misnamed_or_never_struck_fails():
    setup = setup_of("nccl")
    wrong = hangs.Hang(planted=planted_faults.drop_a_yield, reason="stalled", ubatch=1)
    passed, after_s, words = hangs._hang(setup, "nccl", wrong)
    assert not passed and after_s is not None
    assert "WRONG: reason is unequal-yields, not stalled" in words and "WRONG: ubatch is 0, not 1" in words
    passed, after_s, words = hangs._hang(setup, "nccl", hangs.Hang(planted=Components, reason="stalled"))
    assert not passed and after_s is None and "no report" in words


@pytest.mark.parametrize("backend", ["nccl", "deepep_low_latency"])
def test_planted_faults_are_found_in_the_trace(backend):
    passed, words = edges.check_trace(setup_of(backend), backend)
    assert passed, words
    if backend == "nccl":
        assert "miss_a_wait: rank 1 step 0 layer 2 ubatch 0: C.send is not ordered after MLP" in words
        assert "record_late: rank 1 step 0 layer 2 ubatch 0: D.send waits for A1 of ubatch 1 too" in words
    else:
        assert words.count("has no place") == 2, "one stream: nothing waits for another one"


def test_a_fault_that_is_not_found_in_the_trace_fails():
    job = setup_of("nccl").job("nccl", keep_logits=False, max_steps=2)
    harmless = edges.PlantedFault(planted=Components, kind="unordered", point="C.send")
    passed, words = edges._planted(setup_of("nccl"), job, harmless, 0)
    assert not passed and "NOT FOUND" in words


@pytest.mark.parametrize("backend", ["nccl", "deepep_low_latency"])
def test_a_raising_ubatch_leaves_nothing_behind(backend):
    passed, words = leftovers.check_leftovers(setup_of(backend), backend)
    assert passed, words
    assert f"{int(backend != 'nccl')} hooks were pending" in words


@pytest.mark.parametrize("kind", ["thread", "greenlet"])
def test_a_worker_keeps_nothing_of_its_work(kind):
    if kind == "greenlet":
        pytest.importorskip("greenlet", reason="ubatches as greenlets need it")
        from gpu.host.greenlets import GreenletHost

        host = GreenletHost(handoff._recorder(), lambda stream: None, None)
    else:
        host = ThreadHost(handoff._recorder(), None, lambda: None)
    worker, held = host.worker("u0"), set()
    gone = weakref.ref(held)
    worker.submit(partial(held.add, "done"))
    worker.join()
    assert held == {"done"}
    del held
    assert gone() is None, "a thread that waits for its next step still held the last one"
    host.close()


@dataclass(frozen=True)
class Leaky:
    """What fails leaves a thread, a tensor, and a hook behind."""

    inner: leftovers.Leftovers

    def __call__(self, world):
        kept, spring = [], leftovers.Trap.spring

        def leaks(trap, context):
            if trap.armed:
                kept.append(torch.zeros(1000))
                threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
                trap.contexts.append(SimpleNamespace(recv_hook=(0, 0, print, ()), left=True))
            spring(trap, context)

        leftovers.Trap.spring = leaks
        return self.inner(world)


def test_what_is_left_behind_is_told():
    setup = setup_of("nccl")
    launched = setup.run(Leaky(leftovers.Leftovers(setup.job("nccl"), graphs=False)), trace=False)
    assert launched.errors == [None, None], launched.errors
    told = " ".join(launched.values[0].problems)
    assert "'forgotten'" in told and "tensors of 4000 bytes stay alive" in told and "1 hooks pending" in told, told


@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (0.5, False)])
def test_replays_with_the_tokens_and_other_logits_fail(off, passes):
    replayed = SimpleNamespace(cudagraph_mode="FULL", split=True)

    def run(job, trace):
        row = np.array([1.0, 4.0, 2.0 + off * (job.job.config.cudagraph_mode == "FULL")])
        outcome = SimpleNamespace(tokens={"a": 1}, logits={"a": row}, decision=replayed)
        return SimpleNamespace(values=[[outcome] * 3], errors=[None])

    passed, words = runs.check_replays(replace(setup_of("nccl"), run=run), "nccl")
    assert passed == passes and words.startswith("3 replays (3 split), 3 tokens"), words


def test_the_device_check_refuses_where_devices_are_missing(capsys):
    assert check.main(["--device", "cuda", "--ranks", "64"]) == 3
    assert "num_ranks=64" in capsys.readouterr().err


def test_a_backend_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        check.main(["--device", "cpu", "--backend", "nccll"])
    assert ended.value.code == 2 and "symm_copy" in capsys.readouterr().err


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
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "-m",
        "gpu.check",
        "--device",
        "cpu",
        "--only",
        "conformance",
        "--backend",
        "nccl",
    ]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok ") == 1 and "1 checks, 0 failed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("world", "says"),
    [("gpu", "the run of the halves one after another failed"), ("sim", "the simulator's run failed")],
)
def test_a_twin_that_fails_is_no_wrong_number(capsys, monkeypatch, world, says):
    usual = registry.load

    def load(name):
        entry = usual(name)

        def fails(program, **options):
            launched = entry.launch(program, **options)
            job = program.job
            if (world == "gpu" and name == "gpu" and job.serial) or (world == name == "sim"):
                launched.errors[1] = MemoryError("planted")
            return launched

        return replace(entry, launch=fails)

    monkeypatch.setattr(registry, "load", load)
    code, found = answer(capsys, "--device", "cpu", "--all2all-backend", "nccl", "--steps", "2")
    assert (code, found["verdict"]) == (1, "inconclusive")
    assert says in found["verdict_text"] and "rank 1 raised MemoryError: planted" in found["verdict_text"]
