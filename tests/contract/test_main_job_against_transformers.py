"""transformers is the judge of whole runs: ranks, ubatches, exchanges and all, on the same folder, in fp32.

Every row of logits that a rank samples from is compared with what transformers computes for the same prefix in one
piece, and the sampled token with its greedy choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbo.job.rank import RankJob
from dbo.model.config import ModelConfig, load_model_config
from dbo.model.generator import generate_model_folder
from sim.world import SimRun
from tests.sim.job_harness import BACKENDS, SMALL, numeric_job, outcomes_of, run, split_steps, verdict_of

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers judges the model")

RELATIVE = 1e-4
GENERATED = {key: value for key, value in SMALL.items() if key not in ("num_hidden_layers", "hidden_size")}

BATCHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "odd sizes": ((9, 5, 1), (13,)),
    "a request straddles the split": ((13,), (11,)),
    "chunked prefill, mixed with decode": ((30, 4), (21, 3)),
    "a rank without work": ((9, 5), ()),
    "one replica": ((5, 9, 7, 6),),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Judge:
    """transformers' own model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: ModelConfig = load_model_config(folder)
        self.model: Any = transformers.DeepseekV2ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    def logits(self, ids: list[int]) -> np.ndarray:
        """`[len(ids), V]` in one piece, without a cache."""
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("small")
    generate_model_folder(folder, seed=1, hidden_size=64, num_layers=3, **GENERATED)
    return Judge(folder)


def check_against(judge: Judge, job: RankJob, launched: SimRun) -> int:
    """Compare every sampled row; returns how many there were."""
    tokens: dict[str, list[int]] = {}
    rows: dict[str, list[np.ndarray]] = {}
    for outcomes in outcomes_of(launched):
        for outcome in outcomes:
            for request, token in outcome.tokens.items():
                tokens.setdefault(request, []).append(token)
                rows.setdefault(request, []).append(outcome.logits[request])
    for spec in (spec for rank in job.requests for spec in rank):
        prompt, ours = list(spec.prompt_token_ids), np.stack(rows[spec.id])
        assert len(ours) == spec.max_new_tokens
        theirs = judge.logits(prompt + tokens[spec.id][:-1])[len(prompt) - 1 :]
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert error < RELATIVE, f"{spec.id}: relative error {error:.2e}"
        assert tokens[spec.id] == theirs.argmax(-1).tolist(), spec.id
    return sum(map(len, rows.values()))


# One replica has nobody to exchange with: DBO is refused there.
CASES = [(batch, dbo) for batch in BATCHES for dbo in (True, False) if not (dbo and batch == "one replica")]


@pytest.mark.parametrize(("batch", "enable_dbo"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_sampled_row_and_token(small: Judge, backend: str, enable_dbo: bool, batch: str) -> None:
    job = numeric_job(small.folder, small.config, BATCHES[batch], backend=backend, enable_dbo=enable_dbo)
    launched = run(job)
    assert bool(split_steps(launched)) == (enable_dbo and batch != "a rank without work")
    assert check_against(small, job, launched) == 3 * sum(map(len, BATCHES[batch]))
    assert verdict_of(launched).verdict.name == "proved"


@pytest.mark.parametrize("ubatches", [2, 3])
def test_uneven_split_points_and_three_ubatches(small: Judge, ubatches: int) -> None:
    points = {2: (3,), 3: (2, 7)}[ubatches]
    job = numeric_job(
        small.folder,
        small.config,
        ((9, 4), (11, 2)),
        backend="nccl",
        num_ubatches=ubatches,
        split_points=points,
        dbo_decode_token_threshold=ubatches,
    )
    launched = run(job)
    first = outcomes_of(launched)[0][0].slices
    assert [start for start, _ in first] == [0, *points]
    assert check_against(small, job, launched) == 12


def test_a_wrong_cache_block_is_seen(small: Judge) -> None:
    """The comparison is sharp enough: one prompt token changed behind the judge's back turns it over."""
    job = numeric_job(small.folder, small.config, ((9,), (7,)), backend="nccl")
    launched = run(job)
    spec = job.requests[0][0]
    spoilt = type(spec)(id=spec.id, prompt_token_ids=(5, *spec.prompt_token_ids[1:]), max_new_tokens=3)
    with pytest.raises(AssertionError, match="relative error|r0.0"):
        check_against(small, type(job)(**{**vars(job), "requests": ((spoilt,), job.requests[1])}), launched)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_2048_which_every_backend_takes(tmp_path: Path, backend: str) -> None:
    generate_model_folder(tmp_path, seed=2, num_layers=3)
    judge = Judge(tmp_path)
    job = numeric_job(tmp_path, judge.config, ((9, 5, 1), (13,)), backend=backend, new_tokens=2)
    launched = run(job)
    assert split_steps(launched)
    assert check_against(judge, job, launched) == 8
