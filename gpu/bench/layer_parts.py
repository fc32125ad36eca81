"""Needs torch and Triton. The parts of one layer as the model runs them, each beside the best that torch can do.

A part is timed against candidates that compute or move as much: cuBLAS products of the same shapes, torch's attention
kernels, and for what only moves bytes a device copy of as many. The fastest candidate is "the best".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dbo.model.config import ModelConfig
from dbo.model.layers import MLP, rms_norm
from dbo.model.paging import plan_paged_batch
from dbo.model.rope import rotation
from dbo.model.router import Router
from dbo.moe.grouped_experts import GroupedFlatExperts, TorchRows
from dbo.moe.interface import ExpertInputs
from dbo.ubatching.forward_context import ForwardContext, override_forward_context
from gpu.bench.stopwatch import Work, copy_of, in_turn, product_of
from gpu.kernels import mla_decode
from gpu.kernels.attention import FusedMLAttention, fresh_attention, ragged_attention
from gpu.kernels.expert_rows import TRITON_ROWS
from gpu.kernels.layer_rows import clear_padding_

PAGE = 64
BF16 = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's layer. `shared`: width of all shared experts together."""

    name: str
    hidden: int
    top_k: int
    width: int
    shared: int
    heads: int = 16
    experts: int = 64

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=1024,
            hidden_size=self.hidden,
            intermediate_size=self.shared,
            moe_intermediate_size=self.width,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=self.experts,
            n_shared_experts=2,
            num_experts_per_tok=self.top_k,
            max_position_embeddings=163840,
        )


@dataclass(frozen=True, kw_only=True)
class Load:
    """`requests` with `queries` new tokens each and `keys` keys after them."""

    requests: int
    queries: int
    keys: int

    @property
    def tokens(self) -> int:
        return self.requests * self.queries


LITE = Shape(name="DeepSeek-V2-Lite", hidden=2048, top_k=6, width=1408, shared=2816)
WIDE = Shape(name="synthetic 7168", hidden=7168, top_k=8, width=256, shared=512)
THIN = Shape(name="synthetic thin", hidden=7168, top_k=8, width=64, shared=128, heads=2)
LOADS = (
    Load(requests=64, queries=1, keys=2048),
    Load(requests=512, queries=1, keys=1024),
    Load(requests=2, queries=2048, keys=2048),
    Load(requests=4, queries=2048, keys=2048),
)


@dataclass(kw_only=True)
class Part:
    """What is timed.

    Attributes:
        name: in the table. ours: as the model runs it.
        best: candidates by name. also: told, but no measure of ours.
        flops, nbytes: that the part must do and move, each operand once.
        counted: part of the layer's sum; the others are told for their own sake.
    """

    name: str
    ours: Work
    best: dict[str, Work]
    flops: float
    nbytes: float
    also: dict[str, Work] = field(default_factory=dict)
    counted: bool = True


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


class Bench:
    """One layer with random weights, a batch, and a cache whose pages lie anywhere."""

    def __init__(self, shape: Shape, load: Load) -> None:
        torch.manual_seed(1)
        self.shape, self.load = shape, load
        self.config = config = shape.config()
        hidden, heads = shape.hidden, shape.heads
        near = hidden**-0.5
        self.attention = FusedMLAttention(
            config,
            {
                "a.q_proj.weight": draw(heads * config.qk_head_dim, hidden, scale=near),
                "a.kv_a_proj_with_mqa.weight": draw(config.kv_cache_dim, hidden, scale=near),
                "a.kv_a_layernorm.weight": draw(config.kv_lora_rank),
                "a.kv_b_proj.weight": draw(heads * 256, config.kv_lora_rank, scale=0.04),
                "a.o_proj.weight": draw(hidden, heads * config.v_head_dim, scale=0.02),
            },
            "a",
        )
        self.norm = draw(hidden)
        self.router = Router(config, draw(shape.experts, hidden, scale=near))
        self.gate_up = draw(shape.experts, 2 * shape.width, hidden, scale=near)
        self.down = draw(shape.experts, shape.width, hidden, scale=shape.width**-0.5)
        self.experts = GroupedFlatExperts(self.gate_up, self.down)
        self.shared = MLP(
            {
                "s.gate_up_proj.weight": draw(2 * shape.shared, hidden, scale=near),
                "s.down_proj.weight": draw(hidden, shape.shared, scale=shape.shared**-0.5),
            },
            "s",
        )
        self.x = draw(load.tokens, hidden)
        self.metadata = metadata_of(load)
        pages = self.metadata.block_table_tensor.numel() + 1
        self.cache = draw(pages, PAGE, config.kv_cache_dim)
        positions = self.metadata.positions
        self.batch = plan_paged_batch(self.metadata, positions, block_size=PAGE)
        self.by = rotation(positions, 1e-4 ** torch.arange(0, 1, 1 / 32, device="cuda"), 1.0)
        self.projected = self.attention.project(self.x, self.by)
        self.routing = self.router(self.x, self.batch.padding_rows)

    def layer(self) -> Tensor:
        """The whole layer, as `DecoderLayer` runs it without an exchange."""
        with override_forward_context(ForwardContext(attn_metadata=self.metadata, kv_caches=[self.cache])):
            projected = self.attention.project(rms_norm(self.x, self.norm, 1e-6), self.by)
            residual = self.x + self.attention.attend(projected, self.cache, self.batch)
        hidden = rms_norm(residual, self.norm, 1e-6)
        weights, ids = self.router(hidden, self.batch.padding_rows)
        routed = self.experts.apply(ExpertInputs(layout="flat", x=hidden, topk_ids=ids, topk_weights=weights))
        return residual + (routed + self.shared(hidden))

    def parts(self) -> Iterator[Part]:
        yield self._norms()
        yield self._projection()
        yield from self._decode() if self.load.queries == 1 else self._prefill()
        yield self._out()
        yield self._gate()
        yield from self._routed()
        yield self._shared()
        yield self._residuals()

    def _norms(self) -> Part:
        x, weight = self.x, self.norm
        nbytes = 2 * x.nbytes
        fused = partial(functional.rms_norm, x, (x.shape[1],), weight, 1e-6)
        ours = partial(rms_norm, x, weight, 1e-6)
        return Part(
            name="norms (2)",
            ours=in_turn(ours, ours),
            best={"copy": in_turn(copy_of(nbytes), copy_of(nbytes))},
            also={"torch rms_norm": in_turn(fused, fused)},
            flops=0,
            nbytes=2 * nbytes,
        )

    def _projection(self) -> Part:
        rows, hidden = self.x.shape
        columns = self.shape.heads * self.config.qk_head_dim + self.config.kv_cache_dim
        return Part(
            name="qkv projection",
            ours=partial(self.attention.project, self.x, self.by),
            best={"cuBLAS": product_of(rows, hidden, columns)},
            flops=2 * rows * hidden * columns,
            nbytes=BF16 * (rows * (hidden + columns) + hidden * columns),
        )

    def _decode(self) -> Iterator[Part]:
        config, load, heads = self.config, self.load, self.shape.heads
        rows, latent, nope = load.tokens, config.kv_lora_rank, config.qk_nope_head_dim
        queries, attention, meta = self.projected.queries, self.attention, self.metadata
        q_nope = queries[..., :nope].transpose(0, 1)
        absorbed = torch.bmm(q_nope, attention.key_up)
        mixed = torch.randn_like(absorbed)

        def absorb() -> None:
            torch.bmm(q_nope, attention.key_up)
            torch.bmm(mixed, attention.value_up.transpose(1, 2))

        yield Part(
            name="latent products",
            ours=absorb,
            best={
                "cuBLAS": in_turn(
                    product_of(rows, nope, latent, batch=heads), product_of(rows, latent, nope, batch=heads)
                )
            },
            flops=4 * rows * heads * nope * latent,
            nbytes=BF16 * 2 * heads * (rows + latent) * (nope + latent),
        )
        cached = self.cache.view(-1, config.kv_cache_dim)
        core = partial(
            mla_decode.mla_decode,
            absorbed,
            queries,
            cached,
            block_table=meta.block_table_tensor,
            page_size=PAGE,
            row_requests=self.batch.row_queries,
            queries_per_request=1,
            positions=meta.positions,
            padding_rows=self.batch.padding_rows,
            max_keys=load.keys,
            scale=attention.scale,
        )
        # Heads as queries of one head: torch's own kernels need no copy of the keys then.
        q = torch.cat((absorbed.transpose(0, 1), queries[..., nope:]), -1)[:, None]

        def gathered() -> tuple[Tensor, Tensor]:
            keys = cached.index_select(0, self.batch.context_slots).view(load.requests, 1, load.keys, -1)
            return keys, keys[..., :latent]

        def sdpa() -> Tensor:
            keys, values = gathered()
            return functional.scaled_dot_product_attention(q, keys, values, scale=attention.scale)

        def products() -> Tensor:
            keys, values = gathered()
            scores = (q @ keys.transpose(-1, -2)).float() * attention.scale
            return scores.softmax(-1).to(keys.dtype) @ values

        nbytes = BF16 * load.requests * load.keys * config.kv_cache_dim
        yield Part(
            name="attention core (absorbed)",
            ours=core,
            best={"SDPA, gathered": sdpa, "products, gathered": products, "copy": copy_of(nbytes)},
            flops=2 * rows * heads * load.keys * (config.kv_cache_dim + latent),
            nbytes=nbytes,
        )

    def _prefill(self) -> Iterator[Part]:
        config, load, heads = self.config, self.load, self.shape.heads
        rows, latent, starts = load.tokens, config.kv_lora_rank, self.metadata.query_start_loc
        both = heads * (config.qk_nope_head_dim + config.v_head_dim)
        attention, latents, queries = self.attention, self.projected.latents, self.projected.queries
        keys, values = attention.expand(latents)
        moved = BF16 * rows * heads * (config.qk_nope_head_dim + config.qk_head_dim)
        yield Part(
            name="expand keys and values",
            ours=partial(attention.expand, latents),
            best={"cuBLAS + copy": in_turn(product_of(rows, latent, both), copy_of(moved))},
            flops=2 * rows * latent * both,
            nbytes=BF16 * (rows * (latent + both) + latent * both) + moved,
        )

        def flash(q: Tensor, k: Tensor, v: Tensor) -> Work:
            op = torch.ops.aten._scaled_dot_product_flash_attention
            q, k, v = (t.view(load.requests, load.queries, heads, -1).transpose(1, 2) for t in (q, k, v))
            return lambda: op(q, k, v, 0.0, True, False, scale=attention.scale)

        lengths = [load.queries] * load.requests
        # 160 = (192 + 128) / 2: one head size with as many operations.
        same = [draw(rows, heads, 160) for _ in range(3)]
        pairs = load.requests * load.queries * (load.queries + 1) / 2
        yield Part(
            name="attention core (expanded)",
            ours=partial(fresh_attention, queries, keys, values, lengths, attention.scale),
            best={
                "cuDNN, equal FLOPs": partial(fresh_attention, same[0], same[1], same[2], lengths, attention.scale),
                "flash, equal FLOPs": flash(*same),
            },
            also={
                "ours in a graph (flash)": partial(
                    ragged_attention, queries, keys, values, starts, starts, load.queries, load.queries, attention.scale
                )
            },
            flops=2 * heads * pairs * (config.qk_head_dim + config.v_head_dim),
            nbytes=BF16 * rows * heads * 2 * (config.qk_head_dim + config.v_head_dim),
        )

    def _out(self) -> Part:
        rows, inner = self.load.tokens, self.shape.heads * self.config.v_head_dim
        values, weight = draw(rows, inner), self.attention.w["o_proj.weight"]

        def ours() -> Tensor:
            if self.load.queries == 1:  # the decode kernel leaves 0 in padding rows
                return values @ weight.t()
            return clear_padding_(values, self.batch.padding_rows) @ weight.t()

        return Part(
            name="out projection",
            ours=ours,
            best={"cuBLAS": product_of(rows, inner, self.shape.hidden)},
            flops=2 * rows * inner * self.shape.hidden,
            nbytes=BF16 * (rows * (inner + self.shape.hidden) + inner * self.shape.hidden),
        )

    def _gate(self) -> Part:
        x, weight, shape = self.x, self.router.weight, self.shape

        def by_torch() -> Any:
            logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return logits.softmax(-1).topk(shape.top_k, dim=-1)

        nbytes = x.nbytes + weight.nbytes + x.shape[0] * shape.experts * 8
        return Part(
            name="gate",
            ours=partial(self.router, x, self.batch.padding_rows),
            best={"cuBLAS, softmax, topk": by_torch},
            also={"copy": copy_of(nbytes)},
            flops=2 * x.shape[0] * x.shape[1] * shape.experts,
            nbytes=nbytes,
        )

    def _routed(self) -> Iterator[Part]:
        shape, moves = self.shape, self.experts.moves
        weights, ids = self.routing
        places, ends = moves.order(ids, shape.experts)
        rows = moves.spread(self.x, places)
        pairs = rows.shape[0]
        active = moves.gate_up(rows, self.gate_up, ends)
        out = moves.down(active, self.down, ends)
        nbytes = self.x.nbytes + rows.nbytes
        yield Part(
            name="order of rows",
            ours=partial(moves.order, ids, shape.experts),
            best={"sort": partial(TorchRows().order, ids, shape.experts)},
            flops=0,
            nbytes=12 * pairs,
        )
        yield Part(
            name="rows to experts",
            ours=partial(moves.spread, self.x, places),
            best={"copy": copy_of(nbytes)},
            flops=0,
            nbytes=nbytes,
        )
        yield self._products(rows, active, ends)
        yield Part(
            name="rows back",
            ours=partial(moves.gather, out, places, weights),
            best={"copy": copy_of(nbytes)},
            flops=0,
            nbytes=nbytes,
        )

    def _products(self, rows: Tensor, active: Tensor, ends: Tensor) -> Part:
        shape, moves, pairs = self.shape, self.experts.moves, rows.shape[0]
        each, moved = -(-pairs // shape.experts), 3 * active.nbytes

        def three(rows: int, batch: int | None) -> Work:
            """Both products by cuBLAS, and what the activation would move between them."""
            first = product_of(rows, shape.hidden, 2 * shape.width, batch=batch)
            return in_turn(first, copy_of(moved), product_of(rows, shape.width, shape.hidden, batch=batch))

        def grouped() -> Tensor:
            both = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
            return torch._grouped_mm(TRITON_ROWS.activate(both, ends), self.down, offs=ends)

        batched, dense = {"cuBLAS batched, even": three(each, shape.experts)}, {"cuBLAS dense": three(pairs, None)}
        # One matrix for all rows spares the reading of the other experts', which counts while rows are few.
        dense_is_fair = each >= 128
        return Part(
            name="expert products",
            ours=lambda: moves.down(moves.gate_up(rows, self.gate_up, ends), self.down, ends),
            best={**batched, "torch grouped": grouped, **(dense if dense_is_fair else {})},
            also={} if dense_is_fair else dense,
            flops=6 * pairs * shape.hidden * shape.width,
            nbytes=BF16 * shape.hidden * (3 * min(shape.experts, pairs) * shape.width + 2 * pairs) + 2 * active.nbytes,
        )

    def _shared(self) -> Part:
        rows, hidden, width = self.load.tokens, self.shape.hidden, self.shape.shared
        moved = BF16 * rows * 3 * width
        return Part(
            name="shared experts",
            ours=partial(self.shared, self.x),
            best={
                "cuBLAS + copy": in_turn(
                    product_of(rows, hidden, 2 * width), copy_of(moved), product_of(rows, width, hidden)
                )
            },
            flops=6 * rows * hidden * width,
            nbytes=BF16 * (3 * hidden * width + rows * 2 * hidden) + 2 * moved,
        )

    def _residuals(self) -> Part:
        x, y = self.x, draw(*self.x.shape)
        nbytes = 3 * x.nbytes
        return Part(
            name="residual sums (3)",
            ours=in_turn(*[partial(torch.add, x, y)] * 3),
            best={"copy": in_turn(*[copy_of(nbytes)] * 3)},
            flops=0,
            nbytes=3 * nbytes,
        )


def metadata_of(load: Load) -> Any:
    """What attention reads of a batch, pages in random order, no padding."""
    pages = -(-load.keys // PAGE)
    table = 1 + torch.randperm(load.requests * pages, device="cuda").view(load.requests, pages)
    positions = torch.arange(load.keys - load.queries, load.keys, device="cuda").repeat(load.requests)
    request = torch.arange(load.requests, device="cuda").repeat_interleave(load.queries)
    starts = torch.arange(0, load.tokens + 1, load.queries, dtype=torch.int32)
    lens = torch.full((load.requests,), load.keys, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=starts.cuda(),
        query_start_loc_cpu=starts,
        seq_lens=lens.cuda(),
        seq_lens_cpu=lens,
        num_reqs=load.requests,
        dcp_layout=None,
        num_actual_tokens=load.tokens,
        max_query_len=load.queries,
        max_seq_len=load.keys,
        block_table_tensor=table.to(torch.int32),
        positions=positions,
        slot_mapping=table[request, positions // PAGE] * PAGE + positions % PAGE,
    )
