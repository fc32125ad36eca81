"""The numeric side of a case: weights of its model, and the same requests unsplit on one rank. Needs torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from dbo.config import DBOConfig
from dbo.local import LocalWorld
from dbo.model.config import ModelConfig
from dbo.model.generator import generate_model_folder
from dbo.rank import FolderWeights, RankJob, RankMain, RequestSpec
from dbo.schedule import Schedule

DTYPE = "float32"


def inference_mode() -> AbstractContextManager[Any]:
    """What a rank's program runs in."""
    return torch.inference_mode()


def weights(model: ModelConfig) -> FolderWeights:
    """Random weights of `model`, the same ones every time."""
    return FolderWeights(folder=_folder(model).name, config=model, dtype=DTYPE)


@lru_cache(maxsize=64)
def _folder(model: ModelConfig) -> tempfile.TemporaryDirectory[str]:
    """The generated folder of a model; it goes when this process does."""
    folder = tempfile.TemporaryDirectory(prefix="dbo-fuzz-model-")
    generate_model_folder(
        folder.name, seed=0, hidden_size=model.hidden_size, num_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size, intermediate_size=model.intermediate_size,
        moe_intermediate_size=model.moe_intermediate_size, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_attention_heads, kv_lora_rank=model.kv_lora_rank,
        q_lora_rank=model.q_lora_rank, qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim, v_head_dim=model.v_head_dim,
        n_routed_experts=model.n_routed_experts, n_shared_experts=model.n_shared_experts,
        num_experts_per_tok=model.num_experts_per_tok, first_k_dense_replace=model.first_k_dense_replace,
        rope_scaling=None,
    )  # fmt: skip
    return folder


def tokens_alone(
    model: ModelConfig, config: DBOConfig, schedule: Schedule, requests: Sequence[RequestSpec]
) -> dict[str, list[int]]:
    """Greedy tokens by request id of all requests together, unsplit, on one rank and plain CPU tensors."""
    alone = DBOConfig(
        data_parallel_size=1, all2all_backend="nccl", dtype=DTYPE, block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks * config.num_ranks, max_model_len=config.max_model_len,
        max_num_batched_tokens=64, max_num_seqs=32,
    )  # fmt: skip
    job = RankJob(
        config=alone, model_config=model, schedule=schedule, requests=(tuple(requests),), weights_of=weights(model)
    )
    tokens: dict[str, list[int]] = {}
    for outcome in RankMain(job)(LocalWorld()):
        for id, token in outcome.tokens.items():
            tokens.setdefault(id, []).append(token)
    return tokens
