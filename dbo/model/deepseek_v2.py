"""DeepSeek-V2: the program of a step, from token ids to the normed hidden state. Needs torch.

The program names its points (`A0`, `A1`; the modular kernel names the rest) and leaves the order in which they run, and
on which stream, to the player of the forward context. It never reads the device from the host: shapes depend on host
integers only, so it also runs on a device that has computed nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dbo.dcp.interface import ContextParallel
from dbo.errors import ConfigError
from dbo.model.attention import make_attention
from dbo.model.config import ModelConfig
from dbo.model.dcp_attention import make_dcp_attention
from dbo.model.dcp_moe import all_rows, own_rows
from dbo.model.layers import MLP, Weights, add_rms_norm, add_three, rms_norm
from dbo.model.layout import EMBEDDING, FINAL_NORM, INV_FREQ, LM_HEAD, layer_prefix, local_experts
from dbo.model.paging import PagedBatch, plan_paged_batch
from dbo.model.rope import Rotation, rotation, rotation_scale
from dbo.model.router import Router
from dbo.moe.experts import make_experts
from dbo.moe.interface import Experts, FusedMoEPrepareAndFinalizeModular, PartialSums
from dbo.ubatching.forward_context import ForwardContext, get_forward_context


class MoEKernel(Protocol):
    """What an MoE layer calls once it has routed: the modular kernel."""

    def forward(
        self, hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *, layer: int
    ) -> torch.Tensor:
        """`[T, H]` with weights and ids `[T, K]` to the sum of routed and shared experts `[T, H]`."""

    def input_buffer(self, like: torch.Tensor) -> torch.Tensor | None:
        """Where the input had best be written; None: anywhere."""

    def parts(
        self, hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *, layer: int
    ) -> tuple[torch.Tensor | PartialSums, torch.Tensor | None]:
        """As `forward`, not yet summed."""


class MakeKernel(Protocol):
    def __call__(
        self,
        *,
        layer: int,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular,
        experts: Experts,
        shared_experts: Callable[[torch.Tensor], torch.Tensor],
    ) -> MoEKernel: ...


class MakePrepareFinalize(Protocol):
    def __call__(self, *, layer: int) -> FusedMoEPrepareAndFinalizeModular: ...


class DecoderLayer:
    """Attention, then a dense MLP or routed and shared experts, each added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        index: int,
        make_prepare_finalize: MakePrepareFinalize,
        make_kernel: MakeKernel,
        context_parallel: ContextParallel | None,
    ) -> None:
        prefix = layer_prefix(index)
        self.group = context_parallel
        self.index, self.eps = index, config.rms_norm_eps
        self.input_norm = weights[f"{prefix}.input_layernorm.weight"]
        self.post_attention_norm = weights[f"{prefix}.post_attention_layernorm.weight"]
        self.attention = (
            make_attention(config, weights, f"{prefix}.self_attn")
            if context_parallel is None
            else make_dcp_attention(config, weights, f"{prefix}.self_attn", context_parallel)
        )
        self.mlp: MLP | None = None
        if not config.is_moe_layer(index):
            self.mlp = MLP(weights, f"{prefix}.mlp")
            return
        self.router = Router(config, weights[f"{prefix}.mlp.gate.weight"])
        prepare_finalize = make_prepare_finalize(layer=index)
        self.kernel = make_kernel(
            layer=index,
            prepare_finalize=prepare_finalize,
            experts=make_experts(
                prepare_finalize.layout,
                weights[f"{prefix}.mlp.experts.gate_up_proj"],
                weights[f"{prefix}.mlp.experts.down_proj"],
            ),
            shared_experts=MLP(weights, f"{prefix}.mlp.shared_experts"),
        )

    def __call__(
        self, residual: torch.Tensor, by: Rotation, batch: PagedBatch, context: ForwardContext
    ) -> torch.Tensor:
        context.player.reach("A0", layer=self.index)
        projected = self.attention.project(rms_norm(residual, self.input_norm, self.eps), by)
        context.player.reach("A1", layer=self.index)
        attended = self.attention.attend(projected, context.kv_caches[self.index], batch)
        out = None if self.mlp is not None or self.group is not None else self.kernel.input_buffer(attended)
        residual, hidden = add_rms_norm(residual, attended, self.post_attention_norm, self.eps, out)
        if self.mlp is not None:
            return residual + self.mlp(hidden)
        if self.group is not None:
            return residual + self._experts_of_own_rows(hidden, batch.padding_rows, self.group)
        topk_weights, topk_ids = self.router(hidden, batch.padding_rows)
        return add_three(residual, *self.kernel.parts(hidden, topk_weights, topk_ids, layer=self.index))

    def _experts_of_own_rows(
        self, hidden: torch.Tensor, padding_rows: torch.Tensor, group: ContextParallel
    ) -> torch.Tensor:
        """Routed and shared experts of `[T, H]`, whose rows the peers of a DCP group share out."""
        own, own_padding = own_rows(hidden, group), own_rows(padding_rows, group, fill=True)
        topk_weights, topk_ids = self.router(own, own_padding)
        out = self.kernel.forward(own, topk_weights, topk_ids, layer=self.index)
        return all_rows(out, group, hidden.shape[0])


class DeepseekV2ForCausalLM:
    """The model on one rank.

    Args:
        weights: what `load_weights` returned for the same rank, moved to the device.
        make_prepare_finalize: the all-to-all backend of an MoE layer; its `layout` chooses the experts' form.
        make_kernel: builds an MoE layer's kernel from that backend, this rank's experts and the shared experts.
        ep_rank, ep_size: the rank that `weights` were loaded for; `local_experts` follows from them.
        context_parallel: this rank's end of its DCP group; None: its cache holds all keys.

    Raises:
        ConfigError: `weights` hold another number of routed experts than `ep_size` says.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        make_prepare_finalize: MakePrepareFinalize,
        make_kernel: MakeKernel,
        ep_rank: int = 0,
        ep_size: int = 1,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        self.config = config
        self.local_experts = local_experts(config, ep_rank=ep_rank, ep_size=ep_size)
        _check_experts(weights, len(self.local_experts), ep_size)
        self.embedding, self.norm, self.inv_freq = weights[EMBEDDING], weights[FINAL_NORM], weights[INV_FREQ]
        self.lm_head = self.embedding if config.tie_word_embeddings else weights[LM_HEAD]
        self.rotation_scale = rotation_scale(config)
        self.layers = [
            DecoderLayer(config, weights, index, make_prepare_finalize, make_kernel, context_parallel)
            for index in range(config.num_hidden_layers)
        ]

    def __call__(self, *, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One pass over the rows of the current forward context.

        Args:
            input_ids, positions: `[T]` int64; at padding rows they may hold anything.

        Returns:
            The normed hidden state `[T, H]`; padding rows are undefined.
        """
        context = get_forward_context()
        batch = plan_paged_batch(context.attn_metadata, positions, block_size=context.kv_caches[0].shape[1])
        by = rotation(positions, self.inv_freq, self.rotation_scale)
        hidden = self.embed(input_ids.masked_fill(batch.padding_rows[:, 0], 0))
        for layer in self.layers:
            hidden = layer(hidden, by, batch, context)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[T]` token ids to `[T, H]`."""
        return self.embedding.index_select(0, input_ids)

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocab]` fp32 of `hidden_rows` `[N, H]`, rows of the normed hidden state."""
        return (hidden_rows @ self.lm_head.t()).float()


def _check_experts(weights: Weights, expected: int, ep_size: int) -> None:
    for name, weight in weights.items():
        if name.endswith(".mlp.experts.down_proj") and weight.shape[0] != expected:
            raise ConfigError.of(
                "weights are loaded for the rank of the model",
                fix="pass the same ep_rank and ep_size to both",
                tensor=name,
                experts=weight.shape[0],
                ep_size=ep_size,
            )
