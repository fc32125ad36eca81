"""Every way that the packed exchange is known to have been written wrongly, each killed by name.

A check is one function of an implementation. It passes for the right one and fails for the mutant: `killed` asserts
both, and where a test says what *hides* a mutant, that its separating input is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo.dcp import dcp_a2a_lse_reduce, empty_rows, lse_pack_dim, merge, pack, unpack
from dbo.dcp.local import LocalDCPGroup, run_ranks
from dbo.dcp.workspace import Slot, WorkspaceManager

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
RAW = {FP16: torch.int16, BF16: torch.int16, FP32: torch.int32}
SLOT = Slot(0, "dcp")


def killed(check: Callable[[Any], None], *, right: Any, mutant: Any) -> None:
    check(right)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(mutant)


# ---- payload: a codec turns (out [B,H,D], lse [B,H], world) into what the receivers read back -----------------------


def right_codec(out: torch.Tensor, lse: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, dim = out.shape
    send = torch.empty(world, rows, heads // world, dim + lse_pack_dim(out.dtype), dtype=out.dtype)
    pack(out, lse, send)
    return unpack(send, dim)


def by_rank(tensor: torch.Tensor, world: int) -> torch.Tensor:
    return tensor.unflatten(1, (world, -1)).transpose(0, 1)


def check_codec(dtype: torch.dtype, lse_value: float, rows: int = 2, dim: int = 16) -> Callable[[Any], None]:
    def check(codec: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        out = torch.arange(1.0, rows * 4 * dim + 1).view(rows, 4, dim).to(dtype)
        lse = torch.full((rows, 4), lse_value) + torch.arange(rows).unsqueeze(1)
        got_out, got_lse = codec(out, lse, 2)
        assert torch.equal(got_out, by_rank(out, 2))
        assert torch.equal(got_lse.contiguous().view(torch.int32), by_rank(lse, 2).contiguous().view(torch.int32))

    return check


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_mutant_lanes_one_16_bit_lane_keeps_half_of_the_lse(dtype: torch.dtype) -> None:
    def one_lane(out: torch.Tensor, lse: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        high = (by_rank(lse, world).contiguous().view(torch.int32) >> 16 << 16).view(FP32)
        return by_rank(out, world), high

    killed(check_codec(dtype, 5.2578125 + 2**-20), right=right_codec, mutant=one_lane)
    check_codec(dtype, 5.25)(one_lane)  # hidden by an LSE that needs 8 bits


def test_mutant_lanes_are_counted_the_other_way_round() -> None:
    def check(lanes: Callable[[torch.dtype], int]) -> None:
        assert {dtype: lanes(dtype) * dtype.itemsize for dtype in RAW} == dict.fromkeys(RAW, 4)

    killed(check, right=lse_pack_dim, mutant=lambda dtype: 2 if dtype is FP32 else 1)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_mutant_slice_output_in_the_lanes_place(dtype: torch.dtype) -> None:
    def swapped(out: torch.Tensor, lse: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        lanes, dim = lse_pack_dim(out.dtype), out.shape[2]
        send = torch.empty(world, out.shape[0], out.shape[1] // world, dim + lanes, dtype=out.dtype)
        send[..., :lanes] = by_rank(out, world)
        send[..., lanes:] = by_rank(lse.unsqueeze(-1).contiguous().view(out.dtype), world)
        return unpack(send, dim)

    killed(check_codec(dtype, 1.5, dim=16), right=right_codec, mutant=swapped)
    check_codec(dtype, 1.5, dim=lse_pack_dim(dtype))(swapped)  # hidden by D equal to the lane count


@pytest.mark.parametrize("dtype, lse", [(FP16, 70000.0), (BF16, 5.2578125)])
def test_mutant_value_lse_assigned_by_value(dtype: torch.dtype, lse: float) -> None:
    def by_value(out: torch.Tensor, lse: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        return by_rank(out, world), by_rank(lse.to(out.dtype).float(), world)

    killed(check_codec(dtype, lse), right=right_codec, mutant=by_value)
    check_codec(FP32, lse)(by_value)  # hidden by fp32


def test_mutant_value_high_half_first() -> None:
    """Between two ranks of one program it would go unnoticed; the payload is a format."""

    def right_lanes(lse: torch.Tensor) -> torch.Tensor:
        send = torch.empty(1, 1, 1, 5, dtype=BF16)
        pack(torch.zeros(1, 1, 3, dtype=BF16), lse, send)
        return send[0, 0, 0, 3:].view(torch.int16)

    def check(lanes: Callable[[torch.Tensor], torch.Tensor]) -> None:
        bits = torch.tensor([[0x40A81234]], dtype=torch.int32)
        assert (lanes(bits.view(FP32)) & 0xFFFF).tolist() == [0x1234, 0x40A8]

    killed(check, right=right_lanes, mutant=lambda lse: right_lanes(lse).flip(0))


def test_mutant_value_16_bit_lse_read_as_32_bits() -> None:
    """local-inference-lab#339: bits 0x40A8, 0x3F80 of two heads become one fp32, 0x3F8040A8."""

    def right(lse: torch.Tensor) -> torch.Tensor:
        return right_codec(torch.zeros(1, 2, 4, dtype=BF16), lse, 1)[1][0]

    def reinterpreted(lse: torch.Tensor) -> torch.Tensor:
        return lse.view(FP32).expand(1, 2)

    def check(lse_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        assert lse_of(torch.tensor([[5.25, 1.0]], dtype=BF16)).tolist() == [[5.25, 1.0]]

    killed(check, right=right, mutant=reinterpreted)
    assert reinterpreted(torch.tensor([[5.25, 1.0]], dtype=BF16))[0, 0].item() == pytest.approx(1.00197, abs=1e-5)


def test_mutant_batch_axis_is_missing_in_the_staging() -> None:
    def one_row(out: torch.Tensor, lse: torch.Tensor, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, dim = out.shape
        send = torch.empty(world, heads // world, dim + lse_pack_dim(out.dtype), dtype=out.dtype)
        for row in range(rows):
            pack(out[row : row + 1], lse[row : row + 1], send.unsqueeze(1))
        return unpack(send.unsqueeze(1).expand(world, rows, *send.shape[1:]), dim)

    killed(check_codec(FP32, 1.0, rows=2), right=right_codec, mutant=one_row)
    check_codec(FP32, 1.0, rows=1)(one_row)  # hidden by B = 1


# ---- exchange
# ---------------------------------------------------------------------------------------------------------


class SwappedArguments(LocalDCPGroup):
    """The call site passes the send tensor where the output belongs."""

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        super().all_to_all_single(input, output)


class Poisoned(WorkspaceManager):
    """Hands out staging full of NaN."""

    def get_simultaneous(self, *specs: Any, **arguments: Any) -> list[torch.Tensor]:
        return [buffer.fill_(math.nan) for buffer in super().get_simultaneous(*specs, **arguments)]


def test_mutant_swapped_arguments() -> None:
    def check(group_class: type[LocalDCPGroup]) -> None:
        def program(group: LocalDCPGroup) -> torch.Tensor:
            mine = group_class(group.world_size, group.rank, group.meeting)
            out = torch.full((2, 4, 3), group.rank + 1.0)
            return dcp_a2a_lse_reduce(out, torch.zeros(2, 4), mine, workspace=Poisoned(), slot=SLOT)

        for merged in run_ranks(2, program):
            assert torch.equal(merged, torch.full((2, 2, 3), 1.5))

    killed(check, right=LocalDCPGroup, mutant=SwappedArguments)


@pytest.mark.parametrize(
    "mutant", ["halves averaged", "LSE ignored", "first source only", "merged over the wrong axis"]
)
def test_mutant_no_merge(mutant: str) -> None:
    mutants: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "halves averaged": lambda out, lse: (out[0] + out[1]) / 2,
        "LSE ignored": lambda out, lse: merge(out, torch.zeros_like(lse))[0],
        "first source only": lambda out, lse: out[0],
        "merged over the wrong axis": lambda out, lse: merge(out.transpose(0, 1), lse.transpose(0, 1))[0],
    }

    def check(reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        out = torch.tensor([[[[8.0]], [[1.0]]], [[[0.0]], [[5.0]]]])  # [C 2, B 2, N 1, D 1]
        lse = torch.log(torch.tensor([[[1.0], [3.0]], [[3.0], [1.0]]]))
        torch.testing.assert_close(reduce(out, lse).flatten(), torch.tensor([2.0, 2.0]))

    killed(check, right=lambda out, lse: merge(out, lse)[0], mutant=mutants[mutant])


def test_mutant_scratch_a_manager_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    reserve = WorkspaceManager._slot_storage

    @contextmanager
    def counted() -> Any:
        def counting(self: WorkspaceManager, *arguments: Any) -> torch.Tensor:
            before = self.allocations
            storage = reserve(self, *arguments)
            allocated.append(self.allocations - before)
            return storage

        with monkeypatch.context() as patch:
            patch.setattr(WorkspaceManager, "_slot_storage", counting)
            yield

    def check(manager_of_call: Callable[[dict], WorkspaceManager]) -> None:
        def program(group: LocalDCPGroup) -> None:
            kept: dict = {}
            for step in range(3):
                if step == 1 and group.rank == 0:
                    allocated.clear()
                group.meeting.barrier.wait()
                dcp_a2a_lse_reduce(
                    torch.ones(2, 4, 3), torch.zeros(2, 4), group, workspace=manager_of_call(kept), slot=SLOT
                )
                group.meeting.barrier.wait()

        with counted():
            run_ranks(2, program)
        assert len(allocated) == 4 and sum(allocated) == 0

    killed(
        check,
        right=lambda kept: kept.setdefault("manager", WorkspaceManager()),
        mutant=lambda kept: WorkspaceManager(),
    )


def test_mutant_heads_integer_division() -> None:
    def floor_division(out: torch.Tensor, lse: torch.Tensor, group: Any) -> torch.Tensor:
        mine = out.shape[1] // group.world_size
        return out[:, group.rank * mine : (group.rank + 1) * mine]  # the last two heads are nobody's

    def check(reduce: Callable[..., Any]) -> None:
        group = SimpleNamespace(world_size=4, rank=0, device_group=None)
        try:
            reduce(torch.ones(1, 6, 2), torch.zeros(1, 6), group)
        except ValueError as refused:
            assert "H=6, world_size=4" in str(refused)
        else:
            raise AssertionError("H = 6 over 4 ranks was accepted")

    killed(check, right=dcp_a2a_lse_reduce, mutant=floor_division)


def test_mutant_base_2_merged_as_base_e() -> None:
    out, lse = torch.tensor([[[[1.0]]], [[[0.0]]]]), torch.tensor([[[0.0]], [[math.log2(3.0)]]])

    def check(reduce: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        merged, whole = reduce(out, lse)
        assert merged.item() == pytest.approx(0.25) and whole.item() == pytest.approx(2.0)

    killed(check, right=lambda o, s: merge(o, s, is_lse_base_on_e=False), mutant=merge)
    assert merge(out, lse)[0].item() == pytest.approx(0.170, abs=5e-4)


# ---- empty shards
# -----------------------------------------------------------------------------------------------------


def eight_ranks(masked: bool, garbage: float) -> float:
    """World 8, three tokens: ranks 3 … 7 own no key and return LSE 0. The right answer is 1."""
    scores = [0.5, 0.2, 0.1]

    def program(group: LocalDCPGroup) -> torch.Tensor:
        full = group.rank < len(scores)
        out = torch.full((1, 8, 1), 1.0 if full else garbage)
        lse = torch.full((1, 8), scores[group.rank] if full else 0.0)
        mask = {"seq_lens": torch.tensor([int(full)]), "query_start_loc": torch.tensor([0, 1])} if masked else {}
        return dcp_a2a_lse_reduce(out, lse, group, **mask)

    return run_ranks(8, program)[5].item()


@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan])
def test_mutant_empty_shard_takes_part_with_lse_0(garbage: float) -> None:
    def check(masked: bool) -> None:
        assert eight_ranks(masked, garbage) == pytest.approx(1.0)

    killed(check, right=True, mutant=False)
    assert garbage != 0.0 or eight_ranks(False, garbage) == pytest.approx(0.443, abs=5e-4)


def test_mutant_empty_shard_multiplied_by_0() -> None:
    """A weight of 0 times NaN is NaN: the output has to be selected, not scaled."""

    def scaled(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(lse, dim=0).unsqueeze(-1)
        return (out * weights).sum(0)

    def check(reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        out = torch.tensor([[[[2.0]]], [[[math.nan]]]])
        assert reduce(out, torch.tensor([[[1.0]], [[-math.inf]]])).item() == 2.0

    killed(check, right=lambda out, lse: merge(out, lse)[0], mutant=scaled)


def test_mutant_empty_shards_without_a_guard() -> None:
    """vllm#39148: minus infinity minus minus infinity."""

    def unguarded(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        weights = torch.exp(lse - lse.amax(0)).unsqueeze(-1)
        return torch.where(weights == 0, 0.0, out * weights).sum(0) / weights.sum(0)

    def check(reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        assert reduce(torch.zeros(2, 1, 1, 1), torch.full((2, 1, 1), -math.inf)).item() == 0.0

    killed(check, right=lambda out, lse: merge(out, lse)[0], mutant=unguarded)


def test_mutant_empty_shard_with_a_finite_minus_infinity() -> None:
    """-1e30 for "no key" turns "no shard has a key" into the average of garbage."""

    def check(nothing: float) -> None:
        merged, lse = merge(torch.full((2, 1, 1, 1), 7.0), torch.full((2, 1, 1), nothing))
        assert merged.item() == 0.0 and lse.item() == -math.inf

    killed(check, right=-math.inf, mutant=-1e30)


def test_mutant_empty_shard_padding_not_masked() -> None:
    def requests_only(rows: int, seq_lens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        owner = torch.searchsorted(starts, torch.arange(rows), right=True) - 1
        return seq_lens[owner.clamp(max=len(seq_lens) - 1)] == 0

    def check(mask: Callable[..., torch.Tensor]) -> None:
        assert mask(4, torch.tensor([0, 3]), torch.tensor([0, 1, 2])).tolist() == [True, False, True, True]

    killed(check, right=empty_rows, mutant=requests_only)


def test_mutant_empty_shard_owner_of_an_empty_request() -> None:
    """Two requests start at row 1; the first of them has no row, so the second one owns it."""

    def first_owner(rows: int, seq_lens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        every = torch.arange(rows)
        owner = torch.searchsorted(starts, every, right=False)
        owner = torch.where(starts[owner.clamp(max=len(starts) - 1)] == every, owner, owner - 1)
        return (every >= starts[-1]) | (seq_lens[owner.clamp(0, len(seq_lens) - 1)] == 0)

    def check(mask: Callable[..., torch.Tensor]) -> None:
        assert mask(2, torch.tensor([5, 0, 5]), torch.tensor([0, 1, 1, 2])).tolist() == [False, False]

    killed(check, right=empty_rows, mutant=first_owner)
