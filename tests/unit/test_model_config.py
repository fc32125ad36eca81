"""config.json: what is read, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbo.errors import ConfigError, ModelFormatError
from dbo.model.config import load_model_config, parse_model_config
from dbo.model.config_folder import published_config
from dbo.model.layout import checkpoint_shapes, local_experts
from dbo.model.rope_config import YarnConfig

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
YARN |= {"mscale": 0.707, "mscale_all_dim": 0.707}


def raw(**changes: Any) -> dict[str, Any]:
    return published_config(hidden_size=64, num_layers=4) | changes


def test_published_and_newer_rope_forms_say_the_same() -> None:
    published = raw(rope_theta=5000, rope_scaling=YARN)
    newer = raw(rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 5000.0})
    del newer["rope_scaling"], newer["rope_theta"]
    assert parse_model_config(published) == parse_model_config(newer)
    assert parse_model_config(newer).rope_theta == 5000.0
    assert parse_model_config(newer).yarn == YarnConfig(
        factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707
    )


def test_plain_rope_has_no_yarn() -> None:
    assert parse_model_config(raw(rope_scaling=None)).yarn is None
    assert parse_model_config(raw(rope_scaling={"rope_type": "default", "rope_theta": 7.0})).rope_theta == 7.0


@pytest.mark.parametrize(
    ("first_dense", "freq", "moe"),
    [(1, 1, [1, 2, 3]), (0, 1, [0, 1, 2, 3]), (1, 2, [2]), (0, 2, [0, 2]), (4, 1, [])],
)
def test_which_layers_have_experts(first_dense: int, freq: int, moe: list[int]) -> None:
    config = parse_model_config(raw(first_k_dense_replace=first_dense, moe_layer_freq=freq))
    assert [i for i in range(4) if config.is_moe_layer(i)] == moe
    assert config.num_moe_layers == len(moe)
    with_gate = [name for name in checkpoint_shapes(config) if name.endswith("mlp.gate.weight")]
    assert with_gate == [f"model.layers.{i}.mlp.gate.weight" for i in moe]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "model_type=llama"),
    "V3": ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
    "no model type": ({"model_type": None}, "model_type=None"),
    "sigmoid": ({"scoring_func": "sigmoid"}, "scoring_func=sigmoid"),
    "noaux_tc": ({"topk_method": "noaux_tc"}, "topk_method=noaux_tc"),
    "norm_topk_prob": ({"norm_topk_prob": True}, "norm_topk_prob=True"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=fp8"),
    "bias": ({"attention_bias": True}, "attention_bias=True"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    "grouped heads": ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
    "llama3 rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_type=llama3"),
    "unknown rope key": ({"rope_scaling": YARN | {"warp": 1}}, "warp"),
    "rope is no dict": ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
    "negative factor": ({"rope_scaling": YARN | {"factor": -1}}, "factor=-1"),
    "infinite": ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor=inf"),
    "rope base": ({"rope_theta": 1}, "rope_theta=1"),
    "quantised by name": ({"quantization_config": "awq"}, "quantization_config=awq"),
    "no model at all": ({"model_type": None, "architectures": None}, "architectures=None"),
    "heads are missing, key heads are there": (
        {"num_attention_heads": None, "num_key_value_heads": 4},
        "here: num_attention_heads=None",
    ),
    "missing": ({"kv_lora_rank": None}, "kv_lora_rank=None"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size='64'"),
    "true for a number": ({"num_hidden_layers": True}, "num_hidden_layers=True"),
    "zero": ({"vocab_size": 0}, "vocab_size=0"),
    "no shared expert": ({"n_shared_experts": None}, "n_shared_experts=None"),
    "odd rope": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim=15"),
    "too many experts a token": ({"num_experts_per_tok": 9}, "num_experts_per_tok=9, eligible_experts=8"),
    "too few in the groups": (
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1},
        "num_experts_per_tok=2, eligible_experts=1",
    ),
    "uneven groups": ({"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "n_group=3"),
    "eos": ({"eos_token_id": ["x"]}, "eos_token_id=['x']"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_in_one_sentence(name: str) -> None:
    changes, expected = REFUSED[name]
    with pytest.raises(ModelFormatError) as caught:
        parse_model_config(raw(**changes))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_q_lora_rank_must_be_said() -> None:
    """null means none; a missing key would mean another default in another library."""
    silent = raw()
    del silent["q_lora_rank"]
    with pytest.raises(ModelFormatError, match="q_lora_rank"):
        parse_model_config(silent)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_corrupt_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelFormatError, match="config.json"):
        load_model_config(tmp_path)


def test_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="a model is a folder"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelFormatError, match="config.json"):
        load_model_config(tmp_path)


def test_a_valid_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw(eos_token_id=[5, 6])))
    config = load_model_config(tmp_path)
    assert (config.hidden_size, config.eos_token_ids, config.dtype) == (64, (5, 6), "bfloat16")


def test_experts_are_spread_in_blocks() -> None:
    config = parse_model_config(raw())
    assert [list(local_experts(config, ep_rank=r, ep_size=4)) for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for rank, size in ((0, 3), (4, 4), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="n_routed_experts=8"):
            local_experts(config, ep_rank=rank, ep_size=size)


def test_reading_a_config_loads_no_torch() -> None:
    program = "import sys, dbo.model.config, dbo.model.layout, dbo.model.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
