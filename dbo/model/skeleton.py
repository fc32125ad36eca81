"""The model without numbers, for ordering mode: the same points, streams, cache blocks and exchanges, no torch.

Each layer launches the operations whose order matters (what reads and writes the KV cache, what feeds dispatch and combine),
with the bytes they touch. `World.tensors.op(name, reads, shape, writes=…)` is what an ordering world offers for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dbo.contract.world import World, symbolic_tensors
from dbo.dcp.interface import ContextParallel, real_rows_of_peer, rows_of_peer
from dbo.model.config import ModelConfig
from dbo.moe.interface import ExpertInputs, FusedMoEPrepareAndFinalizeModular
from dbo.ubatching.forward_context import ForwardContext, get_forward_context


class SkeletonExperts:
    """Routed experts: one operation from what arrived to what goes back."""

    def __init__(self, world: World) -> None:
        self.world = world

    def apply(self, inputs: ExpertInputs) -> Any:
        reads = [a for a in (inputs.x, inputs.counts, inputs.topk_ids, inputs.topk_weights) if a is not None]
        return symbolic_tensors(self.world).op("experts", reads, inputs.x.shape)


class SkeletonModel:
    """Called like the model.

    Args:
        make_kernel: as for the model: (prepare_finalize, experts, shared_experts) -> modular kernel.
        context_parallel: this rank's end of its DCP group; None: its cache holds all keys.
    """

    def __init__(
        self,
        config: ModelConfig,
        world: World,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular,
        make_kernel: Callable[..., Any],
        context_parallel: ContextParallel | None = None,
    ) -> None:
        self.config = config
        self.group = context_parallel
        self.world = world
        self.kernel = make_kernel(prepare_finalize, SkeletonExperts(world), self._shared)

    def __call__(self, *, input_ids: Any, positions: Any) -> Any:
        """`[T]` ids and positions to `[T, H]`."""
        op, config = symbolic_tensors(self.world).op, self.config
        context = get_forward_context()
        tokens = input_ids.shape[0]
        hidden = op("embed", [input_ids], (tokens, config.hidden_size))
        for layer in range(config.num_hidden_layers):
            hidden = self._layer(layer, hidden, positions, context)
        return op("norm", [hidden], hidden.shape)

    def compute_logits(self, rows: Any) -> Any:
        return symbolic_tensors(self.world).op("lm_head", [rows], (rows.shape[0], self.config.vocab_size))

    def _layer(self, layer: int, hidden: Any, positions: Any, context: ForwardContext) -> Any:
        op, plan = symbolic_tensors(self.world).op, context.attn_metadata
        tokens = hidden.shape[0]
        context.player.reach("A0", layer=layer)
        qkv = op("qkv", [hidden, positions], (tokens, self.config.hidden_size))
        context.player.reach("A1", layer=layer)
        cache = context.kv_caches[layer]
        # A graph may touch any block: which ones is data.
        read, written = ([cache], [cache]) if context.graph_key is not None else self._cache_blocks(cache, plan)
        op("kv_write", [qkv], (0,), writes=written)
        if self.group is None:
            attended = op("attention", [qkv, *read], (tokens, self.config.hidden_size))
            hidden = op("o_proj", [attended, hidden], hidden.shape)
        else:
            hidden = self._shared_attention(self.group, qkv, read, hidden)
        if not self.config.is_moe_layer(layer):
            return op("mlp", [hidden], hidden.shape)
        return op("residual", [hidden, self._experts(hidden, layer, context)], hidden.shape)

    def _shared_attention(self, group: ContextParallel, qkv: Any, read: list[Any], hidden: Any) -> Any:
        """`dbo.model.dcp_attention`: all heads over own keys, exchange, own heads' projection, sum over the group."""
        op, config, tokens = symbolic_tensors(self.world).op, self.config, hidden.shape[0]
        partial = op("attention", [qkv, *read], (tokens, config.num_attention_heads, config.kv_lora_rank))
        lse = op("lse", [qkv, *read], (tokens, config.num_attention_heads))
        merged = group.reduce_heads(partial, lse, None, None)
        summed = group.all_reduce(op("o_proj", [merged], hidden.shape))
        return op("add_attention", [summed, hidden], hidden.shape)

    def _experts(self, hidden: Any, layer: int, context: ForwardContext) -> Any:
        """Gate and kernel; the peers of a DCP group share the rows out."""
        op, group, real = symbolic_tensors(self.world).op, self.group, context.num_real_tokens
        tokens = hidden.shape[0]
        if group is not None:
            share = rows_of_peer(tokens, group.size)
            real = real_rows_of_peer(real, tokens, group.size, group.rank)
            hidden = op("own_rows", [hidden], (share, *hidden.shape[1:]))
        ids = op("gate", [hidden], (hidden.shape[0], self.config.num_experts_per_tok))
        # Rows with an expert id: padding rows have -1 and are not dispatched. A graph learns at each replay how many.
        ids.notes["rows"] = None if context.graph_key is not None else real
        weights = op("gate_weights", [hidden], ids.shape)
        out = self.kernel.forward(hidden, weights, ids, layer=layer)
        return out if group is None else group.all_gather_rows(out).rows(0, tokens)

    def _shared(self, hidden: Any) -> Any:
        return symbolic_tensors(self.world).op("shared_experts", [hidden], hidden.shape)

    def _cache_blocks(self, cache: Any, plan: Any) -> tuple[list[Any], list[Any]]:
        """Views of the blocks that this (u)batch reads, and of the slots that its real rows write."""
        size = int(cache.notes["block_size"])
        lens = plan.seq_lens if plan.dcp_local_seq_lens is None else plan.dcp_local_seq_lens
        read = sorted({int(b) for row, n in zip(plan.block_table, lens, strict=True) for b in row[: -(-n // size)]})
        slots = sorted({int(s) for s in plan.slot_mapping[: plan.num_actual_tokens]})
        return [cache.rows(b * size, (b + 1) * size) for b in read], [cache.rows(a, b) for a, b in _runs(slots)]


def _runs(slots: list[int]) -> list[tuple[int, int]]:
    """Sorted slots as half-open runs."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs
