"""The exchange as a whole, on virtual ranks: every path equals float64, staging is not allocated twice, wrong is
refused."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import dbo.dcp
from dbo.dcp import ag_rs, dcp_a2a_lse_reduce, empty_rows, two_collectives
from dbo.dcp.local import LocalDCPGroup, run_ranks
from dbo.dcp.oracle import merge_float64
from dbo.dcp.workspace import Slot, WorkspaceManager

PATHS = {"a2a": dcp_a2a_lse_reduce, "two_collectives": two_collectives, "ag_rs": ag_rs}
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_every_path_equals_float64(path: str, world: int, dtype: torch.dtype, base_e: bool, masked: bool) -> None:
    torch.manual_seed(world)
    rows, heads, dim = 5, 2 * world, 7
    outs = torch.randn(world, rows, heads, dim).to(dtype)
    lses = torch.randn(world, rows, heads) * 3
    masks = [(None, None)] * world
    if masked:
        starts = torch.tensor([0, 1, 1, 3, 4])
        masks = [(torch.tensor([rank % 2, 7, (rank + 1) % 2, 0]), starts) for rank in range(world)]
        for rank, (seq_lens, _) in enumerate(masks):
            empty = empty_rows(rows, seq_lens, starts)
            lses[rank, empty] = 0.0  # what a kernel without keys returns; the mask has to repair it
            outs[rank, empty] = math.nan
    run = PATHS[path]
    results = run_ranks(
        world, lambda g: run(outs[g.rank], lses[g.rank], g, True, base_e, masks[g.rank][0], masks[g.rank][1])
    )
    if masked:
        for rank, (seq_lens, starts) in enumerate(masks):
            lses[rank, empty_rows(rows, seq_lens, starts)] = -math.inf
    want_out, want_lse = merge_float64(outs, lses, base_e)
    for rank, (out, lse) in enumerate(results):
        mine = slice(2 * rank, 2 * rank + 2)
        assert out.dtype is dtype and lse.dtype is torch.float32
        torch.testing.assert_close(out.double(), want_out[:, mine], rtol=LIMITS[dtype], atol=LIMITS[dtype])
        torch.testing.assert_close(lse.double(), want_lse[:, mine], rtol=2e-6, atol=2e-6)


def test_one_collective_and_no_lse_unless_asked() -> None:
    def program(group: LocalDCPGroup) -> list[str]:
        result = dcp_a2a_lse_reduce(torch.ones(2, 4, 3), torch.zeros(2, 4), group)
        assert isinstance(result, torch.Tensor) and tuple(result.shape) == (2, 2, 3)
        return group.calls

    assert run_ranks(2, program) == [["all_to_all_single"]] * 2


def test_a_rank_without_rows_takes_part() -> None:
    def program(group: LocalDCPGroup) -> tuple[tuple[int, ...], list[str]]:
        out, lse = dcp_a2a_lse_reduce(torch.ones(0, 4, 3), torch.zeros(0, 4), group, return_lse=True)
        return (*out.shape, *lse.shape), group.calls

    assert run_ranks(2, program) == [((0, 2, 3, 0, 2), ["all_to_all_single"])] * 2


def test_world_1_returns_its_inputs_bit_for_bit() -> None:
    out, lse = torch.tensor([[[math.nan, 1.0]]]), torch.tensor([[math.nan]])
    group = SimpleNamespace(world_size=1, rank=0, device_group=None)
    same, same_lse = dcp_a2a_lse_reduce(out, lse, group, return_lse=True)
    assert same is out and same_lse is lse


def test_world_1_applies_the_mask() -> None:
    out, lse = torch.full((3, 1, 2), math.nan), torch.tensor([[1.0], [2.0], [3.0]])
    out[0] = 5.0
    group = SimpleNamespace(world_size=1, rank=0, device_group=None)
    arguments = {"seq_lens": torch.tensor([4, 0]), "query_start_loc": torch.tensor([0, 1, 2])}
    got, got_lse = dcp_a2a_lse_reduce(out, lse, group, return_lse=True, **arguments)
    assert got.flatten().tolist() == [5.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    assert got_lse.flatten().tolist() == [1.0, -math.inf, -math.inf]


GOOD = {"out": (2, 4, 3), "lse": (2, 4), "seq_lens": None, "query_start_loc": None}
REFUSED = {
    "heads do not divide": ({"out": (2, 6, 3), "lse": (2, 6)}, 4, "H=6, world_size=4"),
    "output is not 3-D": ({"out": (2, 4), "lse": (2, 4)}, 2, r"cp_attn_out=\[2, 4\]"),
    "LSE of another batch": ({"lse": (3, 4)}, 2, r"cp_attn_lse=\[3, 4\]"),
    "LSE of other heads": ({"lse": (2, 2)}, 2, r"cp_attn_lse=\[2, 2\]"),
    "seq_lens alone": ({"seq_lens": (2,)}, 2, "only=seq_lens"),
    "query_start_loc alone": ({"query_start_loc": (3,)}, 1, "only=query_start_loc"),
    "other requests": ({"seq_lens": (2,), "query_start_loc": (2,)}, 2, r"query_start_loc=\[2\]"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_value(path: str, case: str) -> None:
    changes, world, message = REFUSED[case]
    shapes = {**GOOD, **changes}
    seq_lens, starts = (
        None if shapes[k] is None else torch.zeros(shapes[k], dtype=torch.int32)
        for k in ("seq_lens", "query_start_loc")
    )
    group = SimpleNamespace(world_size=world, rank=0, device_group=None)
    with pytest.raises(ValueError, match=message):
        PATHS[path](
            torch.zeros(shapes["out"]), torch.zeros(shapes["lse"]), group, seq_lens=seq_lens, query_start_loc=starts
        )


@pytest.mark.parametrize("out_dtype, lse_dtype", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_other_dtypes_are_refused(out_dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    group = SimpleNamespace(world_size=2, rank=0, device_group=None)
    with pytest.raises(ValueError, match="float64"):
        dcp_a2a_lse_reduce(torch.zeros(1, 2, 3, dtype=out_dtype), torch.zeros(1, 2, dtype=lse_dtype), group)


def test_staging_comes_from_the_named_slot_and_is_not_allocated_again() -> None:
    def program(group: LocalDCPGroup) -> list[int]:
        workspace = WorkspaceManager()
        counts = []
        for step in range(3):
            for ubatch in (0, 1):
                slot = Slot(ubatch, "dcp")
                dcp_a2a_lse_reduce(torch.ones(3, 4, 5), torch.zeros(3, 4), group, workspace=workspace, slot=slot)
            counts.append(workspace.allocations)
            if step == 0:
                workspace.lock()
        return counts

    assert run_ranks(2, program) == [[2, 2, 2]] * 2


def test_two_ubatches_under_way_do_not_share_staging() -> None:
    """u1 packs while the exchange of u0 is still being received: with one slot u0 would merge u1's rows."""
    torch.manual_seed(0)
    outs, lses = torch.randn(2, 2, 3, 4, 5), torch.randn(2, 2, 3, 4)  # [ubatch, rank, B, H, D]

    def program(group: LocalDCPGroup, slots: tuple[Slot, Slot]) -> list[torch.Tensor]:
        workspace = WorkspaceManager()
        merged: list[torch.Tensor] = []

        class Interrupted:
            """Runs u1's whole exchange between u0's collective and u0's merge."""

            world_size, rank, device_group = group.world_size, group.rank, None

            @staticmethod
            def all_to_all_single(output: torch.Tensor, input: torch.Tensor) -> None:
                group.all_to_all_single(output, input)
                merged.append(
                    dcp_a2a_lse_reduce(
                        outs[1, group.rank], lses[1, group.rank], group, workspace=workspace, slot=slots[1]
                    )
                )

        first = dcp_a2a_lse_reduce(
            outs[0, group.rank], lses[0, group.rank], Interrupted, workspace=workspace, slot=slots[0]
        )
        return [first, *merged]

    def right(slots: tuple[Slot, Slot]) -> bool:
        results = run_ranks(2, lambda group: program(group, slots))
        return all(
            torch.allclose(
                results[rank][u].double(), merge_float64(outs[u], lses[u])[0][:, 2 * rank : 2 * rank + 2], atol=1e-5
            )
            for rank in range(2)
            for u in range(2)
        )

    assert right((Slot(0, "dcp"), Slot(1, "dcp")))
    assert not right((Slot(0, "dcp"), Slot(0, "dcp")))


def test_a_failing_rank_releases_the_others() -> None:
    def program(group: LocalDCPGroup) -> None:
        if group.rank == 1:
            raise RuntimeError("rank 1 is out")
        dcp_a2a_lse_reduce(torch.ones(1, 2, 3), torch.zeros(1, 2), group)

    with pytest.raises(RuntimeError, match="rank 1 is out"):
        run_ranks(2, program)


def test_a_rank_that_never_comes_is_a_time_out() -> None:
    def program(group: LocalDCPGroup) -> None:
        if group.rank == 0:
            dcp_a2a_lse_reduce(torch.ones(1, 2, 3), torch.zeros(1, 2), group)

    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, program, timeout_s=0.2)


def test_the_package_loads_torch_only_when_asked() -> None:
    """The protocol of the direct path is integers; a simulator without torch plays it."""
    program = "import sys, dbo.dcp.direct; print('torch' in sys.modules); dbo.dcp.merge; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["False", "True"]
    assert all(getattr(dbo.dcp, name).__name__ == name for name in dbo.dcp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(dbo.dcp, "nothing")  # noqa: B009
