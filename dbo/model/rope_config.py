"""The rope part of config.json, in its published and its newer form. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dbo.model.fields import bad_model, real, whole

ROPE_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate partial_rotary_factor".split()
)
DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """How YaRN stretches the rotary embedding beyond `original_max_position_embeddings` positions."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


def read_rope(raw: Mapping[str, Any]) -> tuple[float, YarnConfig | None]:
    """Both forms say the same: `rope_scaling` beside `rope_theta`, or one dict `rope_parameters`."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(name) or {}
    if not isinstance(rope, dict):
        raise bad_model("config.json gives rope's parameters as an object", "correct config.json", **{name: repr(rope)})
    if unknown := sorted(rope.keys() - ROPE_KEYS):
        fix = "use a checkpoint with plain or YaRN rope"
        raise bad_model("every rope parameter is computed, none ignored", fix, unknown=unknown)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "yarn") or rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        fix = "use a checkpoint with one of these"
        raise bad_model("rope is the plain one or YaRN, over the whole rotary part", fix, rope_type=kind)
    theta = real(rope if rope.get("rope_theta") is not None else raw, "rope_theta", default=DEFAULT_ROPE_THETA)
    if theta <= 1:
        raise bad_model("rope's base is above 1", "correct config.json", rope_theta=theta)
    if kind == "default":
        return theta, None
    longest = whole(raw, "max_position_embeddings")
    original = whole(rope, "original_max_position_embeddings", default=longest)
    return theta, YarnConfig(
        factor=real(rope, "factor", default=longest / original),
        original_max_position_embeddings=original,
        beta_fast=real(rope, "beta_fast", default=32.0),
        beta_slow=real(rope, "beta_slow", default=1.0),
        mscale=real(rope, "mscale", default=0.0, positive=False),
        mscale_all_dim=real(rope, "mscale_all_dim", default=0.0, positive=False),
        attention_factor=None if rope.get("attention_factor") is None else real(rope, "attention_factor"),
        truncate=bool(rope.get("truncate", True)),
    )
