"""Runs with numbers: DBO is bit-equal to its halves run serially, and gives the unsplit model's tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dbo.engine.components import Components
from dbo.errors import EngineError
from dbo.job.compare import margin
from dbo.job.local import LocalWorld
from dbo.job.rank import RankJob, RankMain
from dbo.model.config import ModelConfig
from dbo.model.generator import generate_model_folder
from sim.cost import CostTable
from sim.faults import CATALOGUE
from sim.tasks import Task
from sim.world import SimRun
from tests.sim.job_harness import (
    BACKENDS,
    SMALL,
    config,
    numeric_job,
    outcomes_of,
    run,
    split_steps,
    tokens_of,
    verdict_of,
)
from tests.sim.test_errors import in_segment

RELATIVE = 1e-5
MARGIN = 1e-5
GENERATED = {key: value for key, value in SMALL.items() if key not in ("num_hidden_layers", "hidden_size")}

Rows = dict[str, np.ndarray]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices: more threads than one only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("model")
    return folder, generate_model_folder(folder, seed=1, hidden_size=64, num_layers=3, **GENERATED)


# What is asked for, by rank; a step holds 16 tokens of a rank.
BATCHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "odd sizes": ((9, 5, 1), (13,)),
    "a request straddles the split": ((13,), (11,)),
    "chunked prefill": ((30, 4), (21,)),
    "a rank without work": ((9, 5), ()),
    "one replica": ((5, 9, 7, 6),),
}


def logits_of(launched: SimRun) -> Rows:
    """Every request's rows of logits, in order."""
    found: dict[str, list[np.ndarray]] = {}
    for outcomes in outcomes_of(launched):
        for outcome in outcomes:
            for request, row in outcome.logits.items():
                found.setdefault(request, []).append(row)
    return {request: np.stack(rows) for request, rows in found.items()}


def alone(job: RankJob) -> tuple[dict[str, list[int]], Rows]:
    """The same requests on one rank, unsplit, on plain CPU tensors."""
    single = config("nccl", data_parallel_size=1, enable_dbo=False, num_kv_blocks=256, max_num_batched_tokens=64)
    twin = replace(job, config=single, requests=[[spec for rank in job.requests for spec in rank]], serial=False)
    tokens: dict[str, list[int]] = {}
    rows: dict[str, list[np.ndarray]] = {}
    for outcome in RankMain(twin)(LocalWorld()):
        for request, token in outcome.tokens.items():
            tokens.setdefault(request, []).append(token)
            rows.setdefault(request, []).append(outcome.logits[request])
    return tokens, {request: np.stack(row) for request, row in rows.items()}


def forced_drains(launched: SimRun) -> list[str]:
    """Host waits that the program did not declare, by source."""
    return [r.name for r in launched.trace.of_kind("host.wait") if not r.attrs["declared"]]


def check_like_alone(launched: SimRun, job: RankJob) -> None:
    """Same greedy tokens, logits within rounding, no forced drain, a good verdict."""
    tokens, rows = alone(job)
    seconds = [margin(row, int(row.argsort()[-2])) for stack in rows.values() for row in stack]
    assert min(seconds) > MARGIN, "the reference itself is undecided"
    assert tokens_of(launched) == tokens
    for request, row in logits_of(launched).items():
        error = np.abs(row - rows[request]).max() / np.abs(rows[request]).max()
        assert error < RELATIVE, f"{request}: relative error {error:.2e}"
    assert forced_drains(launched) == []
    report = verdict_of(launched)
    assert report.verdict.name == "proved", report.violations


# One replica has nobody to exchange with: DBO is refused there.
CASES = [(batch, dbo) for batch in BATCHES for dbo in (True, False) if not (dbo and batch == "one replica")]


@pytest.mark.parametrize(("batch", "enable_dbo"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_and_logits_are_those_of_the_unsplit_model_alone(
    model: tuple[Path, ModelConfig], backend: str, enable_dbo: bool, batch: str
) -> None:
    job = numeric_job(*model, BATCHES[batch], backend=backend, enable_dbo=enable_dbo)
    launched = run(job)
    assert bool(split_steps(launched)) == (enable_dbo and batch != "a rank without work")
    check_like_alone(launched, job)


def test_three_ubatches(model: tuple[Path, ModelConfig]) -> None:
    job = numeric_job(*model, ((13, 3), (11, 5)), backend="nccl", num_ubatches=3, dbo_decode_token_threshold=3)
    launched = run(job)
    assert len(outcomes_of(launched)[0][0].slices) == 3
    check_like_alone(launched, job)


@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "sglang_decode", "lightllm_decode"])
def test_another_schedule_gives_the_same_numbers(model: tuple[Path, ModelConfig], schedule: str) -> None:
    job = numeric_job(*model, ((13, 3), (11, 5)), backend="nccl", schedule=schedule)
    check_like_alone(run(job), job)


@pytest.mark.parametrize("batch", ["odd sizes", "a request straddles the split", "chunked prefill"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_halves_run_serially_are_bit_equal_to_dbo(
    model: tuple[Path, ModelConfig], backend: str, batch: str
) -> None:
    job = numeric_job(*model, BATCHES[batch], backend=backend)
    overlapped, serial = run(job), run(replace(job, serial=True))
    assert split_steps(overlapped) == split_steps(serial) != []
    assert list(serial.trace.of_kind("ubatch.enter")) == [], "the twin has no ring"
    ours, theirs = logits_of(overlapped), logits_of(serial)
    assert ours.keys() == theirs.keys()
    assert [r for r in ours if ours[r].tobytes() != theirs[r].tobytes()] == []


# -- faults in the numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drop-wait", "early-event", "early-read"])
def test_a_missing_wait_is_a_race_that_names_both_lines_and_shows_in_the_numbers(
    model: tuple[Path, ModelConfig], name: str
) -> None:
    (fault,) = [f for f in CATALOGUE if f.name == name]
    job = numeric_job(*model, ((13, 3), (11, 5)), backend="nccl")
    # A slow link: in the canonical run the bytes come late enough for the race to be lost.
    launched = run(replace(job, program_of=fault.programs(job.config, "")), cost=CostTable(collective_us=500.0))
    report = verdict_of(launched)
    assert report.verdict.text == "violated(stream-race)"
    race = next(v for v in report.violations if v.id == "stream-race")
    assert (race.rank, race.ubatch) == (1, 0)
    lines = re.findall(r"at ([\w/]+\.py):\d+", race.sentence)
    assert len(lines) == 2 and all((Path(__file__).parents[2] / line).is_file() for line in lines), race.sentence
    assert any(line.startswith(("dbo/moe/nccl", "dbo/moe/row_ops")) for line in lines), race.sentence

    clean = run(job)
    assert verdict_of(clean).verdict.name == "proved"
    poisoned = any(isinstance(o.error, EngineError) for outcomes in launched.values for o in outcomes or ())
    differs = not poisoned and any(
        not np.array_equal(row, logits_of(clean)[request]) for request, row in logits_of(launched).items()
    )
    assert poisoned or differs


class FirstRanksFirst:
    """Runs whatever rank 0 can run, then rank 1: a host that is far ahead of its peer."""

    def choose(self, ready: Sequence[Task]) -> int:
        return min(range(len(ready)), key=lambda i: ready[i].rank)


@pytest.mark.parametrize("strategy", [None, FirstRanksFirst()], ids=["canonical", "rank 0 ahead"])
@pytest.mark.parametrize("segment", [0, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_failed_step_the_tokens_are_those_of_a_clean_run(
    model: tuple[Path, ModelConfig], backend: str, segment: int, strategy: FirstRanksFirst | None
) -> None:
    """Rank 0's first step samples nothing, so its host has no number to wait for; still it must not run ahead.

    If it did, it would count on keys that the failed step never wrote.
    """
    job = numeric_job(*model, ((30, 4), (9, 5)), backend=backend)
    program = in_segment(0, segment)
    launched = run(replace(job, program_of=lambda rank: program if rank == 1 else Components()), strategy=strategy)
    failed = [[o.step for o in outcomes if o.error is not None] for outcomes in outcomes_of(launched)]
    assert failed == [[0], [0]]
    assert tokens_of(launched) == alone(job)[0]
    report = verdict_of(launched, expect_raise=True)
    assert report.verdict.good, report.violations
