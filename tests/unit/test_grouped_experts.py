"""The grouped product gives what the wide one gives: any skew, rows that belong to nobody, none at all."""

import pytest
import torch

from dbo.moe import grouped_experts
from dbo.moe.experts import FlatExperts, make_experts
from dbo.moe.grouped_experts import GroupedFlatExperts
from dbo.moe.interface import ExpertInputs

pytestmark = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")

EXPERTS, WIDTH, HIDDEN, TOP_K = 4, 32, 64, 3


def weights():
    draw = torch.Generator().manual_seed(5)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=draw) / 8
    return gate_up.bfloat16(), (torch.randn(EXPERTS, WIDTH, HIDDEN, generator=draw) / 6).bfloat16()


def inputs(ids):
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(len(ids), HIDDEN, generator=draw).bfloat16()
    x[(ids < 0).all(1)] = torch.nan
    share = torch.rand(ids.shape, generator=draw)
    return ExpertInputs(layout="flat", x=x, topk_ids=ids, topk_weights=share)


def drawn(rows, *, nobody):
    draw = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(rows)])
    return ids.masked_fill(torch.rand(ids.shape, generator=draw) < nobody, -1)


@pytest.mark.parametrize(
    "ids",
    [drawn(17, nobody=0.4), drawn(1, nobody=0.0), torch.full((5, TOP_K), -1), torch.tensor([[2, -1, -1]] * 9)],
    ids=["mixed", "one row", "nobody's", "one expert"],
)
def test_it_is_the_wide_product(ids):
    given = inputs(ids)
    found = GroupedFlatExperts(*weights()).apply(given).float()
    wanted = FlatExperts(*weights()).apply(given).float()
    assert found.shape == wanted.shape and not found.isnan().any()
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max().clamp(min=1.0)
    assert not found[(ids < 0).all(1)].any()


def test_no_rows_give_no_rows():
    given = inputs(torch.empty(0, TOP_K, dtype=torch.int64))
    assert GroupedFlatExperts(*weights()).apply(given).shape == (0, HIDDEN)


def test_a_wrong_order_is_seen(monkeypatch):
    given = inputs(drawn(17, nobody=0.4))
    wanted = FlatExperts(*weights()).apply(given).float()
    monkeypatch.setattr(grouped_experts, "_counts", lambda experts, n: torch.full((n,), len(experts) // n))
    found = GroupedFlatExperts(*weights()).apply(given).float()
    assert (found - wanted).abs().max() > 0.02 * wanted.abs().max()


def test_only_devices_in_bf16_take_it():
    gate_up, down = weights()
    assert not grouped_experts.available(gate_up)
    assert isinstance(make_experts("flat", gate_up, down), FlatExperts)
