"""Weights: this rank's experts, joined projections, and every way in which a folder can be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dbo.errors import ModelFormatError
from dbo.model.config import load_model_config
from dbo.model.generator import generate_model_folder
from dbo.model.loader import load_weights
from tests.unit.model_harness import SMALL

GATE = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.2.mlp.experts.5.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate_model_folder(tmp_path, seed=1, **SMALL)
    return tmp_path


def load(folder: Path, **options: int) -> dict[str, torch.Tensor]:
    return load_weights(folder, load_model_config(folder), dtype=torch.float32, **options)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_projections_are_joined_and_experts_stacked(folder: Path) -> None:
    stored, loaded = load_file(folder / "model.safetensors"), load(folder)
    mlp = "model.layers.2.mlp"
    for expert in range(8):
        gate, up, down = (stored[f"{mlp}.experts.{expert}.{p}_proj.weight"].float() for p in ("gate", "up", "down"))
        assert torch.equal(loaded[f"{mlp}.experts.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(loaded[f"{mlp}.experts.down_proj"][expert], down.t())
    assert loaded["model.layers.0.mlp.gate_up_proj.weight"].shape == (96, 64)
    assert not [name for name in loaded if ".gate_proj." in name or ".up_proj." in name]


def test_each_rank_loads_its_own_experts_only(folder: Path) -> None:
    everything = load(folder)
    ranks = [load(folder, ep_rank=rank, ep_size=4) for rank in range(4)]
    assert all(rank.keys() == everything.keys() for rank in ranks)
    for name, tensor in everything.items():
        parts = [rank[name] for rank in ranks]
        if ".mlp.experts." in name:
            assert all(part.shape[0] == 2 for part in parts)
            assert torch.equal(torch.cat(parts), tensor)
        else:
            assert all(torch.equal(part, tensor) for part in parts)


def test_the_router_stays_fp32(folder: Path) -> None:
    weights = load_weights(folder, load_model_config(folder), dtype=torch.bfloat16)
    kept = {name for name, w in weights.items() if w.dtype == torch.float32}
    assert kept == {f"model.layers.{i}.mlp.gate.weight" for i in (1, 2, 3)} | {"model.rotary_emb.inv_freq"}


def shard(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{i % 3}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_read_like_one_file(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    sharded = load(folder)
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[n], sharded[n]) for n in whole)


def test_missing_shard_and_bad_index(folder: Path) -> None:
    weight_map = shard(folder)
    (folder / weight_map[GATE]).unlink()
    with pytest.raises(ModelFormatError, match=weight_map[GATE]):
        load(folder)
    for bad in ({}, {"weight_map": {}}, {"weight_map": {GATE: "../model.safetensors"}}, {"weight_map": {GATE: 3}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(bad))
        with pytest.raises(ModelFormatError, match="index"):
            load(folder)


def test_tied_embeddings_ignore_a_stored_head(tmp_path: Path) -> None:
    generate_model_folder(tmp_path, seed=1, tie_word_embeddings=True, **SMALL)
    before = load(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(1)}))
    assert load(tmp_path).keys() == before.keys() and "lm_head.weight" not in before


@pytest.mark.parametrize("name", [GATE, EXPERT, "lm_head.weight"])
def test_missing_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda t: t.pop(name))
    with pytest.raises(ModelFormatError, match=f"missing=1, first={name}"):
        load(folder)


def test_a_tensor_of_another_ranks_expert_is_missed_too(folder: Path) -> None:
    edit(folder, lambda t: t.pop(EXPERT))
    with pytest.raises(ModelFormatError, match=EXPERT):
        load(folder, ep_rank=0, ep_size=4)


def test_mis_shaped_unknown_and_quantised_tensors(folder: Path) -> None:
    original = (folder / "model.safetensors").read_bytes()
    for change, expected in (
        ({GATE: torch.zeros(8, 63)}, r"gate.weight, expected=\(8, 64\), found=\(8, 63\)"),
        ({"model.layers.9.norm.weight": torch.zeros(1)}, "unknown=model.layers.9.norm.weight"),
        ({GATE: torch.zeros(8, 64, dtype=torch.int8)}, "dtype=I8"),
    ):
        (folder / "model.safetensors").write_bytes(original)
        edit(folder, lambda tensors, change=change: tensors.update(change))
        with pytest.raises(ModelFormatError, match=expected):
            load(folder)


@pytest.mark.parametrize("keep_bytes", [0, 4, 200, 100_000])
def test_truncated_file(folder: Path, keep_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ModelFormatError, match="model.safetensors"):
        load(folder)


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json"])
def test_a_pickled_checkpoint_is_refused_by_name(folder: Path, pickled: str) -> None:
    (folder / "model.safetensors").rename(folder / pickled)
    with pytest.raises(ModelFormatError, match=f"pickled.*file={pickled}"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="weights are in model.safetensors"):
        load(folder)
