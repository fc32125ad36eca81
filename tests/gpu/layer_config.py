"""A small attention for the tests of a layer. Needs torch."""

from __future__ import annotations

import torch

from dbo.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=3,
    kv_lora_rank=20,
    q_lora_rank=None,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)


def attention_weights(device: str = "cpu") -> dict[str, torch.Tensor]:
    heads = CONFIG.num_attention_heads
    shapes = {
        "q_proj": (heads * CONFIG.qk_head_dim, CONFIG.hidden_size),
        "kv_a_proj_with_mqa": (CONFIG.kv_cache_dim, CONFIG.hidden_size),
        "kv_a_layernorm": (CONFIG.kv_lora_rank,),
        "kv_b_proj": (heads * (CONFIG.qk_nope_head_dim + CONFIG.v_head_dim), CONFIG.kv_lora_rank),
        "o_proj": (CONFIG.hidden_size, heads * CONFIG.v_head_dim),
    }
    return {
        f"a.{name}.weight": (torch.randn(shape, generator=torch.Generator().manual_seed(i)) / 4).to(device)
        for i, (name, shape) in enumerate(shapes.items())
    }
