"""Fused attention against plain torch: on a device where there is one, else under Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.gpu.kernel_harness import DEVICE, draw, runs_here, working_interpreter  # noqa: F401 - a fixture

pytestmark = runs_here  # a statement between the imports: the harness comes before whatever imports Triton

from dbo.batch.plan import DCPLayout  # noqa: E402
from dbo.model.attention import MLAttention  # noqa: E402
from dbo.model.dcp_attention import DCPAttention  # noqa: E402
from dbo.model.paging import plan_paged_batch  # noqa: E402
from dbo.model.rope import rotation  # noqa: E402
from dbo.ubatching.forward_context import ForwardContext, override_forward_context  # noqa: E402
from gpu.kernels import attention, mla_decode  # noqa: E402
from tests.gpu.layer_config import CONFIG, attention_weights  # noqa: E402

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
        seq_lens=torch.tensor(lens, dtype=torch.int32, **on),
        seq_lens_cpu=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens),
        dcp_layout=None,
        num_actual_tokens=len(where),
        max_query_len=max(queries),
        max_seq_len=max(lens),
        block_table_tensor=table.to(torch.int32).to(DEVICE),
        slot_mapping=torch.tensor(slots + [0] * pad, **on),
        positions=torch.tensor([p for _, p in where] + [7] * pad, **on),
    )


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
    tuning = mla_decode.AttentionTuning(block_keys=16, programs=programs)
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
        latent,
        q,
        cache.view(-1, 576),
        block_table=table,
        page_size=page,
        row_requests=torch.arange(rows, device=DEVICE),
        queries_per_request=1,
        positions=positions,
        padding_rows=padding,
        max_keys=keys,
        scale=0.07,
        lse=(lse := torch.zeros(rows, heads, device=DEVICE)),
    )
    context = cache[table.long()].flatten(1, 2)[:, :keys].float()
    whole = torch.cat((latent.transpose(0, 1), q[..., 128:]), -1).float()
    scores = whole @ context.transpose(1, 2) * 0.07
    assert torch.allclose(lse[:-1], scores.logsumexp(-1)[:-1], atol=2e-2) and bool((lse[-1] == -torch.inf).all())
    wanted = scores.softmax(-1) @ context[..., :512]
    wanted[-1] = 0
    assert (found.transpose(0, 1).float() - wanted).norm() <= 1e-2 * wanted.norm()
