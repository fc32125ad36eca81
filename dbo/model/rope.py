"""Rotary embedding, plain and YaRN. Needs torch.

Frequencies are computed on the host, once, in fp32; the forward pass turns positions into cosines and sines.
"""

from __future__ import annotations

import math

import torch

from dbo.model.config import ModelConfig
from dbo.model.rope_config import YarnConfig

Rotation = tuple[torch.Tensor, torch.Tensor]


def rope_inv_freq(config: ModelConfig) -> torch.Tensor:
    """Radians a position for each rotated pair, `[qk_rope_head_dim / 2]` fp32 on the CPU."""
    dim = config.qk_rope_head_dim
    plain = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    yarn = config.yarn
    if yarn is None:
        return plain
    # Fast pairs turn often within the trained length and stay as they are; slow pairs are interpolated; a ramp between.
    low, high = (_pair_turning(turns, config, yarn) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    interpolated = ramp.clamp(0, 1)
    return plain / yarn.factor * interpolated + plain * (1 - interpolated)


def _pair_turning(turns: float, config: ModelConfig, yarn: YarnConfig) -> float:
    """Index of the pair that makes `turns` full turns within the trained length."""
    span = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
    return config.qk_rope_head_dim * math.log(span) / (2 * math.log(config.rope_theta))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotation_scale(config: ModelConfig) -> float:
    """What YaRN multiplies cosines and sines with."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """What attention scores are multiplied with: 1/sqrt(head size), and YaRN's temperature over all dimensions."""
    yarn = config.yarn
    temperature = _mscale(yarn.factor, yarn.mscale_all_dim) if yarn is not None and yarn.mscale_all_dim else 1.0
    return float(config.qk_head_dim**-0.5 * temperature**2)


def rotation(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> Rotation:
    """Cosines and sines, `[T, 1, pairs]` fp32 each, of `positions` `[T]`: computed once a pass, used by every layer."""
    angles = (positions.to(torch.float32)[:, None] * inv_freq)[:, None, :]
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate the neighbouring pairs of `x` `[T, heads, 2 * pairs]`, in fp32; the dtype is kept."""
    cos, sin = by
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
