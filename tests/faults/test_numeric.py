"""Wrong numbers in the merge of partial attention. The reference is float64. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dbo.dcp import dcp_a2a_lse_reduce, lse_pack_dim, merge, pack, unpack
from dbo.dcp.local import LocalDCPGroup, run_ranks
from dbo.dcp.oracle import merge_float64
from dbo.trace import Trace
from sim.world import SimWorld
from tests.faults.pair import Pair, check_pair, run

Merge = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def compared(name: str, got: torch.Tensor, want: torch.Tensor, reference: str, *, limit: float = 1e-6) -> Trace:
    """One comparison as a trace; equal infinities differ by nothing."""
    difference = torch.where(got.double() == want.double(), 0.0, (got.double() - want.double()).abs())

    def program(world: SimWorld) -> None:
        world.trace.host("numeric", name=name, error=float(difference.max()), limit=limit, reference=reference)

    return run(program)


def merged_by(how: Merge, out: torch.Tensor, lse: torch.Tensor, *, base_on_e: bool = True) -> Trace:
    """Output and LSE of a merge beside those of the float64 reference."""
    got, want = how(out, lse), merge_float64(out, lse, base_on_e)
    return compared(
        "merged output and LSE",
        torch.cat([got[0].flatten(), got[1].flatten()]),
        torch.cat([want[0].flatten(), want[1].flatten()]),
        "float64 merge in the producer's base",
    )


# -- base 2: vllm#47079 -----------------------------------------------------------------------------------------------

QUARTERS = torch.tensor([[[[1.0]]], [[[0.0]]]]), torch.tensor([[[0.0]], [[math.log2(3.0)]]])
"""Outputs [1, 0] with base-2 LSE [0, 1.585]: weights .25 and .75."""


def as_base_2(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return merge(out, lse, is_lse_base_on_e=False)


# -- ranks without a key: vllm#38416 ----------------------------------------------------------------------------------

SCORES = (0.5, 0.2, 0.1)


def short_prompt(*, masked: bool, garbage: float = 0.0) -> torch.Tensor:
    """DCP 8, three tokens: ranks 3 to 7 own no key, their kernels return LSE 0 and `garbage`."""

    def program(group: LocalDCPGroup) -> torch.Tensor:
        full = group.rank < len(SCORES)
        out = torch.full((1, 8, 1), 1.0 if full else garbage)
        lse = torch.full((1, 8), SCORES[group.rank] if full else 0.0)
        mask = {"seq_lens": torch.tensor([int(full)]), "query_start_loc": torch.tensor([0, 1])} if masked else {}
        return dcp_a2a_lse_reduce(out, lse, group, **mask)  # type: ignore[return-value]

    return torch.stack(run_ranks(8, program)).flatten()


# -- two parts without a key: vllm#39148 ------------------------------------------------------------------------------

BOTH_EMPTY = torch.zeros(2, 1, 1, 1), torch.full((2, 1, 1), -math.inf)


def unguarded(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus infinity minus minus infinity."""
    weights = torch.exp(lse - lse.amax(0))
    return (out * weights.unsqueeze(-1)).sum(0) / weights.sum(0).unsqueeze(-1), lse.amax(0) + weights.sum(0).log()


def finite_stand_in(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No key is a very small LSE: parts without a key are averaged."""
    return unguarded(out, lse.clamp(min=-1e30))


# -- a 16-bit LSE: lil#339 --------------------------------------------------------------------------------------------

TWO_HEADS = torch.tensor([[5.25, 1.0]], dtype=torch.bfloat16)


def through_the_payload(lse: torch.Tensor) -> torch.Tensor:
    """What the receiver reads of an LSE `[B, H]`."""
    out = torch.zeros(*lse.shape, 4, dtype=torch.bfloat16)
    send = torch.empty(1, *lse.shape, 4 + lse_pack_dim(out.dtype), dtype=out.dtype)
    pack(out, lse, send)
    return unpack(send, 4)[1][0]


def read_as_one_number(lse: torch.Tensor) -> torch.Tensor:
    """The bits are reinterpreted without widening: two neighbouring heads become one fp32."""
    return through_the_payload(lse.view(torch.float32).expand(lse.shape).contiguous())


PAIRS = [
    Pair(
        case="vllm-project/vllm#47079",
        id="numeric",
        uses="dbo.dcp.merge",
        buggy=lambda: merged_by(merge, *QUARTERS, base_on_e=False),
        fixed=lambda: merged_by(as_base_2, *QUARTERS, base_on_e=False),
        culprit={"rank": 0},
        says=("merged output and LSE",),
    ),
    Pair(
        case="vllm-project/vllm#38416",
        id="numeric",
        uses="dbo.dcp.dcp_a2a_lse_reduce",
        buggy=lambda: compared("output", short_prompt(masked=False), torch.ones(8), "ranks with keys only"),
        fixed=lambda: compared("output", short_prompt(masked=True), torch.ones(8), "ranks with keys only"),
        culprit={"rank": 0},
        says=("off by 0.557",),
    ),
    Pair(
        case="vllm-project/vllm#39148",
        id="numeric",
        uses="dbo.dcp.merge",
        buggy=lambda: merged_by(unguarded, *BOTH_EMPTY),
        fixed=lambda: merged_by(merge, *BOTH_EMPTY),
        culprit={"rank": 0},
        says=("off by nan",),
    ),
    Pair(
        case="vllm-project/vllm#39148",
        name="finite",
        id="numeric",
        uses="dbo.dcp.merge",
        buggy=lambda: merged_by(finite_stand_in, BOTH_EMPTY[0] + 7.0, BOTH_EMPTY[1]),
        fixed=lambda: merged_by(merge, BOTH_EMPTY[0] + 7.0, BOTH_EMPTY[1]),
        culprit={"rank": 0},
        says=("off by inf",),
    ),
    Pair(
        case="local-inference-lab/vllm#339",
        id="numeric",
        uses="dbo.dcp.pack",
        buggy=lambda: compared("LSE", read_as_one_number(TWO_HEADS), TWO_HEADS, "the values sent", limit=0.0),
        fixed=lambda: compared("LSE", through_the_payload(TWO_HEADS), TWO_HEADS, "the values sent", limit=0.0),
        culprit={"rank": 0},
        says=("off by 4.25",),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


def test_the_base_is_a_property_of_the_producer() -> None:
    out, lse_2 = QUARTERS
    in_2, in_e = merge(out, lse_2, is_lse_base_on_e=False), merge(out, lse_2 * math.log(2.0))
    assert in_2[0].item() == pytest.approx(0.25) and in_e[0].item() == pytest.approx(0.25)
    assert in_2[1].item() * math.log(2.0) == pytest.approx(in_e[1].item())
    assert merge(out, lse_2)[0].item() == pytest.approx(0.170, abs=5e-4)


@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan])
def test_an_empty_shard_counts_for_nothing_whatever_it_holds(garbage: float) -> None:
    assert torch.equal(short_prompt(masked=True, garbage=garbage), torch.ones(8))
    if garbage == 0.0:
        assert short_prompt(masked=False)[0].item() == pytest.approx(0.443, abs=5e-4)


def test_two_empty_parts_and_then_a_real_one_give_the_real_one() -> None:
    nothing, lse = merge(*BOTH_EMPTY)
    assert nothing.item() == 0.0 and lse.item() == -math.inf
    out, total = merge(torch.stack([nothing, torch.full((1, 1, 1), 3.0)]), torch.stack([lse, torch.full((1, 1), 0.5)]))
    assert (out.item(), total.item()) == (3.0, 0.5)


def test_two_heads_read_as_one_number() -> None:
    assert read_as_one_number(TWO_HEADS)[0].tolist() == pytest.approx([1.00197, 1.00197], abs=1e-5)
    assert {d: lse_pack_dim(d) for d in (torch.float32, torch.bfloat16, torch.float16)} == {
        torch.float32: 1,
        torch.bfloat16: 2,
        torch.float16: 2,
    }


@pytest.mark.parametrize("bits", [-0x800000, 0x7FC12345, 0, 1, 0x461C4000, 0x00400000])
def test_fp32_bits_survive_the_payload(bits: int) -> None:
    """-inf, a NaN with payload, 0, two denormals, 1e4."""
    lse = torch.tensor([[bits, bits]], dtype=torch.int32).view(torch.float32)
    assert through_the_payload(lse).contiguous().view(torch.int32).tolist() == [[bits, bits]]
