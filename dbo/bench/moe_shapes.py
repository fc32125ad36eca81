"""The layers that `dbo bench moe` stacks. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dbo.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """One MoE layer.

    Attributes:
        hidden, top_k, width: H, K and the width of a routed expert. shared: of all shared experts together.
        experts: routed, over all ranks.
        heads, latent, nope, rope: of MLA; values are as wide as the part of a key without position.
        synthetic: no published model has this shape.
    """

    hidden: int
    top_k: int
    width: int
    shared: int = 512
    experts: int = 64
    heads: int = 16
    latent: int = 512
    nope: int = 128
    rope: int = 64
    synthetic: bool = True

    def config(self, layers: int) -> ModelConfig:
        """A model of so many of these layers."""
        return ModelConfig(
            vocab_size=1,
            hidden_size=self.hidden,
            intermediate_size=self.shared,
            moe_intermediate_size=self.width,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            kv_lora_rank=self.latent,
            q_lora_rank=None,
            qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope,
            v_head_dim=self.nope,
            n_routed_experts=self.experts,
            n_shared_experts=self.shared // self.width,
            num_experts_per_tok=self.top_k,
            max_position_embeddings=163840,
            dtype="bfloat16",
        )


_WIDE = MoEShape(hidden=7168, top_k=8, width=512)
_THIN = MoEShape(hidden=7168, top_k=8, width=256, shared=256, heads=2, latent=128)

SHAPES = {
    **{f"wide-{width}": replace(_WIDE, width=width) for width in (64, 128, 256, 512)},
    **{f"thin-{width}": replace(_THIN, width=width) for width in (64, 128, 256)},
    "lite": MoEShape(hidden=2048, top_k=6, width=1408, shared=2816, synthetic=False),
    "tiny": MoEShape(hidden=64, top_k=2, width=16, shared=32, experts=8, heads=2, latent=32, nope=16, rope=8),
}
"""wide: rows as wide as DeepSeek-V3's with narrow experts, synthetic; attention and shared experts are the same for all widths.
thin: with little besides the routed experts, so that exchanges weigh as much on two devices as they do on many, where a token
travels to up to top-k ranks instead of one. lite: DeepSeek-V2-Lite's layer. tiny: for runs without devices."""

GROUPS = {group: tuple(name for name in SHAPES if name.startswith(group)) for group in ("wide", "thin")}
"""Names that stand for several shapes."""
