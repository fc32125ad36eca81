"""A layer's fused kernels against plain torch: on a device where there is one, else under Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.gpu.kernel_harness import DEVICE, draw, runs_here, working_interpreter  # noqa: F401 - a fixture

pytestmark = runs_here  # a statement between the imports: the harness comes before whatever imports Triton

from dbo.model.router import Router  # noqa: E402
from dbo.moe.experts import BatchedExperts, FlatExperts  # noqa: E402
from dbo.moe.grouped_experts import GroupedBatchedExperts, GroupedFlatExperts, TorchRows  # noqa: E402
from dbo.moe.interface import ExpertInputs, PartialSums  # noqa: E402
from dbo.moe.symm_copy_ops import TorchCopyRows  # noqa: E402
from gpu.kernels import copy_rows, grouped_gemm, layer_rows  # noqa: E402
from gpu.kernels.copy_rows import TRITON_COPY_ROWS  # noqa: E402
from gpu.kernels.expert_rows import TRITON_ROWS, own_products  # noqa: E402

# The interpreter keeps bf16 as integers and multiplies those.
MATRIX = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def ids_of(rows: int, top_k: int, experts: int, *, nobody: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(max(experts, top_k), generator=generator)[:top_k] for _ in range(rows)])
    return ids.masked_fill((torch.rand(ids.shape, generator=generator) < nobody) | (ids >= experts), -1).to(DEVICE)


ROUTINGS = {
    "mixed": (ids_of(37, 3, 5, nobody=0.4), 5),
    "several blocks": (ids_of(200, 4, 64, nobody=0.1), 64),
    "one row": (ids_of(1, 2, 4, nobody=0.0), 4),
    "nobody's": (torch.full((5, 3), -1, device=DEVICE), 4),
    "one expert": (torch.tensor([[2, -1, -1]] * 19, device=DEVICE), 4),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_are_ordered_as_by_a_stable_sort(name: str) -> None:
    ids, experts = ROUTINGS[name]
    found, wanted = TRITON_ROWS.order(ids, experts), TorchRows().order(ids, experts)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_go_to_their_experts_and_back(name: str) -> None:
    ids, experts = ROUTINGS[name]
    weights, x = torch.rand(ids.shape, device=DEVICE), draw(len(ids), 96, seed=3)
    x[(ids < 0).all(1)] = torch.nan
    weights[ids < 0] = torch.nan
    places, ends = TRITON_ROWS.order(ids, experts)
    valid = int(ends[-1])
    rows = TRITON_ROWS.spread(x, places)
    assert torch.equal(rows[:valid], TorchRows().spread(x, places)[:valid])
    rows[valid:] = torch.nan
    back = TRITON_ROWS.gather(rows, places, weights)
    share = weights.nan_to_num() * (ids >= 0)
    wanted = x.nan_to_num() * share.sum(1, keepdim=True)
    assert torch.allclose(back, wanted, atol=1e-6)


@pytest.mark.parametrize("width", [16, 130, 256])
def test_activation_stops_at_the_last_end(width: int) -> None:
    gate_up = draw(21, 2 * width, dtype=torch.bfloat16)
    wanted = torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]
    found = TRITON_ROWS.activate(gate_up, None)
    assert torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=1e-4)  # the interpreter truncates
    ends = torch.tensor([3, 9], dtype=torch.int32, device=DEVICE)
    assert torch.equal(TRITON_ROWS.activate(gate_up, ends)[:9], found[:9])


def test_experts_with_moved_rows_are_the_wide_product() -> None:
    ids, experts = ROUTINGS["mixed"]
    gate_up = draw(experts, 64, 48, seed=1, dtype=MATRIX) / 8
    down = draw(experts, 32, 48, seed=2, dtype=MATRIX) / 6
    given = ExpertInputs(
        layout="flat",
        x=draw(len(ids), 48, seed=4, dtype=MATRIX),
        topk_ids=ids,
        topk_weights=torch.rand(ids.shape, device=DEVICE),
    )
    wanted = FlatExperts(gate_up, down).apply(given).float()
    found = GroupedFlatExperts(gate_up, down, TRITON_ROWS).apply(given).float()
    assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()


TILES = {
    "low": grouped_gemm.Tile(rows=16, columns=32, depth=32, num_warps=4, num_stages=2),
    "high": grouped_gemm.Tile(rows=64, columns=64, depth=64, num_warps=4, num_stages=2),
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_products_of_groups(name: str, tile: str) -> None:
    """Also where neither width nor depth is a multiple of the tile, and rows that are nobody's hold NaN."""
    ids, experts = ROUTINGS[name]
    hidden, width = 72, 40
    weights = draw(experts, 2 * width, hidden, seed=1, dtype=MATRIX) / 8
    down = draw(experts, width, hidden, seed=2, dtype=MATRIX) / 6
    rows = draw(ids.numel(), hidden, seed=3, dtype=MATRIX)
    _, ends = TRITON_ROWS.order(ids, experts)
    valid = int(ends[-1])
    rows[valid:] = torch.nan
    plain = TorchRows()
    wanted = plain.gate_up(rows, weights, ends)
    active = grouped_gemm.gate_up(rows, weights, ends, TILES[tile])
    assert torch.allclose(active[:valid].float(), wanted[:valid].float(), rtol=4e-2, atol=2e-2)
    wanted = plain.down(active, down, ends)
    found = grouped_gemm.down(active, down, ends, TILES[tile])
    assert torch.allclose(found[:valid].float(), wanted[:valid].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("counts", [[0, 5, 20, 1], [20, 20, 20, 20], [0, 0, 0, 0]])
def test_slots_that_are_not_taken_have_no_part(counts: list[int]) -> None:
    gate_up, down = draw(4, 64, 48, seed=1, dtype=MATRIX) / 8, draw(4, 32, 48, seed=2, dtype=MATRIX) / 6
    x = draw(4, 20, 48, seed=4, dtype=MATRIX)
    wanted = BatchedExperts(gate_up, down).apply(ExpertInputs(layout="batched", x=x.clone()))
    for expert, count in enumerate(counts):
        x[expert, count:] = torch.nan
    given = ExpertInputs(layout="batched", x=x, counts=torch.tensor(counts, device=DEVICE))
    found = GroupedBatchedExperts(gate_up, down, TRITON_ROWS).apply(given)
    for expert, count in enumerate(counts):
        mine, theirs = found[expert, :count].float(), wanted[expert, :count].float()
        assert torch.allclose(mine, theirs, rtol=2e-2, atol=2e-2)


def test_tiles_are_as_high_as_rows_are_many() -> None:
    assert [grouped_gemm.tile_rows(64 * each, 64) for each in (0, 6, 12, 13, 48, 96, 97, 768)] == [16] * 3 + [
        64
    ] * 3 + [128] * 2


def test_torch_multiplies_for_many_rows_of_narrow_experts() -> None:
    assert own_products(96 * 64, 64, 256) and own_products(1000 * 64, 64, 1408)
    assert not own_products(97 * 64, 64, 256)


def test_padding_rows_become_zero_and_no_others() -> None:
    x, padding = draw(70, 200), torch.zeros(70, 1, dtype=torch.bool, device=DEVICE)
    padding[[3, 68, 69]] = True
    x[69] = torch.nan
    wanted = x.masked_fill(padding, 0.0)
    assert torch.equal(layer_rows.clear_padding_(x, padding), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype) -> None:
    x, weight = draw(7, 3, 200, dtype=dtype), draw(100, seed=1, dtype=dtype)
    wide = x.float()[..., :100]
    wanted = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    found = layer_rows.rms_norm(x[..., :100], weight, 1e-6)
    assert torch.allclose(found.float(), wanted.float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_routing_is_the_routers() -> None:
    config = SimpleNamespace(
        num_experts_per_tok=3, n_group=1, topk_group=1, topk_method="greedy", routed_scaling_factor=1.5
    )
    hidden, weight = draw(9, 32), draw(12, 32, seed=1)
    padding = torch.zeros(9, 1, dtype=torch.bool, device=DEVICE)
    padding[7:] = True
    hidden[8] = torch.nan
    wanted = Router(config, weight)(hidden, padding)
    found = layer_rows.route(hidden @ weight.t(), padding, 3, 1.5)
    assert torch.equal(found[1], wanted[1]) and torch.allclose(found[0], wanted[0], atol=1e-6)


@pytest.mark.gpu(min_devices=1)
def test_captured_experts_follow_the_routing() -> None:
    """One graph, three routings, one of them with nobody: what eager gives."""
    gate_up = draw(8, 256, 128, seed=1, dtype=torch.bfloat16) / 8
    down = draw(8, 128, 128, seed=2, dtype=torch.bfloat16) / 6
    experts = GroupedFlatExperts(gate_up, down)
    assert experts.moves is TRITON_ROWS
    ids, share = ids_of(70, 4, 8, nobody=0.2), torch.rand(70, 4, device=DEVICE)
    x = draw(70, 128, seed=4, dtype=torch.bfloat16)
    given = ExpertInputs(layout="flat", x=x, topk_ids=ids, topk_weights=share)
    experts.apply(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts.apply(given)
    for other in (ids_of(70, 4, 8, nobody=0.7), torch.full_like(ids, -1), (ids + 3) % 8):
        ids.copy_(other)
        graph.replay()
        wanted = FlatExperts(gate_up, down).apply(given)
        assert torch.equal(out, experts.apply(given))
        assert (out.float() - wanted.float()).abs().max() <= 0.02 * wanted.abs().max().clamp(min=1.0)


# -- around the copies of backend symm_copy -----------------------------------------------------------------------


def routed(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=drawn).argsort(-1)[:, :top_k]
    ids[::5] = -1  # padding
    return torch.rand(tokens, top_k, generator=drawn).to(DEVICE), ids.to(DEVICE)


@pytest.mark.parametrize(("tokens", "ranks", "top_k"), [(0, 2, 2), (1, 2, 3), (77, 3, 2), (65, 8, 6)])
def test_tokens_are_routed_to_their_peers_and_unpacked_there(tokens: int, ranks: int, top_k: int) -> None:
    local = 4
    weights, ids = routed(tokens, ranks * local, top_k)
    routing, places = TRITON_COPY_ROWS.route(weights, ids, ranks, local)
    wanted, wanted_places = TorchCopyRows().route(weights, ids, ranks, local)
    assert torch.equal(routing, wanted) and torch.equal(places, wanted_places)
    for rank in range(ranks):
        mine, theirs = (rows.unpack(wanted, rank * local, local) for rows in (TRITON_COPY_ROWS, TorchCopyRows()))
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
        owned = (ids // local == rank) & (ids >= 0)
        assert torch.equal(mine[0] >= 0, owned) and torch.equal(places[rank] >= 0, owned.any(-1))


@pytest.mark.parametrize(("tokens", "ranks", "hidden"), [(0, 2, 8), (5, 1, 40), (9, 2, 2049), (7, 8, 16), (6, 9, 16)])
def test_partial_sums_are_added_in_order_of_rank_and_strangers_left_out(tokens: int, ranks: int, hidden: int) -> None:
    weights, ids = routed(tokens, ranks * 4, min(3, ranks))
    _, places = TorchCopyRows().route(weights, ids, ranks, 4)
    blocks = [draw(tokens, hidden, seed=rank) for rank in range(ranks)]
    for block, at in zip(blocks, places, strict=True):
        block[at < 0] = float("nan")  # rows that this rank did not ask for
    combined = TRITON_COPY_ROWS.reduce(blocks, places)
    assert torch.equal(combined, TorchCopyRows().reduce(blocks, places))
    expected = sum(
        (block.double().nan_to_num() for block in blocks),
        torch.zeros(tokens, hidden, dtype=torch.double, device=DEVICE),
    )
    torch.testing.assert_close(combined.double(), expected)
    partial = PartialSums(blocks=tuple(blocks), places=places, reduce=TorchCopyRows().reduce)
    assert copy_rows.adds_partial(partial) == (ranks <= 8)
    if ranks <= 8:
        residual, shared = draw(tokens, hidden, seed=98), draw(tokens, hidden, seed=99)
        found = copy_rows.add_partial_sums(residual, partial, shared)
        assert torch.equal(found, residual + (combined + shared))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("hidden", [48, 64])
def test_a_product_may_take_rows_from_where_they_are(tile: str, hidden: int) -> None:
    """The same bits as with rows copied to their places first; K 2, so most rows are taken twice."""
    weights = draw(3, 40, hidden, seed=1, dtype=MATRIX) / 8
    x = draw(23, hidden, dtype=MATRIX)
    _, ids = routed(23, 6, 2)
    places, ends = TRITON_ROWS.order(ids.masked_fill(ids >= 3, -1), 3)
    used = int(ends[-1])
    assert 0 < used < ids.numel()
    wanted = grouped_gemm.gate_up(TRITON_ROWS.spread(x, places), weights, ends, TILES[tile])[:used]
    found = grouped_gemm.gathered_gate_up(x, TRITON_ROWS.sources(places), weights, ends, TILES[tile])[:used]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("hidden", [64, 100, 4097])
def test_sums_are_fused_without_changing_a_bit(rows: int, hidden: int) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    a, b, c = (draw(rows, hidden, seed=seed, dtype=dtype) for seed in range(3))
    assert torch.equal(layer_rows.add_three(a, b, c), a + (b + c))
    weight = 1 + draw(hidden, seed=3, dtype=dtype) / 8
    total, normed = layer_rows.add_rms_norm(a, b, weight, 1e-6)
    assert torch.equal(total, a + b) and torch.equal(normed, layer_rows.rms_norm(a + b, weight, 1e-6))


def test_nothing_at_all_can_be_gated() -> None:
    """A rank whose experts nobody has chosen: no row, but experts and widths."""
    assert layer_rows.gated(draw(0, 4, 32)).shape == (0, 4, 16)
