"""A real profile of real processes: all threads, places by their ranges, and the layer as rows."""

from __future__ import annotations

from types import SimpleNamespace

from dbo.check import HappensBefore, measure
from dbo.contract.patience import Patience
from dbo.export.profile import read_profile
from dbo.export.window import window
from dbo.job.rank import RankMain
from gpu import probe
from gpu.bench import profiled
from gpu.bench.profiled import Profiled, profile_path
from gpu.world import launch
from tests.gpu.jobs import small_folder, small_job


def test_a_run_on_cpu_tensors_is_profiled_and_read_back(tmp_path):
    job = small_job(small_folder(tmp_path / "model"), "nccl")
    launched = launch(
        Profiled(RankMain(job), tmp_path),
        ranks=2,
        device="cpu",
        vehicle="thread",
        patience=Patience(stall_s=60.0),
        timeout_s=120.0,
    )
    assert launched.errors == [None, None], launched.errors
    trace = read_profile([profile_path(tmp_path, rank) for rank in range(2)])
    assert len(HappensBefore(trace).records) == len(trace.records) > 100

    def places(found):
        return {(r.rank, r.line, r.step, r.layer, r.ubatch, r.point) for r in found.of_kind("point") if r.point}

    # The ranges are the recorder's own points, thread by thread.
    assert places(trace) == places(launched.trace)
    assert {r.line for r in trace.records} >= {"main", "u0", "u1", "compute", "comm"}
    moved = [r for r in trace.records if r.kind == "exchange"]
    assert moved and {r.point for r in moved if r.ubatch >= 0} == {"D.send", "C.send"}, {r.name for r in moved}
    said = measure(trace)
    assert said.comm_us > 0 and said.hidden_share is not None and 0 <= said.hidden_share <= 1
    shown = window(trace, rank=1)
    assert shown.step >= 0 and shown.comp and shown.comm and shown.hidden_share is not None


def test_a_machine_on_which_no_backend_runs_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probe, "machine", lambda **options: SimpleNamespace(backends=(), options={"device": "cpu"}))
    assert profiled.main([str(tmp_path / "profiles")]) == 3
    assert "dbo doctor" in capsys.readouterr().err and not (tmp_path / "profiles").exists()
