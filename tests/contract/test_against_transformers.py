"""transformers is the judge: the same folder, fp32, gives the same logits and the same greedy tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dbo.model.config import load_model_config
from dbo.model.generator import generate_model_folder
from dbo.model.loader import load_weights
from dbo.model.tokenizer import load_tokenizer
from tests.unit.model_harness import SMALL, Paged, build_model

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers judges the model")

RELATIVE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "q_lora off": {"q_lora_rank": None},
    "grouped": {
        # More experts a token than groups: otherwise the limit never binds.
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 16.0,
    },
    "plain rope": {"rope_scaling": None, "rope_theta": 500},
    "mscale differs": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
        }
    },
    "no mscale": {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 256}},
    "newer rope form": {
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.25,
            "truncate": False,
        },
    },
    "tied embeddings": {"tie_word_embeddings": True},
    "two dense layers, one shared expert": {
        "first_k_dense_replace": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
    },
}


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    generate_model_folder(path, seed=7, **(SMALL | VARIANTS[request.param]))
    if "rope_parameters" in VARIANTS[request.param]:  # the newer form has one dict only
        raw = json.loads((path / "config.json").read_text())
        del raw["rope_scaling"], raw["rope_theta"]
        (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.fixture(scope="module")
def judge(folder: Path) -> Any:
    return _judge(folder)


def _judge(folder: Path) -> Any:
    return transformers.DeepseekV2ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _reference(judge: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return judge(torch.tensor([ids]), use_cache=False).logits[0]


def _prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = {"a": 23, "b": 9, "c": 2}
    return {name: torch.randint(0, 256, (n,), generator=generator).tolist() for name, n in lengths.items()}


def assert_same_logits(ours: torch.Tensor, reference: torch.Tensor) -> None:
    error = (ours - reference).abs().max() / reference.abs().max()
    assert error < RELATIVE, f"relative error {error:.2e}"
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


@pytest.mark.parametrize("layout", ["flat", "batched"])
def test_ragged_prefill(folder: Path, judge: Any, layout: str) -> None:
    prompts = _prompts()
    logits = Paged(build_model(folder, layout=layout)).logits(list(prompts.items()))
    for name, ids in prompts.items():
        assert_same_logits(logits[name], _reference(judge, ids))


def test_chunked_prefill_and_decode_through_scattered_blocks(folder: Path, judge: Any) -> None:
    """Chunks end inside blocks of 4, decodes ride along with prefills, and padding is everywhere."""
    prompts = _prompts()
    paged = Paged(build_model(folder), block_size=4)
    chunks = [
        {"a": (0, 6), "b": (0, 3)},
        {"a": (6, 13), "b": (3, 9), "c": (0, 1)},
        {"c": (1, 2), "a": (13, 23)},
    ]
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    for chunk in chunks:
        scheduled = [(name, prompts[name][begin:end]) for name, (begin, end) in chunk.items()]
        for name, logits in paged.logits(scheduled, pad_rows=3, pad_reqs=1).items():
            seen[name].append(logits)
    for name, ids in prompts.items():
        assert_same_logits(torch.cat(seen[name]), _reference(judge, ids))

    generated = {name: [int(seen[name][-1][-1].argmax())] for name in prompts}
    for _ in range(9):
        step = paged.logits([(name, tokens[-1:]) for name, tokens in generated.items()], pad_rows=1)
        for name, logits in step.items():
            generated[name].append(int(logits[-1].argmax()))
    for name, ids in prompts.items():
        prompt = torch.tensor([ids])
        judged = judge.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        assert generated[name] == judged[0, len(ids) :].tolist()


def test_the_config_that_transformers_saves_reads_the_same(folder: Path, judge: Any, tmp_path: Path) -> None:
    judge.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_scaling" not in saved
    ours, theirs = load_model_config(folder), load_model_config(tmp_path)
    assert theirs.dtype == "float32"
    assert (ours.rope_theta, ours.yarn) == (theirs.rope_theta, theirs.yarn)
    assert ours.__dict__ | {"dtype": ""} == theirs.__dict__ | {"dtype": ""}


def test_the_sharded_checkpoint_that_transformers_saves_reads_the_same(
    folder: Path, judge: Any, tmp_path: Path
) -> None:
    judge.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config = load_model_config(tmp_path)
    ours, theirs = (load_weights(path, config, dtype=torch.float32) for path in (folder, tmp_path))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_full_size_folder(tmp_path: Path) -> None:
    generate_model_folder(tmp_path, seed=0)
    ids = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = Paged(build_model(tmp_path), block_size=16).logits([("a", ids)])["a"]
    assert_same_logits(logits, _reference(_judge(tmp_path), ids))


def test_the_judge_tells_a_wrong_model(tmp_path: Path) -> None:
    """The comparison can fail: one weight, one rope parameter, one norm constant."""
    generate_model_folder(tmp_path / "right", seed=7, **SMALL)
    ids = _prompts()["a"]
    reference = _reference(_judge(tmp_path / "right"), ids)
    shutil.copytree(tmp_path / "right", tmp_path / "wrong")
    raw = json.loads((tmp_path / "wrong/config.json").read_text())
    for name, change in {
        "mscale_all_dim": {"rope_scaling": raw["rope_scaling"] | {"mscale_all_dim": 0.7, "mscale": 0.7}},
        "rope_theta": {"rope_theta": 9990},
        "top_k": {"num_experts_per_tok": 1},
        "scaling": {"routed_scaling_factor": 1.001},
    }.items():
        (tmp_path / "wrong/config.json").write_text(json.dumps(raw | change))
        logits = Paged(build_model(tmp_path / "wrong")).logits([("a", ids)])["a"]
        with pytest.raises(AssertionError, match="relative error"):
            assert_same_logits(logits, reference)
            pytest.fail(f"a wrong {name} went unnoticed")


def test_the_byte_tokenizer_agrees_with_the_fields_own(tmp_path: Path) -> None:
    generate_model_folder(tmp_path, seed=0, **SMALL)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours.vocab_size == len(theirs)
    for text in ("", "hello  world\n", "한국어 ↯ naïve 👩‍👧", "a<|eos|>b<|bos|>", "<|eos", "\x00\x7f\xa0\xad"):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids) == text
