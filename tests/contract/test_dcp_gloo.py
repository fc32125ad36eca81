"""The exchange between real processes over gloo: two and four ranks, every dtype, base, mask, odd shape and stride.

One set of processes for each world size runs the whole matrix; a rank that fails reports the case, a rank that hangs is
ended by its id when the time is up.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import queue
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo.dcp import ag_rs, dcp_a2a_lse_reduce, empty_rows, lse_pack_dim, pack, two_collectives, unpack
from dbo.dcp.groups import all_to_all_single
from dbo.dcp.oracle import merge_float64
from dbo.dcp.workspace import Slot, WorkspaceManager

TIMEOUT_S = 90.0
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 3e-6}
SHAPES = ((1, 1, 80), (5, 3, 96), (7, 1, 192), (3, 5, 576), (0, 1, 80))  # B, heads of a rank, D
HARD_BITS = [-0x800000, 0x7F800000, 0x7FC12345, 0x7F800001, -0x3EDCBA, 0, 1, 0x461C4000, 0x40A84000]
FLAGS = (False, True)


@dataclass(frozen=True)
class Group:
    world_size: int
    rank: int
    device_group: Any


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype
    shape: tuple[int, int, int]
    return_lse: bool
    base_e: bool
    masked: bool
    strided: bool


CASES = [
    Case(dtype=dtype, shape=shape, return_lse=return_lse, base_e=base_e, masked=masked, strided=strided)
    for dtype, shape, return_lse, base_e, masked, strided in itertools.product(
        LIMITS, SHAPES, FLAGS, FLAGS, FLAGS, FLAGS
    )
]


def inputs(case: Case, world: int, rank: int, seed: int) -> dict[str, Any]:
    """What one rank feeds in; every rank can compute what any other one does."""
    rows, heads, dim = case.shape
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    out = torch.randn(rows, heads * world, dim, generator=generator).to(case.dtype)
    lse = torch.randn(rows, heads * world, generator=generator) * 3
    arguments: dict[str, Any] = {"seq_lens": None, "query_start_loc": None}
    if case.masked:
        last = max(0, rows - 1)
        starts = torch.tensor([0, min(1, last), min(1, last), last], dtype=torch.int32)  # the last row is padding
        lens = torch.tensor([(rank + seed) % 2 * 4, 9, (rank + seed) % world], dtype=torch.int32)
        arguments = {"seq_lens": lens, "query_start_loc": starts}
        empty = empty_rows(rows, lens, starts)
        out[empty], lse[empty] = math.nan, 0.0
    if case.strided:
        wide = torch.full((heads * world, rows, dim + 5), math.nan, dtype=case.dtype)
        wide[..., 2 : dim + 2] = out.transpose(0, 1)
        out, lse = wide[..., 2 : dim + 2].transpose(0, 1), lse.t().contiguous().t()
    return {"cp_attn_out": out, "cp_attn_lse": lse, **arguments}


def expected(case: Case, world: int, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 over the sources, this rank's heads."""
    outs, lses = [], []
    for source in range(world):
        theirs = inputs(case, world, source, seed)
        lse = theirs["cp_attn_lse"].clone()
        if case.masked:
            lse[empty_rows(case.shape[0], theirs["seq_lens"], theirs["query_start_loc"])] = -math.inf
        outs.append(theirs["cp_attn_out"])
        lses.append(lse)
    mine = slice(rank * case.shape[1], (rank + 1) * case.shape[1])
    return merge_float64(torch.stack(outs)[:, :, mine], torch.stack(lses)[:, :, mine], case.base_e)


def run_case(case: Case, group: Group, workspace: WorkspaceManager, seed: int) -> None:
    mine = inputs(case, group.world_size, group.rank, seed)
    want, want_lse = expected(case, group.world_size, group.rank, seed)
    paths: dict[str, Any] = {
        "a2a": partial(dcp_a2a_lse_reduce, workspace=workspace, slot=Slot(seed % 2, "dcp")),
    }
    if not case.strided:
        paths |= {"two_collectives": two_collectives, "ag_rs": ag_rs}
    for name, path in paths.items():
        result = path(cp_group=group, return_lse=case.return_lse, is_lse_base_on_e=case.base_e, **mine)
        out, lse = result if case.return_lse else (result, want_lse.float())
        assert (out.dtype, lse.dtype) == (case.dtype, torch.float32), name
        for what, got, right, limit in (("out", out, want, LIMITS[case.dtype]), ("lse", lse, want_lse, 3e-6)):
            worst = partial("{}, {}: {}".format, name, what)
            torch.testing.assert_close(got.double(), right, rtol=limit, atol=limit, msg=worst)


def check_lse_bits(group: Group, dtype: torch.dtype) -> None:
    """Hard fp32 bit patterns, another order on every rank, arrive as they were sent."""
    world, heads = group.world_size, 3

    def bits_of(rank: int) -> torch.Tensor:
        return torch.tensor(HARD_BITS * (world * heads), dtype=torch.int32).roll(rank).view(9, world * heads)

    send = torch.zeros(world, 9, heads, 5 + lse_pack_dim(dtype), dtype=dtype)
    recv = torch.full_like(send, math.nan)
    pack(torch.zeros(9, world * heads, 5, dtype=dtype), bits_of(group.rank).view(torch.float32), send)
    all_to_all_single(recv, send, group)
    _, lse = unpack(recv, 5)
    mine = slice(group.rank * heads, (group.rank + 1) * heads)
    assert torch.equal(lse.view(torch.int32), torch.stack([bits_of(source)[:, mine] for source in range(world)]))


def rank_main(rank: int, world: int, store: str, reports: multiprocessing.Queue) -> None:
    """One rank: the whole matrix; puts (rank, number of cases passed, what went wrong)."""
    torch.set_num_threads(1)
    done, where = 0, "start"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S / 2)
        )
        group = Group(world, rank, dist.group.WORLD)
        for dtype in LIMITS:
            where = f"LSE bits in {dtype}"
            check_lse_bits(group, dtype)
        workspace = WorkspaceManager()
        for seed, case in enumerate(CASES):
            where = str(case)
            run_case(case, group, workspace, seed)
            done += 1
        allocations = workspace.allocations
        workspace.lock()
        for seed, case in list(enumerate(CASES))[::11]:
            where = f"after the lock: {case}"
            run_case(case, group, workspace, seed)
        assert workspace.allocations == allocations
        dist.barrier()
        dist.destroy_process_group()
        reports.put((rank, done, ""))
    except BaseException as error:
        reports.put((rank, done, f"{where}: {type(error).__name__}: {error}"))


@pytest.mark.parametrize("world", [2, 4])
def test_matrix_over_gloo(world: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, world, str(tmp_path / "store"), reports), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline, seen = time.monotonic() + TIMEOUT_S, {}
    try:
        while len(seen) < world and time.monotonic() < deadline:
            try:
                rank, done, trouble = reports.get(timeout=1.0)
            except queue.Empty:
                continue
            seen[rank] = (done, trouble)
            if trouble:
                break
    finally:
        for process in ranks:
            process.join(timeout=5.0)
            if process.is_alive():
                process.terminate()
                process.join(timeout=5.0)
    assert seen == {rank: (len(CASES), "") for rank in range(world)}
