"""Profiles of torch.profiler as traces: lines by stream, places by launch, waits, and the overlap figures on top."""

from __future__ import annotations

import gzip
import json

import pytest

from dbo.check import HappensBefore, measure
from dbo.cli.dispatch import main
from dbo.errors import UsageError
from dbo.export.chrome import write_trace
from dbo.export.profile import Place, place_of, range_name, read_any, read_profile
from dbo.export.window import window
from dbo.trace import Record, Trace

COMPUTE, COMM, SIDE = 7, 20, 24
THREADS = {0: 501, 1: 502}


class Written:
    """A profile by hand. Times in microseconds; a launch takes 2 on the host, 10 before its kernel may begin."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.events: list[dict] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
        self.correlation = 0

    def range(self, ubatch: int, point: str, start: float, end: float, layer: int = 1) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": range_name(self.rank, ubatch, point, 0, layer),
                "pid": 1,
                "tid": THREADS[ubatch],
                "ts": start,
                "dur": end - start,
                "args": {},
            }
        )

    def runtime(self, ubatch: int, name: str, at: float) -> int:
        self.correlation += 1
        self.events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": name,
                "pid": 1,
                "tid": THREADS[ubatch],
                "ts": at,
                "dur": 2.0,
                "args": {"correlation": self.correlation},
            }
        )
        return self.correlation

    def kernel(self, ubatch: int, name: str, launched: float, stream: int, start: float, end: float) -> None:
        correlation = self.runtime(ubatch, "cudaLaunchKernel", launched)
        self.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": end - start,
                "args": {"device": 0, "stream": stream, "correlation": correlation},
            }
        )

    def wait(self, ubatch: int, at: float, stream: int, on: int, recorded: int) -> None:
        correlation = self.runtime(ubatch, "cudaStreamWaitEvent", at)
        self.events.append(
            {
                "ph": "X",
                "cat": "cuda_sync",
                "name": "Stream Wait Event",
                "pid": 0,
                "tid": stream,
                "ts": at,
                "dur": 0,
                "args": {
                    "stream": stream,
                    "correlation": correlation,
                    "wait_on_stream": on,
                    "wait_on_cuda_event_record_corr_id": recorded,
                },
            }
        )

    def write(self, path):
        data = {"schemaVersion": 1, "baseTimeNanoseconds": 5_000_000, "traceEvents": self.events}
        path.write_text(json.dumps(data))
        return path


@pytest.fixture
def written():
    """Ubatch 0 sends, from 110 to 150 on the device; ubatch 1 computes from 120 to 140 and, on the side, to 190."""
    profile = Written()
    profile.range(0, "A1", 0, 20)
    profile.kernel(0, "gemm", 5, COMPUTE, 50, 100)
    recorded = profile.runtime(0, "cudaEventRecord", 15)
    profile.range(0, "D.send", 20, 40)
    profile.wait(0, 21, COMM, COMPUTE, recorded)
    profile.kernel(0, "pack_rows", 22, COMM, 102, 110)
    profile.kernel(0, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 25, COMM, 110, 150)
    profile.range(1, "MLP", 60, 90)
    profile.kernel(1, "grouped_gemm", 65, COMPUTE, 120, 140)
    profile.range(1, "S", 91, 99)
    profile.kernel(1, "shared_experts", 92, SIDE, 140, 190)
    return profile


def test_kernels_lie_on_lines_by_stream_and_at_points_by_launch(written, tmp_path):
    trace = read_profile([written.write(tmp_path / "rank0.json")])
    found = {r.name: (r.line, r.kind, r.ubatch, r.point, r.step, r.layer) for r in trace.records if r.on_device}
    assert found == {
        "gemm": ("compute", "op", 0, "A1", 0, 1),
        "pack_rows": ("comm", "op", 0, "D.send", 0, 1),
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": ("comm", "exchange", 0, "D.send", 0, 1),
        "grouped_gemm": ("compute", "op", 1, "MLP", 0, 1),
        "shared_experts": ("side", "op", 1, "S", 0, 1),
    }
    assert {r.line for r in trace.of_kind("point")} == {"u0", "u1"}
    gemm = next(r for r in trace.records if r.name == "gemm")
    assert (gemm.t_us, gemm.dur_us) == (50.0, 50.0), "from the first thing on"


def test_a_wait_between_streams_is_an_edge(written, tmp_path):
    trace = read_profile([written.write(tmp_path / "rank0.json")])
    ids = {r.name: r.id for r in trace.records}
    assert ids["gemm"] in next(r for r in trace.records if r.name == "pack_rows").after
    happens = HappensBefore(trace)
    assert happens.ordered(ids["gemm"], ids["pack_rows"]) and not happens.ordered(ids["pack_rows"], ids["grouped_gemm"])


def test_the_overlap_figures_are_those_of_the_kernels(written, tmp_path):
    trace = read_profile([written.write(tmp_path / "rank0.json")])
    said = measure(trace)
    assert (said.comm_us, said.exposed_us) == (40.0, 20.0) and said.hidden_share == pytest.approx(0.5)
    shown = window(trace, step=0, layer=1)
    assert shown.hidden_share == pytest.approx(0.5) and shown.exposed == ((110.0, 120.0), (140.0, 150.0))


def test_a_hook_runs_in_the_peers_thread_at_its_owners_point(tmp_path):
    profile = Written()
    profile.range(0, "A1", 0, 10)
    profile.range(1, "A0", 11, 20)
    profile.range(1, "A1", 21, 30)
    profile.kernel(1, "gemm", 25, COMPUTE, 40, 50)
    THREADS[0], own = THREADS[1], THREADS[0]
    try:
        profile.range(0, "D.recv", 31, 40)
        profile.kernel(0, "void deep_ep::internode_ll::dispatch<false>", 35, COMPUTE, 50, 60)
    finally:
        THREADS[0] = own
    trace = read_profile([profile.write(tmp_path / "rank0.json")])
    assert [(r.line, r.ubatch) for r in trace.of_kind("point") if r.point == "D.recv"] == [("u1", 0)]
    found = [(r.point, r.ubatch, r.line) for r in trace.records if r.on_device]
    assert found == [("A1", 1, "compute"), ("D.recv", 0, "compute")]


def test_two_ranks_share_a_clock_and_no_number(written, tmp_path):
    other = Written(rank=1)
    other.range(0, "A1", 3, 20)
    other.kernel(0, "gemm", 5, COMPUTE, 60, 70)
    trace = read_profile([written.write(tmp_path / "a.json"), other.write(tmp_path / "b.json")])
    assert {r.rank for r in trace.records} == {0, 1} and len({r.id for r in trace.records}) == len(trace.records)
    assert [r.t_us for r in trace.records if r.name == "gemm"] == [50.0, 60.0]
    assert trace.meta["ranks"] == 2 and measure(trace, 0).comm_us == 40.0


def test_a_range_says_where_it_is():
    assert place_of(range_name(1, 0, "C.send", 7, 3)) == Place(rank=1, ubatch=0, point="C.send", step=7, layer=3)
    assert place_of("0/-1/sample") == Place(rank=0, ubatch=-1, point="sample")
    assert place_of("ProfilerStep#3") is None and place_of("0/1") is None


def test_what_computes_by_its_name_is_no_exchange(tmp_path):
    profile = Written()
    profile.range(0, "MLP", 0, 20)
    profile.kernel(0, "void at::native::elementwise_kernel<combined>", 5, COMPUTE, 50, 100)
    profile.range(0, "C.send", 21, 40)
    profile.kernel(0, "void deep_ep::intranode::combine<bf16>", 25, COMM, 110, 120)
    trace = read_profile([profile.write(tmp_path / "rank0.json")])
    assert [r.kind for r in trace.records if r.on_device] == ["op", "exchange"]


def test_show_takes_a_profile(written, tmp_path, capsys):
    path = written.write(tmp_path / "rank0.json")
    assert main(["show", str(path), "--step", "0", "--layer", "1"]) == 0
    out = capsys.readouterr().out
    assert "50% of communication hidden" in out and "MLP₁" in out and "D₀" in out
    assert "Over all split steps of rank 0 50% of communication is hidden; 20 of 40 µs are exposed." in out


def test_a_packed_profile_is_read_and_a_trace_still_is(written, tmp_path):
    plain = written.write(tmp_path / "rank0.json")
    packed = tmp_path / "rank0.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_any([packed]) == read_any([plain])
    trace = Trace(meta={"complete": True}, records=[Record(1, 0, "main", "point", "A0")])
    assert read_any([write_trace(trace, tmp_path / "trace.json")]) == trace


def test_ubatches_that_shared_a_thread_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(THREADS, 1, THREADS[0])
    for overlap, refused in ((10.0, True), (0.5, False)):
        profile = Written()
        profile.range(0, "A0", 0, 20 + overlap)
        profile.range(1, "A0", 20, 60)
        profile.kernel(0, "gemm", 5, COMPUTE, 50, 100)
        path = profile.write(tmp_path / "rank0.json")
        if refused:
            with pytest.raises(UsageError, match='vehicle="thread"'):
                read_profile([path])
        else:
            assert len(read_profile([path]).records) == 3


def test_what_is_no_profile_is_refused(written, tmp_path):
    path = written.write(tmp_path / "rank0.json")
    nameless = Written()
    nameless.events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 1})
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "list.json").write_text("[]")
    packed = gzip.compress(path.read_bytes())
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "bad.json.gz").write_bytes(packed[:20] + bytes(20) + packed[40:])
    (tmp_path / "plain.json.gz").write_bytes(path.read_bytes())
    own = write_trace(Trace(meta={}, records=[]), tmp_path / "own.json")
    for paths, says in (
        ([path, path], "ranks="),
        ([nameless.write(tmp_path / "nameless.json")], "rank/ubatch/point"),
        ([tmp_path / "text.json", path], "a profile is JSON"),
        ([tmp_path / "list.json", path], "Chrome's events"),
        ([tmp_path / "missing.json", path], "existing file"),
        ([tmp_path / "cut.json.gz"], "a profile is JSON"),
        ([tmp_path / "bad.json.gz"], "a profile is JSON"),
        ([tmp_path / "plain.json.gz"], "Not a gzipped file"),
        ([own, path], "name this file alone"),
    ):
        with pytest.raises(UsageError, match=says):
            read_any(paths)
