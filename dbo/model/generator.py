"""A small random DeepSeek-V2 folder in the published format. Needs torch and safetensors.

The same seed gives the same bytes on every machine: weights are uniform, from integers of a counter-based generator, so
no libm and no vector unit has a say in them. Their spread is chosen so that attention is peaked enough for a wrong
cache to change tokens, and that the gaps which greedy decoding and routing decide by are far wider than rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dbo.model.config import ModelConfig
from dbo.model.config_folder import write_frame
from dbo.model.layout import EMBEDDING, checkpoint_shapes
from dbo.model.loader import SINGLE

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
    config = write_frame(path, hidden_size=hidden_size, num_layers=num_layers, **overrides)
    generator = np.random.Generator(np.random.Philox(seed))
    weights = {name: _weight(name, shape, generator) for name, shape in checkpoint_shapes(config).items()}
    save_file(weights, Path(path) / SINGLE, metadata={"format": "pt"})
    return config


def _weight(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> torch.Tensor:
    """Uniform with the standard deviation that gives outputs of size `GAINS`; norms start at 1."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    gain = GAINS.get(name.split(".")[-2], 1.0)
    std = 1.0 if name == EMBEDDING else gain / shape[-1] ** 0.5
    integers = torch.from_numpy(generator.integers(-(2**15), 2**15, size=shape, dtype=np.int16))
    return (integers.float() * (std * 3**0.5 / 2**15)).to(torch.bfloat16)
