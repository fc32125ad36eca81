"""A generated DeepSeek-V2 folder without its weights: config.json in the published form and a byte tokenizer. No torch.

Ordering mode needs no more than this; `dbo.model.generator` adds the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dbo.model.config import ModelConfig, parse_model_config
from dbo.model.tokenizer import BOS_ID, BYTE_VOCAB_SIZE, EOS_ID, PAD_ID, write_byte_tokenizer


def write_frame(path: str | Path, *, hidden_size: int = 2048, num_layers: int = 4, **overrides: Any) -> ModelConfig:
    """Write config.json, generation_config.json and the tokenizer into `path`, and return the configuration.

    Raises:
        ModelFormatError: a configuration that `load_model_config` would refuse.
    """
    path = Path(path)
    raw = published_config(hidden_size=hidden_size, num_layers=num_layers) | overrides
    config = parse_model_config(raw)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", raw)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(path / "generation_config.json", {"do_sample": False, **ids})
    write_byte_tokenizer(path, max_length=config.max_position_embeddings)
    return config


def published_config(*, hidden_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": BYTE_VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
