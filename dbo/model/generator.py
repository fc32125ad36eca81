"""A small random DeepSeek-V2 folder in the published format. Needs torch and safetensors.

The same seed gives the same bytes on every machine: weights are uniform, from integers of a counter-based generator, so
no libm and no vector unit has a say in them. Their spread is chosen so that attention is peaked enough for a wrong
cache to change tokens, and that the gaps which greedy decoding and routing decide by are far wider than rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dbo.model.config import ModelConfig, parse_model_config
from dbo.model.layout import EMBEDDING, checkpoint_shapes
from dbo.model.loader import SINGLE
from dbo.model.tokenizer import BOS_ID, BYTE_VOCAB_SIZE, EOS_ID, PAD_ID, write_byte_tokenizer

# Standard deviation of a projection's output for an input of size 1, by the ending of the tensor's name.
GAINS = {
    "q_proj": 2.0,
    "q_b_proj": 2.0,
    "o_proj": 2.0,
    "gate": 2.0,
    "down_proj": 2.0,
    "lm_head": 16.0,
}


def generate_model_folder(
    path: str | Path, *, seed: int, hidden_size: int = 2048, num_layers: int = 4, **overrides: Any
) -> ModelConfig:
    """Write config.json, weights (bf16), generation_config.json and a byte tokenizer into `path`.

    Args:
        hidden_size: 2048 is the smallest that every all-to-all backend takes.
        overrides: fields of config.json, for example `n_routed_experts=16`, `q_lora_rank=None`, `rope_scaling=None`.

    Returns:
        The configuration that was written.

    Raises:
        ModelFormatError: a configuration that `load_model_config` would refuse.
    """
    path = Path(path)
    raw = _published_config(hidden_size=hidden_size, num_layers=num_layers) | overrides
    config = parse_model_config(raw)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", raw)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(path / "generation_config.json", {"do_sample": False, **ids})
    write_byte_tokenizer(path, max_length=config.max_position_embeddings)
    generator = np.random.Generator(np.random.Philox(seed))
    weights = {name: _weight(name, shape, generator) for name, shape in checkpoint_shapes(config).items()}
    save_file(weights, path / SINGLE, metadata={"format": "pt"})
    return config


def _published_config(*, hidden_size: int, num_layers: int) -> dict[str, Any]:
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


def _weight(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> torch.Tensor:
    """Uniform with the standard deviation that gives outputs of size `GAINS`; norms start at 1."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    gain = GAINS.get(name.split(".")[-2], 1.0)
    std = 1.0 if name == EMBEDDING else gain / shape[-1] ** 0.5
    integers = torch.from_numpy(generator.integers(-(2**15), 2**15, size=shape, dtype=np.int16))
    return (integers.float() * (std * 3**0.5 / 2**15)).to(torch.bfloat16)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
