"""The same seed gives the same bytes, in another process, under another hash seed, on either vehicle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbo.export.chrome import write_trace
from sim.world import SimRun
from tests.sim.job_harness import BACKENDS, ordering_job, run

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from pathlib import Path
from tests.sim.job_harness import SMALL, numeric_job, ordering_job, run
mode, vehicle, backend, folder = sys.argv[1:]
lengths = ((9, 5), (7, 6))
if mode == "ordering":
    job = ordering_job(lengths, backend=backend)
else:
    import torch
    torch.set_num_threads(1)
    from dbo.model.generator import generate_model_folder
    changes = {k: v for k, v in SMALL.items() if k not in ("num_hidden_layers", "hidden_size")}
    config = generate_model_folder(Path(folder), seed=1, hidden_size=64, num_layers=3, **changes)
    job = numeric_job(Path(folder), config, lengths, backend=backend)
launched = run(job, vehicle=vehicle)
sys.stdout.buffer.write(launched.trace.canonical_bytes())
"""


def trace_bytes(mode: str, vehicle: str, backend: str, folder: Path, hash_seed: str) -> bytes:
    """The canonical bytes of a run's trace, made in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, vehicle, backend, str(folder)],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        env={"PYTHONHASHSEED": hash_seed, "PATH": "", "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vehicle", ["greenlet", "thread"])
def test_two_processes_with_different_hash_seeds_write_the_same_trace(
    tmp_path: Path, vehicle: str, backend: str
) -> None:
    first = trace_bytes("ordering", vehicle, backend, tmp_path / "a", "1")
    assert first == trace_bytes("ordering", vehicle, backend, tmp_path / "b", "4294967295")
    assert len(first) > 10_000 and json.loads(first)["meta"]["complete"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_vehicles_write_the_same_trace(backend: str) -> None:
    greenlets = run(ordering_job(backend=backend), vehicle="greenlet").trace.canonical_bytes()
    assert greenlets == run(ordering_job(backend=backend), vehicle="thread").trace.canonical_bytes()
    other = run(ordering_job(((9, 5), (7, 7)), backend=backend), vehicle="greenlet").trace.canonical_bytes()
    assert greenlets != other, "the comparison sees a difference of one token"


# -- the file that Perfetto opens -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BACKENDS)
def launched(request: pytest.FixtureRequest) -> SimRun:
    return run(ordering_job(backend=request.param))


@pytest.fixture(scope="module")
def events(launched: SimRun, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = write_trace(launched.trace, tmp_path_factory.mktemp("trace") / "trace.json")
    return json.loads(path.read_text())["traceEvents"]


def names_of(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == kind}


def test_a_process_is_a_rank_and_a_thread_a_line(launched: SimRun, events: list[dict[str, Any]]) -> None:
    processes = {pid: name for (pid, _), name in names_of(events, "process_name").items()}
    assert {pid: processes[pid] for pid in (0, 1)} == {0: "rank 0", 1: "rank 1"}
    threads = names_of(events, "thread_name")
    lines = {(r.id): (r.rank, r.line) for r in launched.trace.records}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(lines)
    assert all((e["pid"], threads[e["pid"], e["tid"]]) == lines[e["args"]["id"]] for e in slices)
    assert {"main", "u0", "u1", "compute"} <= {name for (pid, _), name in threads.items() if pid == 1}


def test_every_arrow_has_a_start_and_an_end_inside_slices_of_different_threads(events: list[dict[str, Any]]) -> None:
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            slices.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    arrows: dict[int, list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] in "sf":
            arrows.setdefault(e["id"], []).append(e)
    assert len(arrows) > 20
    for pair in arrows.values():
        assert [e["ph"] for e in pair] == ["s", "f"] and pair[1]["bp"] == "e"
        assert len({(e["pid"], e["tid"]) for e in pair}) == 2
        assert pair[0]["cat"] == pair[1]["cat"]
        for e in pair:
            inside = slices[e["pid"], e["tid"]]
            assert any(start - 1e-3 <= e["ts"] <= stop + 1e-3 for start, stop in inside), e


def test_there_are_arrows_for_batons_events_and_collectives(launched: SimRun, events: list[dict[str, Any]]) -> None:
    found = {e["cat"] for e in events if e["ph"] == "s"}
    wanted = {"baton", "collective"} | ({"event"} if launched.trace.meta["backend"] == "nccl" else set())
    assert wanted <= found
    handed = [r for r in launched.trace.records if r.kind in ("resume", "ubatch.enter")]
    batons = [e for e in events if e["ph"] == "f" and e["cat"] == "baton"]
    assert len(batons) >= len(handed) - 1


def test_times_never_run_backwards_on_a_line(events: list[dict[str, Any]]) -> None:
    last: dict[tuple[int, int], float] = {}
    for e in events:
        if e["ph"] == "X" and e["pid"] >= 0:
            line = (e["pid"], e["tid"])
            assert e["ts"] >= last.get(line, 0.0) - 1e-6, e
            last[line] = e["ts"]
