"""A split step of some MoE layers through the real wrapper, ring, player, kernel and backend, without an engine.

What is timed here is the code that a rank runs between two coordinations; the batch is the smallest that can be split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dbo.batch.plan import BatchPlan
from dbo.batch.slicing import maybe_create_ubatch_slices, slice_plan
from dbo.config import DBOConfig
from dbo.contract.world import World, symbolic_tensors
from dbo.engine.batch import dummy_batch
from dbo.job.rank import make_prepare_finalize
from dbo.model.config import ModelConfig
from dbo.model.skeleton import SkeletonModel
from dbo.moe.modular_kernel import FusedMoEModularKernel
from dbo.schedule import Schedule
from dbo.trace import kinds
from dbo.ubatching.forward_context import ForwardContext, SerialPlayer, override_forward_context
from dbo.ubatching.wrapper import UBatchWrapper

_BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class LayerJob:
    """What every rank runs.

    Attributes:
        layers: MoE layers.
        tokens: of each rank, one a request; at least `num_ubatches`.
    """

    schedule: Schedule
    backend: str
    ranks: int
    layers: int = 1
    num_ubatches: int = 2
    tokens: int = 4

    @cached_property
    def model_config(self) -> ModelConfig:
        """DeepSeek-V3's widths where they matter for order, one expert a rank."""
        return ModelConfig(
            vocab_size=32,
            hidden_size=7168,
            intermediate_size=64,
            moe_intermediate_size=64,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=self.ranks,
            n_shared_experts=1,
            num_experts_per_tok=min(8, self.ranks),
            max_position_embeddings=512,
            first_k_dense_replace=0,
        )

    @cached_property
    def config(self) -> DBOConfig:
        """DP over all ranks."""
        return DBOConfig(
            data_parallel_size=self.ranks,
            enable_expert_parallel=True,
            enable_dbo=True,
            num_ubatches=self.num_ubatches,
            all2all_backend=self.backend,
            max_num_batched_tokens=64,
            block_size=_BLOCK_TOKENS,
        )

    @cached_property
    def plan(self) -> BatchPlan:
        """One new token for each request, each in a cache block of its own."""
        blocks = np.arange(1, self.tokens + 1)
        plan = dummy_batch(num_reqs=self.tokens, query_len=1, block_table_width=1).plan
        return replace(plan, block_table=blocks[:, None].astype(np.int32), slot_mapping=blocks * _BLOCK_TOKENS)

    @cached_property
    def slices(self) -> list[Any]:
        """Of the ubatches."""
        _, slices = maybe_create_ubatch_slices(True, [1] * self.tokens, self.tokens, self.tokens, self.num_ubatches)
        return slices or []

    @cached_property
    def parts(self) -> list[BatchPlan]:
        """The plan, cut."""
        return [slice_plan(self.plan, piece) for piece in self.slices]


def layer_program(job: LayerJob) -> Callable[[World], None]:
    """What a world's `launch` runs on every rank, in ordering mode."""

    def program(world: World) -> None:
        model_config = job.model_config
        backend = make_prepare_finalize(world, job.config, model_config)
        model = SkeletonModel(model_config, world, backend, FusedMoEModularKernel)
        wrapper = UBatchWrapper(
            model, world=world, schedule=job.schedule, backend=job.backend, moe_layers=range(job.layers)
        )
        world.in_ubatch(-1, step=0)
        world.trace.host(kinds.STEP_BEGIN, tokens=job.tokens, requests=job.tokens)
        context = ForwardContext(
            attn_metadata=None,
            kv_caches=_caches(world, job),
            num_tokens=job.tokens,
            num_real_tokens=job.tokens,
            ubatch_slices=job.slices,
            ubatch_metadata=job.parts,
            step=0,
            player=SerialPlayer(world),
            num_tokens_across_ranks=[job.tokens] * job.ranks,
        )
        upload = world.tensors.from_numpy
        with override_forward_context(context):
            hidden = wrapper(
                input_ids=upload(np.zeros(job.tokens, dtype=np.int64), "input_ids"),
                positions=upload(job.plan.positions, "positions"),
            )
        world.tensors.to_host(world.tensors.rows(hidden, 0, 1), "sample")
        world.in_ubatch(-1, step=0)
        world.trace.host(
            kinds.STEP_END,
            status="ok",
            error="",
            rows=job.tokens,
            expected_rows=job.tokens,
            live_threads=wrapper.live_threads,
        )

    return program


def _caches(world: World, job: LayerJob) -> list[Any]:
    caches = []
    for layer in range(job.layers):
        cache = symbolic_tensors(world).empty(((job.tokens + 1) * _BLOCK_TOKENS, 32), f"kv_cache.{layer}")
        cache.notes["block_size"] = _BLOCK_TOKENS
        caches.append(cache)
    return caches
