"""Needs torch. The batch of `dbo bench moe`: prompts or decodes of one rank, whole and cut, its caches, its routing.

What a step computes once for all layers (indices of paged attention, rotations) is made beforehand: the benchmark times
layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbo.batch.attention_metadata import CommonAttentionMetadata, from_plan
from dbo.batch.plan import BatchPlan
from dbo.batch.slicing import maybe_create_ubatch_slices, slice_plan
from dbo.bench.moe_shapes import MoEShape
from dbo.model.paging import PagedBatch, plan_paged_batch
from dbo.model.rope import Rotation, rope_inv_freq, rotation
from dbo.ubatching.forward_context import ForwardContext, SerialPlayer

PAGE = 64
WHOLE = -1
"""Number of the uncut batch among its parts."""
UBATCHES = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class PartMetadata(CommonAttentionMetadata):
    """A (u)batch's metadata with everything else that its layers read.

    Attributes:
        part: its index, or `WHOLE`. paged, by: indices and rotations.
        expert_ids: by layer, `[T, K]` int64.
    """

    part: int
    paged: PagedBatch
    by: Rotation
    expert_ids: tuple[Tensor, ...]


def lengths_of(tokens: int, *, prompt_tokens: int, context_tokens: int) -> tuple[list[int], list[int]]:
    """New tokens and keys of each request: prompts from their start, or one token each with a context before it."""
    if tokens >= prompt_tokens:
        queries = [min(prompt_tokens, tokens - at) for at in range(0, tokens, prompt_tokens)]
        return queries, queries
    return [1] * tokens, [context_tokens] * tokens


def plan_of(queries: list[int], keys: list[int], *, seed: int) -> BatchPlan:
    """Requests side by side, their pages in random order, no padding."""
    query_lens, seq_lens = np.array(queries), np.array(keys)
    pages = -(-seq_lens // PAGE)
    order = 1 + np.random.default_rng(seed).permutation(int(pages.sum()))
    table = np.zeros((len(queries), int(pages.max())), dtype=np.int32)
    positions, slots = [], []
    for request, (first, count) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[request, :count] = order[first : first + count]
        at = np.arange(keys[request] - queries[request], keys[request])
        positions.append(at)
        slots.append(table[request, at // PAGE].astype(np.int64) * PAGE + at % PAGE)
    tokens = int(query_lens.sum())
    return BatchPlan(
        query_start_loc=np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        num_computed_tokens=(seq_lens - query_lens).astype(np.int32),
        num_reqs=len(queries),
        num_actual_tokens=tokens,
        num_tokens_padded=tokens,
        max_query_len=max(queries),
        max_seq_len=max(keys),
        block_table=table,
        slot_mapping=np.concatenate(slots),
        positions=np.concatenate(positions),
        causal=True,
        is_prefilling=query_lens > 1,
    )


def draw_experts(tokens: int, shape: MoEShape, *, seed: int) -> Tensor:
    """K different experts for every token, uniformly, `[T, K]` int64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k, dim=-1).indices


class RoutedBatch:
    """One rank's inputs for a stack of `layers` layers.

    Attributes:
        hidden: `[T, H]`, what enters the first layer. what: a few words about the requests.
    """

    def __init__(
        self,
        world: Any,
        shape: MoEShape,
        tokens: int,
        layers: int,
        *,
        prompt_tokens: int,
        context_tokens: int,
        seed: int,
    ) -> None:
        self.world = world
        config = shape.config(layers)
        queries, keys = lengths_of(tokens, prompt_tokens=prompt_tokens, context_tokens=context_tokens)
        prefill = queries[0] > 1
        self.what = f"{'prefill' if prefill else 'decode'}, {len(queries)} requests, {max(keys)} keys"
        mine = seed * 1000 + world.rank
        plan = plan_of(queries, keys, seed=mine)
        generator = torch.Generator(world.device).manual_seed(mine)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=world.device, dtype=torch.bfloat16)

        self.hidden = draw(tokens, shape.hidden)
        pages = int(plan.block_table.max()) + 1
        self.caches = [draw(pages, PAGE, config.kv_cache_dim) for _ in range(layers)]
        ids = [draw_experts(tokens, shape, seed=mine * 100 + layer).to(world.device) for layer in range(layers)]
        inv_freq = rope_inv_freq(config).to(world.device)
        _, padded = maybe_create_ubatch_slices(True, queries, tokens, len(queries), UBATCHES)
        assert padded is not None
        self.slices = padded
        self.whole = self._part(WHOLE, plan, inv_freq, ids)
        self.parts = [
            self._part(i, slice_plan(plan, piece), inv_freq, [rows[piece.token_slice].contiguous() for rows in ids])
            for i, piece in enumerate(padded)
        ]
        self.tokens = tokens

    def _part(self, part: int, plan: BatchPlan, inv_freq: Tensor, ids: list[Tensor]) -> PartMetadata:
        metadata = from_plan(plan, lambda array: self.world.tensors.from_numpy(array, "metadata"))
        return PartMetadata(
            **vars(metadata),
            part=part,
            paged=plan_paged_batch(metadata, metadata.positions, block_size=PAGE),
            by=rotation(metadata.positions, inv_freq, 1.0),
            expert_ids=tuple(ids),
        )

    def unsplit(self, step: int) -> ForwardContext:
        """The context of a step without DBO."""
        return self._context(step, self.whole, self.tokens)

    def split(self, step: int) -> ForwardContext:
        """The context of a step of two ubatches."""
        context = self._context(step, None, self.tokens)
        context.ubatch_slices, context.ubatch_metadata = self.slices, self.parts
        return context

    def halves(self, step: int) -> list[ForwardContext]:
        """A context for each ubatch, as it has one within a split step."""
        return [self._context(step, part, part.num_actual_tokens, i) for i, part in enumerate(self.parts)]

    def _context(self, step: int, metadata: PartMetadata | None, tokens: int, ubatch: int = 0) -> ForwardContext:
        return ForwardContext(
            attn_metadata=metadata,
            kv_caches=self.caches,
            num_tokens=tokens,
            num_real_tokens=tokens,
            step=step,
            player=SerialPlayer(self.world),
            num_tokens_across_ranks=[tokens] * self.world.size,
            ubatch=ubatch,
        )
