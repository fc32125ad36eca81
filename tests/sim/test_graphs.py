"""Full graphs in the simulated world with numbers (needs torch): replays with different batches equal eager runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dbo.job.rank import RankJob
from dbo.model.config import ModelConfig
from dbo.model.generator import generate_model_folder
from dbo.trace import Trace
from tests.sim.job_harness import numeric_job, run, verdict_of

REQUESTS = ((5, 7, 3, 6), (4, 9, 2, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("model")
    return folder, generate_model_folder(folder, seed=0, hidden_size=64, num_layers=3)


def split_replays(trace: Trace) -> dict[str, int]:
    """How often rank 0 launched each graph of a split step."""
    found: dict[str, int] = {}
    for record in trace.of_kind("replay"):
        if record.rank == 0 and "+" in record.name:
            found[record.name] = found.get(record.name, 0) + 1
    return found


def logits_of(job: RankJob) -> tuple[dict[tuple[str, int], np.ndarray], Trace]:
    launched = run(job)
    assert str(verdict_of(launched).verdict) == "proved"
    rows: dict[tuple[str, int], np.ndarray] = {}
    for outcomes in launched.values:
        for outcome in outcomes:
            for id, row in outcome.logits.items():
                rows[id, sum(key[0] == id for key in rows)] = row
    return rows, launched.trace


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nccl"])
def test_one_captured_split_graph_replayed_with_other_batches_equals_eager(
    model: tuple[Path, ModelConfig], backend: str
) -> None:
    eager_job = numeric_job(*model, REQUESTS, backend=backend, new_tokens=5)
    graph_job = replace(eager_job, config=eager_job.config.replace(cudagraph_mode="FULL"))
    eager, _ = logits_of(replace(eager_job, keep_logits=True))
    replayed, trace = logits_of(replace(graph_job, keep_logits=True))
    assert max(split_replays(trace).values()) >= 3
    assert eager.keys() == replayed.keys()
    for key, row in eager.items():
        assert np.linalg.norm(replayed[key] - row) <= 1e-5 * np.linalg.norm(row), key


def test_a_replay_wakes_no_ubatch_thread(model: tuple[Path, ModelConfig]) -> None:
    job = numeric_job(*model, REQUESTS, backend="nccl", new_tokens=5)
    _, trace = logits_of(replace(job, config=job.config.replace(cudagraph_mode="FULL"), keep_logits=True))
    replayed_steps = {(r.rank, r.step) for r in trace.of_kind("replay")}
    awake = {(r.rank, r.step) for r in trace.records if r.line in ("u0", "u1") and r.step >= 0}
    assert replayed_steps and not awake & replayed_steps
