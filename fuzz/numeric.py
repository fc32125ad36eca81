"""The numeric side of a case: weights of its model, and the same requests unsplit on one rank. Needs torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dbo.config import DBOConfig
from dbo.job.local import LocalWorld
from dbo.job.rank import FolderWeights, RankJob, RankMain, RequestSpec
from dbo.job.reference import by_request
from dbo.model.config import ModelConfig
from dbo.model.generator import generate_model_folder
from dbo.schedule import Schedule

DTYPE = "float32"


def inference_mode() -> AbstractContextManager[Any]:
    """What a rank's program runs in."""
    return torch.inference_mode()


@contextmanager
def one_thread() -> Iterator[None]:
    """Small matrices: more threads than one only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weights(model: ModelConfig) -> FolderWeights:
    """Random weights of `model`, the same ones every time."""
    return FolderWeights(folder=_folder(model).name, config=model, dtype=DTYPE)


@lru_cache(maxsize=64)
def _folder(model: ModelConfig) -> tempfile.TemporaryDirectory[str]:
    """The generated folder of a model; it goes when this process does."""
    folder = tempfile.TemporaryDirectory(prefix="dbo-fuzz-model-")
    generate_model_folder(
        folder.name,
        seed=0,
        hidden_size=model.hidden_size,
        num_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
        intermediate_size=model.intermediate_size,
        moe_intermediate_size=model.moe_intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_attention_heads,
        kv_lora_rank=model.kv_lora_rank,
        q_lora_rank=model.q_lora_rank,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        n_routed_experts=model.n_routed_experts,
        n_shared_experts=model.n_shared_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        first_k_dense_replace=model.first_k_dense_replace,
        rope_scaling=None,
    )
    return folder


def said_alone(
    model: ModelConfig, config: DBOConfig, schedule: Schedule, requests: Sequence[RequestSpec]
) -> dict[str, tuple[list[int], list[np.ndarray]]]:
    """Greedy tokens and logits by request id of all requests together, unsplit, on one rank and plain CPU tensors."""
    alone = DBOConfig(
        data_parallel_size=1,
        all2all_backend="nccl",
        dtype=DTYPE,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks * config.num_ranks,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=64,
        max_num_seqs=32,
    )
    job = RankJob(
        config=alone,
        model_config=model,
        schedule=schedule,
        requests=(tuple(requests),),
        weights_of=weights(model),
        keep_logits=True,
    )
    found = by_request([RankMain(job)(LocalWorld())])
    return {spec.id: found.get(spec.id, ([], [])) for spec in requests}
