"""Needs torch. The ranks of `dbo bench dcp` as processes: inputs, the check against float64, and the timing.

Every rank makes the inputs of all ranks from the seed, so that it can judge its own result; a sample is the time of the
slowest rank.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dbo.bench.dcp import DCPBench, DCPRow
from dbo.dcp import ag_rs, dcp_a2a_lse_reduce, two_collectives
from dbo.dcp.exchange import TORCH_KERNELS
from dbo.dcp.oracle import merge_float64
from dbo.dcp.packing import lse_pack_dim
from dbo.dcp.workspace import Slot, WorkspaceManager
from dbo.errors import DBOError
from dbo.registry import dcp_bench_device

TIMEOUT_S = 600.0
LIMITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}
CHECKED_ROWS = 256
Path_ = tuple[str, str, Callable[[], torch.Tensor] | None, str]
"""Name, mode, one exchange (None: not run here) and a note."""


class GlooDCPGroup:
    """`dbo.dcp.groups.DCPGroup` over the default process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device_group = dist.group.WORLD


class Inputs:
    """This rank's partial output and LSE for one B, and what the exchange must give in its first rows."""

    def __init__(self, bench: DCPBench, rows: int, rank: int, device: str) -> None:
        dtype = getattr(torch, bench.dtype)
        checked, mine = min(rows, CHECKED_ROWS), bench.heads // bench.ranks
        kept = slice(rank * mine, (rank + 1) * mine)
        parts = []
        for source in range(bench.ranks):
            generator = torch.Generator().manual_seed(bench.seed * 1000 + source)
            out = torch.randn(rows, bench.heads, bench.head_dim, generator=generator).to(dtype)
            lse = torch.randn(rows, bench.heads, generator=generator) * 3
            parts.append((out[:checked, kept].clone(), lse[:checked, kept].clone()))
            if source == rank:
                self.out, self.lse = out.to(device), lse.to(device)
        outs, lses = zip(*parts, strict=True)
        self.want, _ = merge_float64(torch.stack(outs), torch.stack(lses))
        self.checked = checked

    def error(self, got: torch.Tensor) -> float:
        """Largest error of the rows that are checked, relative to 1 + |value|; NaN counts as infinite."""
        found = (got[: self.checked].cpu().double() - self.want).abs() / (1 + self.want.abs())
        return float(torch.nan_to_num(found, nan=float("inf")).max()) if found.numel() else 0.0


def cuda_devices() -> int:
    """Devices that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def measure_processes(bench: DCPBench) -> list[DCPRow]:
    """Start one process a rank, wait, and return rank 0's rows.

    Raises:
        DBOError: a rank did not end, or ended with an error.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dbo-bench-") as folder:
        answers = context.Queue()
        ranks = [
            context.Process(target=_main, args=(bench, rank, str(Path(folder, "store")), answers), daemon=True)
            for rank in range(bench.ranks)
        ]
        for process in ranks:
            process.start()
        rows = _answer(answers, ranks)
        for process in ranks:
            process.join(timeout=TIMEOUT_S)
    return rows


def _answer(answers: Any, ranks: list[Any]) -> list[DCPRow]:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        if not answers.empty():
            rows: list[DCPRow] = answers.get()
            return rows
        died = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if died or time.monotonic() > deadline:
            for process in ranks:
                process.kill()
            rule = "every rank of a benchmark ends"
            raise DBOError.of(rule, fix="its error is printed above", died=died or "none: too slow")
        time.sleep(0.02)


def _main(bench: DCPBench, rank: int, store: str, answers: Any) -> None:
    device = "cpu" if bench.device == "cpu" else f"cuda:{rank}"
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=bench.ranks,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    try:
        rows = list(_rows(bench, GlooDCPGroup(), device))
        if rank == 0:
            answers.put(rows)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rows(bench: DCPBench, group: GlooDCPGroup, device: str) -> Iterator[DCPRow]:
    workspace = WorkspaceManager(device)
    item_bytes = getattr(torch, bench.dtype).itemsize
    with torch.inference_mode():
        for rows in bench.rows:
            inputs = Inputs(bench, rows, group.rank, device)
            nbytes = bench.payload_bytes(rows, item_bytes)
            limit_ms = nbytes / bench.link_gbs / 1e6 if bench.link_gbs else _bare_ms(bench, rows, group, device)
            for name, mode, call, note in _paths(bench, inputs, group, workspace, device):
                row = DCPRow(path=name, mode=mode, rows=rows, payload_bytes=nbytes, limit_ms=limit_ms, note=note)
                yield row if call is None else _measured(bench, row, call, inputs, device)


def _paths(
    bench: DCPBench, inputs: Inputs, group: GlooDCPGroup, workspace: WorkspaceManager, device: str
) -> Iterator[Path_]:
    out, lse = inputs.out, inputs.lse
    kernels = TORCH_KERNELS if device == "cpu" else dcp_bench_device().kernels()
    slot = Slot(0, "dcp")

    def a2a() -> torch.Tensor:
        return _tensor(dcp_a2a_lse_reduce(out, lse, group, workspace=workspace, slot=slot, kernels=kernels))

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "two_collectives": lambda: _tensor(two_collectives(out, lse, group)),
        "ag_rs": lambda: _tensor(ag_rs(out, lse, group)),
        "a2a": a2a,
    }
    if device != "cpu":
        calls["a2a_direct"] = dcp_bench_device().direct(bench, inputs.out, inputs.lse, group)
    for name, call in calls.items():
        yield name, "eager", call, ""
        if device != "cpu":
            yield name, "graph", dcp_bench_device().captured(call, workspace, f"{name} {out.shape[0]}"), ""
    if device == "cpu":
        yield "a2a_direct", "eager", None, "stores into peers' memory: needs CUDA devices"


def _tensor(reduced: Any) -> torch.Tensor:
    assert isinstance(reduced, torch.Tensor)
    return reduced


def _measured(bench: DCPBench, row: DCPRow, call: Callable[[], torch.Tensor], inputs: Inputs, device: str) -> DCPRow:
    """Right first, on every rank; then the samples."""
    error = _slowest(inputs.error(call()), device)
    row = replace(row, error=error, limit=LIMITS[bench.dtype])
    if not row.correct:
        return replace(row, note="wrong: not timed")
    return replace(row, samples_ms=tuple(sample_ms(call, bench.inner, device) for _ in range(bench.repeat)))


def sample_ms(call: Callable[[], object], inner: int, device: str) -> float:
    """Mean time of `inner` exchanges on the slowest rank."""
    dist.barrier()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(inner):
            call()
        return _slowest((time.perf_counter() - start) * 1e3 / inner, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(inner):
        call()
    end.record()
    end.synchronize()
    return _slowest(begin.elapsed_time(end) / inner, device)


def _slowest(value: float, device: str) -> float:
    worst = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _bare_ms(bench: DCPBench, rows: int, group: GlooDCPGroup, device: str) -> float:
    """An all-to-all of as many bytes, and nothing else; the fastest of the samples."""
    dtype = getattr(torch, bench.dtype)
    width = bench.head_dim + lse_pack_dim(dtype)
    send = torch.zeros(bench.ranks, rows, bench.heads // bench.ranks, width, dtype=dtype, device=device)
    recv = torch.empty_like(send)

    def bare() -> None:
        dist.all_to_all_single(recv, send, group=group.device_group)

    bare()
    return min(sample_ms(bare, bench.inner, device) for _ in range(bench.repeat))
