"""Reading a DeepSeek-V2 `config.json`, in the published and in the newer rope form. Torch-free.

What this build does not compute exactly is refused here, by name, before a byte of the weights is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.model.fields import bad_model, read_json, real, token_ids, whole
from dbo.model.rope_config import DEFAULT_ROPE_THETA, YarnConfig, read_rope


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one DeepSeek-V2 model; fields are named as in `config.json`.

    Attributes:
        q_lora_rank: None: queries are projected from the hidden state at once.
        first_k_dense_replace, moe_layer_freq: see `is_moe_layer`.
        n_group, topk_group: 1 and 1 unless `topk_method` is "group_limited_greedy".
        yarn: None: the plain rotary embedding.
        eos_token_ids: a generated token out of these ends a request.
        dtype: the type that the checkpoint names for itself, for example "bfloat16".
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = DEFAULT_ROPE_THETA
    yarn: YarnConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` has routed experts; the others have one dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def num_moe_layers(self) -> int:
        return sum(map(self.is_moe_layer, range(self.num_hidden_layers)))

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_cache_dim(self) -> int:
        """Elements that one token takes in a layer's cache: the latent, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises:
        ModelFormatError: no such folder or file, no JSON, or a model that this build does not compute.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise bad_model("a model is a folder", "give an existing Hugging Face folder", folder=folder)
    return parse_model_config(read_json(folder / "config.json"))


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Check the contents of a config.json and name its fields.

    Raises:
        ModelFormatError: the first rule that `raw` breaks.
    """
    _refuse_other_models(raw)
    topk_method = raw.get("topk_method") or "greedy"
    grouped = topk_method == "group_limited_greedy"
    theta, yarn = read_rope(raw)
    config = ModelConfig(
        vocab_size=whole(raw, "vocab_size"),
        hidden_size=whole(raw, "hidden_size"),
        intermediate_size=whole(raw, "intermediate_size"),
        moe_intermediate_size=whole(raw, "moe_intermediate_size"),
        num_hidden_layers=whole(raw, "num_hidden_layers"),
        num_attention_heads=whole(raw, "num_attention_heads"),
        kv_lora_rank=whole(raw, "kv_lora_rank"),
        q_lora_rank=None if "q_lora_rank" in raw and raw["q_lora_rank"] is None else whole(raw, "q_lora_rank"),
        qk_nope_head_dim=whole(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=whole(raw, "qk_rope_head_dim"),
        v_head_dim=whole(raw, "v_head_dim"),
        n_routed_experts=whole(raw, "n_routed_experts"),
        n_shared_experts=whole(raw, "n_shared_experts"),
        num_experts_per_tok=whole(raw, "num_experts_per_tok"),
        max_position_embeddings=whole(raw, "max_position_embeddings"),
        first_k_dense_replace=whole(raw, "first_k_dense_replace", default=0, least=0),
        moe_layer_freq=whole(raw, "moe_layer_freq", default=1),
        topk_method=topk_method,
        n_group=whole(raw, "n_group") if grouped else 1,
        topk_group=whole(raw, "topk_group") if grouped else 1,
        routed_scaling_factor=real(raw, "routed_scaling_factor", default=1.0),
        rms_norm_eps=real(raw, "rms_norm_eps", default=1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope_theta=theta,
        yarn=yarn,
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )
    _check_shape(config)
    return config


def _refuse_other_models(raw: Mapping[str, Any]) -> None:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if model_type != "deepseek_v2" or (architectures or ["DeepseekV2ForCausalLM"]) != ["DeepseekV2ForCausalLM"]:
        fix = "use a DeepSeek-V2 folder, or make one with the generator"
        raise bad_model("the model is a DeepseekV2ForCausalLM", fix, model_type=model_type, architectures=architectures)
    if quantisation := raw.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise bad_model("weights are not quantised", "use the bf16 checkpoint", quantization_config=method)
    heads = whole(raw, "num_attention_heads")
    supported: tuple[tuple[str, tuple[Any, ...], str], ...] = (
        ("scoring_func", (None, "softmax"), "the router scores with softmax; V3's sigmoid scoring is not computed"),
        ("topk_method", (None, "greedy", "group_limited_greedy"), "the router takes the top k, plain or by groups"),
        ("norm_topk_prob", (None, False), "router weights are not renormalised, since transformers ignores the flag"),
        ("attention_bias", (None, False), "attention projections have no bias"),
        ("mlp_bias", (None, False), "MLP projections have no bias"),
        ("hidden_act", (None, "silu"), "MLPs are gated by silu"),
        ("num_key_value_heads", (None, heads), "MLA has as many key as query heads"),
        ("partial_rotary_factor", (None, 1, 1.0), "the rotary part of a head is rotated as a whole"),
    )
    for name, values, rule in supported:
        if raw.get(name) not in values:
            raise bad_model(rule, "use a checkpoint without it", **{name: raw[name]})


def _check_shape(config: ModelConfig) -> None:
    experts, groups = config.n_routed_experts, config.n_group
    if config.qk_rope_head_dim % 2:
        raise bad_model("rope rotates pairs", "use an even size", qk_rope_head_dim=config.qk_rope_head_dim)
    if experts % groups or config.topk_group > groups:
        raise bad_model(
            "expert groups are of equal size and at most all of them are chosen",
            "correct config.json",
            n_routed_experts=experts,
            n_group=groups,
            topk_group=config.topk_group,
        )
    eligible = experts // groups * config.topk_group
    if config.num_experts_per_tok > eligible:
        raise bad_model(
            "a token chooses among the eligible experts",
            "correct config.json",
            num_experts_per_tok=config.num_experts_per_tok,
            eligible_experts=eligible,
        )
