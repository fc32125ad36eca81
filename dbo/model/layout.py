"""Which tensors a DeepSeek-V2 folder holds, their shapes, and which rank needs them. Torch-free."""

from __future__ import annotations

from dbo.errors import ConfigError
from dbo.model.config import ModelConfig

Shape = tuple[int, ...]
EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
INV_FREQ = "model.rotary_emb.inv_freq"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def expert_prefix(layer: int, expert: int) -> str:
    return f"{layer_prefix(layer)}.mlp.experts.{expert}"


def checkpoint_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name to shape of every tensor of the checkpoint, in the order of the forward pass."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {EMBEDDING: (vocab, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = layer_prefix(layer)
        shapes |= {f"{prefix}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in _attention(config).items()}
        if not config.is_moe_layer(layer):
            shapes |= _mlp(f"{prefix}.mlp", hidden, config.intermediate_size)
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (config.n_routed_experts, hidden)
        for expert in range(config.n_routed_experts):
            shapes |= _mlp(expert_prefix(layer, expert), hidden, config.moe_intermediate_size)
        shared = config.n_shared_experts * config.moe_intermediate_size
        shapes |= _mlp(f"{prefix}.mlp.shared_experts", hidden, shared)
    shapes[FINAL_NORM] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {LM_HEAD: (vocab, hidden)}


def _attention(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank, queries = config.q_lora_rank, heads * config.qk_head_dim
    shapes: dict[str, Shape] = (
        {"q_proj": (queries, hidden)}
        if rank is None
        else {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    )
    return shapes | {
        "kv_a_proj_with_mqa": (config.kv_cache_dim, hidden),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj": (hidden, heads * config.v_head_dim),
    }


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def local_experts(config: ModelConfig, *, ep_rank: int, ep_size: int) -> range:
    """The routed experts that live on `ep_rank`: a block of `n_routed_experts / ep_size`.

    Raises:
        ConfigError: an uneven split, or no such rank.
    """
    experts = config.n_routed_experts
    if ep_size < 1 or experts % ep_size or not 0 <= ep_rank < ep_size:
        fix = "choose a size that divides the experts, and a rank below it"
        raise ConfigError.of(
            "routed experts are spread evenly over the ranks",
            fix=fix,
            n_routed_experts=experts,
            ep_size=ep_size,
            ep_rank=ep_rank,
        )
    count = experts // ep_size
    return range(ep_rank * count, (ep_rank + 1) * count)
