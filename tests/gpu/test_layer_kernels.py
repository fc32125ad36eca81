"""A layer's fused kernels against plain torch: on a device where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before the first import
triton = pytest.importorskip("triton", reason="triton is not installed (extra `kernels`)")

from dbo.batch_plan import DCPLayout  # noqa: E402
from dbo.forward_context import ForwardContext, override_forward_context  # noqa: E402
from dbo.model.attention import MLAttention  # noqa: E402
from dbo.model.dcp_attention import DCPAttention  # noqa: E402
from dbo.model.paging import plan_paged_batch  # noqa: E402
from dbo.model.rope import rotation  # noqa: E402
from dbo.model.router import Router  # noqa: E402
from dbo.moe.experts import BatchedExperts, FlatExperts  # noqa: E402
from dbo.moe.grouped_experts import GroupedBatchedExperts, GroupedFlatExperts, TorchRows  # noqa: E402
from dbo.moe.interface import ExpertInputs, PartialSums  # noqa: E402
from dbo.moe.symm_copy_ops import TorchCopyRows  # noqa: E402
from gpu import attention  # noqa: E402
from gpu.kernels import copy_rows, grouped_gemm, layer_rows, mla_decode  # noqa: E402
from gpu.kernels.copy_rows import TRITON_COPY_ROWS  # noqa: E402
from gpu.kernels.expert_rows import TRITON_ROWS, own_products  # noqa: E402
from tests.gpu.layer_config import CONFIG, attention_weights  # noqa: E402

# The interpreter keeps bf16 as integers and multiplies those.
MATRIX = torch.bfloat16 if DEVICE == "cuda" else torch.float32
INTERPRETED = not isinstance(triton.language.max, triton.runtime.JITFunction)
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED,
    reason="triton was imported before this file could ask for its interpreter: test_layer_kernels_apart runs this file",
)


@pytest.fixture(autouse=True)
def working_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under the interpreter a kernel is numpy: quiet, and with loop bounds as Triton 3.6 and numpy 2.4 disagree on them."""
    if INTERPRETED:
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor, scope):
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"), torch.inference_mode():
        yield


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


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
        layout="flat", x=draw(len(ids), 48, seed=4, dtype=MATRIX), topk_ids=ids,
        topk_weights=torch.rand(ids.shape, device=DEVICE),
    )  # fmt: skip
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


PAGE = 4


def batch_of(computed: list[int], queries: list[int], *, pad: int) -> SimpleNamespace:
    """Metadata of requests with so many keys cached and so many new; blocks lie in falling order."""
    lens = [c + q for c, q in zip(computed, queries, strict=True)]
    width = max(-(-n // PAGE) for n in lens)
    table = torch.arange(len(lens) * width, 0, -1).view(len(lens), width)
    where = [(r, p) for r, (c, n) in enumerate(zip(computed, lens, strict=True)) for p in range(c, n)]
    slots = [int(table[r, p // PAGE]) * PAGE + p % PAGE for r, p in where]
    starts = [0, *np.cumsum(queries).tolist()]
    on = {"device": DEVICE}
    return SimpleNamespace(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, **on),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, **on), seq_lens_cpu=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens), dcp_layout=None, num_actual_tokens=len(where), max_query_len=max(queries),
        max_seq_len=max(lens), block_table_tensor=table.to(torch.int32).to(DEVICE),
        slot_mapping=torch.tensor(slots + [0] * pad, **on), positions=torch.tensor([p for _, p in where] + [7] * pad, **on),
    )  # fmt: skip


def by_loop(queries, keys, values, query_starts, key_starts, max_queries, max_keys, scale, lens=None):
    """`ragged_attention`, one request after another; rows behind the last stay NaN."""
    out = torch.full((*queries.shape[:2], values.shape[-1]), torch.nan, device=queries.device)
    for r in range(len(query_starts) - 1):
        q = queries[query_starts[r] : query_starts[r + 1]].transpose(0, 1)
        stop = key_starts[r + 1] if lens is None else key_starts[r] + lens[r]
        k, v = (t[key_starts[r] : stop].transpose(0, 1) for t in (keys, values))
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(k.shape[1] - q.shape[1] + 1)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        out[query_starts[r] : query_starts[r + 1]] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


def causal_by_products(queries, keys, values, scale):
    """`attention.causal`."""
    q, k, v = (t.transpose(1, 2) for t in (queries, keys, values))
    scores = (q @ k.transpose(-1, -2) * scale).float()
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype) @ v).transpose(1, 2)


BATCHES = {
    "decodes": ([9, 0, 17], [1, 1, 1]),
    "short queries": ([9, 3, 0], [1, 4, 2]),
    "nothing cached": ([0, 0], [19, 5]),
    "as long as each other": ([0, 0], [17, 17]),
    "chunks": ([6, 0, 11], [18, 17, 1]),
}


def attend_both(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    computed, queries = BATCHES[name]
    weights, metadata = attention_weights(DEVICE), batch_of(computed, queries, pad=2)
    rows = len(metadata.positions)
    hidden = draw(rows, CONFIG.hidden_size, seed=9)
    hidden[-1] = torch.nan
    inv_freq = 1.0 / 100.0 ** torch.arange(0, 1, 0.5, device=DEVICE)
    by, batch = (
        rotation(metadata.positions, inv_freq, 1.0),
        plan_paged_batch(metadata, metadata.positions, block_size=PAGE),
    )
    cache = draw(metadata.block_table_tensor.numel() + 1, PAGE, CONFIG.kv_cache_dim, seed=11)
    for r, length in enumerate(metadata.seq_lens.tolist()):  # what nobody wrote is poison
        slots = (metadata.block_table_tensor[r, :, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
        cache.view(-1, CONFIG.kv_cache_dim)[slots[length:].long()] = torch.nan
    results = []
    for kind in (MLAttention, attention.FusedMLAttention):
        layer, mine = kind(CONFIG, weights, "a"), cache.clone()
        with override_forward_context(ForwardContext(attn_metadata=metadata, kv_caches=[mine])):
            out = layer.attend(layer.project(hidden, by), mine, batch)
        results.append((out, mine.view(-1, CONFIG.kv_cache_dim)[metadata.slot_mapping[: rows - 2]]))
    (wanted, wanted_cache), (found, found_cache) = results
    assert torch.allclose(found_cache, wanted_cache, atol=1e-5)
    assert not found[rows - 2 :].any()
    return found, wanted


@pytest.mark.parametrize("name", BATCHES)
def test_attention_is_the_absorbed_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ragged_attention", by_loop)
    monkeypatch.setattr(attention, "causal", causal_by_products)
    monkeypatch.setattr(attention, "LENGTH_STEP", 4)
    found, wanted = attend_both(name)
    assert torch.allclose(found, wanted, atol=1e-4), (found - wanted).abs().max()


@pytest.mark.parametrize("programs", [1, 16, 600])
def test_keys_may_be_split(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = mla_decode.Tuning(block_keys=16, programs=programs)
    monkeypatch.setattr(
        mla_decode, "splits_for", lambda rows, heads, keys, _: 2 ** min(3, (programs // rows).bit_length())
    )
    monkeypatch.setattr(attention, "mla_decode", lambda *a, **k: mla_decode.mla_decode(*a, **k, tuning=tuning))
    found, wanted = attend_both("decodes")
    assert torch.allclose(found, wanted, atol=1e-4)


def test_a_key_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: one position off reads a row that nobody wrote, or hides one."""
    real = mla_decode.mla_decode

    def shifted(*args, positions: torch.Tensor, **more):
        return real(*args, positions=(positions - 1).clamp(min=0), **more)

    monkeypatch.setattr(attention, "mla_decode", shifted)
    found, wanted = attend_both("decodes")
    assert not torch.allclose(found, wanted, atol=1e-4)


def partials_of_a_peer(name: str, layout: DCPLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the plain and the fused attention of one DCP peer give: `[T, heads, latent]` and `[T, heads]`."""
    computed, queries = BATCHES[name]
    weights, metadata = attention_weights(DEVICE), batch_of(computed, queries, pad=2)
    metadata.dcp_layout = layout
    metadata.dcp_local_seq_lens = torch.tensor(layout.local_seq_lens(metadata.seq_lens_cpu.numpy()), device=DEVICE)
    hidden = draw(len(metadata.positions), CONFIG.hidden_size, seed=9)
    by = rotation(metadata.positions, 1.0 / 100.0 ** torch.arange(0, 1, 0.5, device=DEVICE), 1.0)
    batch = plan_paged_batch(metadata, metadata.positions, block_size=PAGE)
    cache = draw(metadata.block_table_tensor.numel() + 1, PAGE, CONFIG.kv_cache_dim, seed=11)
    rows = cache.view(-1, CONFIG.kv_cache_dim)
    for r, length in enumerate(metadata.dcp_local_seq_lens.tolist()):  # what nobody wrote here is poison
        slots = (metadata.block_table_tensor[r, :, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
        rows[slots[length:].long()] = torch.nan
    found = []
    for kind in (DCPAttention, attention.FusedDCPAttention):
        layer = kind(CONFIG, weights, "a", SimpleNamespace(size=1, rank=0))
        with override_forward_context(ForwardContext(attn_metadata=metadata, kv_caches=[cache])):
            found.append(layer.partial(layer.project(hidden, by).queries, rows, batch))
    real = sum(queries)
    assert all(out.shape == (real + 2, CONFIG.num_attention_heads, CONFIG.kv_lora_rank) for out, _ in found)
    return [(out[:real], lse[:real]) for out, lse in found]


@pytest.mark.parametrize("layout", [DCPLayout(size=2, rank=0), DCPLayout(size=2, rank=1, interleave=2)], ids=str)
@pytest.mark.parametrize("name", ["decodes", "short queries", "chunks"])
def test_a_peer_attends_to_its_own_keys(name: str, layout: DCPLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of "chunks" is beyond the fused kernel: torch's operations then."""
    monkeypatch.setattr(mla_decode, "splits_for", lambda *_: 1 if layout.rank else 2)
    (wanted, wanted_lse), (found, found_lse) = partials_of_a_peer(name, layout)
    seen = wanted_lse > -torch.inf
    assert torch.allclose(found_lse, wanted_lse, atol=1e-5) and torch.equal(found_lse > -torch.inf, seen)
    assert torch.allclose(found[seen], wanted[seen], atol=1e-5)
    assert bool(seen.all()) is (layout.rank == 0), "a request of one key leaves the other peer without any"


def test_a_key_too_many_on_a_peer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mla_decode.mla_decode

    def shifted(*args, positions: torch.Tensor, **more):
        return real(*args, positions=(positions - 1).clamp(min=0), **more)

    monkeypatch.setattr(attention, "mla_decode", shifted)
    (_, wanted), (_, found) = partials_of_a_peer("decodes", DCPLayout(size=2, rank=0))
    assert not torch.allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "keys", "splits"), [(64, 2048, 4), (512, 1024, 1), (1, 4096, 32), (1, 40, 1), (8192, 9, 1)]
)
def test_splits_fill_the_device_and_no_more(rows: int, keys: int, splits: int) -> None:
    assert mla_decode.splits_for(rows, 1, keys, mla_decode.DEFAULT) == splits


@pytest.mark.gpu(min_devices=1)
@pytest.mark.parametrize("queries", [[33, 1, 100], [64, 64, 64]])
@pytest.mark.parametrize("cached", [0, 70])
def test_torchs_flash_attention_is_the_loop(queries: list[int], cached: int) -> None:
    """Also that the last query sees all keys, and that keys behind a request's length have no part."""
    lens = [n + cached for n in queries]
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32, device=DEVICE)
    widest = max(lens) + 5
    key_starts = starts if not cached else torch.arange(0, 3 * widest + 1, widest, dtype=torch.int32, device=DEVICE)
    used = None if not cached else torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q, k = (
        draw(sum(queries), 4, 192, dtype=torch.bfloat16),
        draw(int(key_starts[-1]), 4, 192, seed=1, dtype=torch.bfloat16),
    )
    v = draw(len(k), 4, 256, seed=2, dtype=torch.bfloat16)[..., 128:]
    if used is not None:
        for r, n in enumerate(lens):
            k[r * widest + n : (r + 1) * widest] = torch.nan
            v[r * widest + n : (r + 1) * widest] = torch.nan
    given = (starts, key_starts, max(queries), max(lens), 0.07, used)
    found = attention.ragged_attention(q, k, v, *given).float()
    wanted = by_loop(q.float(), k.float(), v.float(), *given)
    assert (found - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.gpu(min_devices=1)
@pytest.mark.parametrize("lengths", [[33, 1, 300], [64, 64, 64]])
def test_torchs_cudnn_attention_is_the_products(lengths: list[int]) -> None:
    rows = sum(lengths) + 3
    q, k = draw(rows, 4, 192, dtype=torch.bfloat16), draw(rows, 4, 192, seed=1, dtype=torch.bfloat16)
    v = draw(rows, 4, 256, seed=2, dtype=torch.bfloat16)[..., 128:]
    q[-3:], k[-3:], v[-3:] = torch.nan, torch.nan, torch.nan
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)
    found = attention.fresh_attention(q, k, v, lengths, 0.07).float()[:-3]
    wanted = by_loop(q.float(), k.float(), v.float(), starts, starts, 0, 0, 0.07)[:-3]
    assert (found - wanted).norm() <= 1e-2 * wanted.norm()


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


@pytest.mark.gpu(min_devices=1)
@pytest.mark.parametrize("keys", [1, 63, 700])
def test_decode_at_the_models_size(keys: int) -> None:
    """The published latent and rope sizes in bf16, against fp32 products."""
    rows, heads, page = 9, 16, 64
    pages = -(-keys // page)
    table = (1 + torch.randperm(rows * pages).view(rows, pages)).to(torch.int32).to(DEVICE)
    cache = draw(rows * pages + 1, page, 576, dtype=torch.bfloat16)
    latent, q = (
        draw(heads, rows, 512, seed=1, dtype=torch.bfloat16),
        draw(rows, heads, 192, seed=2, dtype=torch.bfloat16),
    )
    positions = torch.arange(keys - 1, keys - 1 + rows, device=DEVICE).clamp(max=keys - 1)
    padding = torch.zeros(rows, 1, dtype=torch.bool, device=DEVICE)
    padding[-1] = True
    found = mla_decode.mla_decode(
        latent, q, cache.view(-1, 576), block_table=table, page_size=page, row_requests=torch.arange(rows, device=DEVICE),
        queries_per_request=1, positions=positions, padding_rows=padding, max_keys=keys, scale=0.07,
        lse=(lse := torch.zeros(rows, heads, device=DEVICE)),
    )  # fmt: skip
    context = cache[table.long()].flatten(1, 2)[:, :keys].float()
    whole = torch.cat((latent.transpose(0, 1), q[..., 128:]), -1).float()
    scores = whole @ context.transpose(1, 2) * 0.07
    assert torch.allclose(lse[:-1], scores.logsumexp(-1)[:-1], atol=2e-2) and bool((lse[-1] == -torch.inf).all())
    wanted = scores.softmax(-1) @ context[..., :512]
    wanted[-1] = 0
    assert (found.transpose(0, 1).float() - wanted).norm() <= 1e-2 * wanted.norm()


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
