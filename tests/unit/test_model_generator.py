"""The generated folder: the same bytes for a seed, quick, and with margins that greedy tokens can be compared by."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dbo.errors import ModelFormatError
from dbo.model.config import load_model_config
from dbo.model.generator import generate_model_folder
from tests.unit.model_harness import SMALL, Paged, build_model, margins


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        generate_model_folder(tmp_path / name, seed=seed, **SMALL)
    first, again, other = (digests(tmp_path / name) for name in "abc")
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_weights_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """They come from integers, so a digest can be written down."""
    generate_model_folder(tmp_path, seed=1, **SMALL)
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(tmp_path / "model.safetensors").items()):
        digest.update(name.encode() + tensor.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == "eb4815ff66b98431a4da7a80615c927cae9df9a18817b46d5031e12d93aac44d"


def test_the_written_config_reads_back(tmp_path: Path) -> None:
    assert generate_model_folder(tmp_path, seed=0, n_routed_experts=16, **SMALL) == load_model_config(tmp_path)


def test_a_config_that_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="num_experts_per_tok=9"):
        generate_model_folder(tmp_path / "new", seed=0, num_experts_per_tok=9, **SMALL)
    assert not (tmp_path / "new").exists()


def test_margins_of_the_default_folder(tmp_path: Path) -> None:
    """Top-1 and routing decide by far more than rounding: fp32 errors are below 1e-5 of the logits' size."""
    generate_model_folder(tmp_path, seed=0)
    model = build_model(tmp_path)
    found = margins(model, num_prompts=8, prompt_tokens=64, seed=1)
    assert found["logits"].p01 > 1e-2 and found["logits"].median > 1
    assert found["routing"].p02 > 1e-3 and found["routing"].median > 1e-2


def test_generated_text_depends_on_the_whole_prompt(tmp_path: Path) -> None:
    """Attention has weight: another first token changes what is generated after the last one."""
    generate_model_folder(tmp_path, seed=0, **SMALL)
    model = build_model(tmp_path)
    prompt = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    changed = [(prompt[0] + 1) % 256, *prompt[1:]]
    logits = Paged(model).logits([("a", prompt), ("b", changed)])
    apart = (logits["a"][-1] - logits["b"][-1]).abs().max()
    assert apart > 0.1
