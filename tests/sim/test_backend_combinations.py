"""Backend x schedule x ubatches x ranks x graph mode: accepted ones give the reference's tokens, the others are refused.

Accepted ones are run so that every two values that go together meet at least once; the nightly run takes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from dbo.config import BACKENDS, ModelShape, validate
from dbo.errors import ConfigError, ScheduleError
from dbo.job.local import LocalWorld
from dbo.job.rank import RankJob, RankMain
from dbo.model.config import ModelConfig
from dbo.model.generator import generate_model_folder
from dbo.schedule import load_schedule, presets
from dbo.schedule import validate as validate_schedule
from tests.sim.job_harness import SMALL, config, numeric_job, run, split_steps, tokens_of, verdict_of

Model = tuple[Path, ModelConfig]

# What is asked for, by rank. Some steps split, some do not; with four ranks one is idle at the end.
LENGTHS = {2: ((6, 3), (7,)), 4: ((6,), (3, 4), (5,), (7,))}


@dataclass(frozen=True)
class Combination:
    """One of each. `schedule` "" is the backend's own; `ubatches` 1 is DBO off."""

    backend: str
    schedule: str
    ubatches: int
    ranks: int
    graphs: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.schedule or 'default'}-U{self.ubatches}-R{self.ranks}-{self.graphs}"

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "data_parallel_size": self.ranks,
            "enable_dbo": self.ubatches > 1,
            "cudagraph_mode": self.graphs,
            "max_num_seqs": 4,
        }
        if self.graphs == "FULL":
            options["capture_sizes"] = (4,)
        if self.ubatches > 1:
            options |= {"num_ubatches": self.ubatches, "dbo_decode_token_threshold": self.ubatches}
        if self.schedule:
            options["dbo_schedule"] = self.schedule
        return options


EVERY = [Combination(*values) for values in product(BACKENDS, ("", *presets()), (2, 1, 3), (2, 4), ("NONE", "FULL"))]


def is_accepted(one: Combination) -> bool:
    """The rule, in other words than the code's."""
    if one.ubatches == 1:
        return not one.schedule  # a schedule without DBO would be ignored
    chosen = load_schedule(one.schedule or BACKENDS[one.backend].schedule)
    if one.backend not in chosen.backends:
        return False
    return one.ubatches == 2 or (one.backend != "deepep_low_latency" and chosen.offset == 0)


ACCEPTED = [one for one in EVERY if is_accepted(one)]


def judge(one: Combination) -> None:
    """What `dbo check` asks before it runs anything."""
    chosen = config(one.backend, **one.options)
    shape = ModelShape(hidden_size=2048, num_experts=8, num_heads=4)
    validate(chosen, shape, capabilities=("any_dtype",))
    if chosen.enable_dbo:
        validate_schedule(load_schedule(chosen.dbo_schedule), backend=one.backend, num_ubatches=chosen.num_ubatches)


def test_every_combination_is_accepted_or_refused_by_name() -> None:
    wrong = []
    for one in EVERY:
        try:
            judge(one)
            accepted, why = True, ""
        except (ConfigError, ScheduleError) as error:
            accepted, why = False, str(error)
        if accepted != is_accepted(one) or (not accepted and "=" not in why):
            wrong.append((str(one), why))
    assert wrong == []
    assert len(EVERY) == 5 * 8 * 3 * 2 * 2
    assert 0 < len(ACCEPTED) < len(EVERY)


def pairwise(items: list[Combination]) -> Iterator[Combination]:
    """Greedy: the one that covers most pairs of values that nobody has covered yet, until all are covered."""

    def pairs(one: Combination) -> set[Any]:
        values = list(vars(one).items())
        return set(combinations(values, 2))

    left = set().union(*map(pairs, items))
    while left:
        best = max(items, key=lambda one: len(pairs(one) & left))
        left -= pairs(best)
        yield best


SAMPLE = list(pairwise(ACCEPTED))


def test_the_sample_is_small_and_meets_every_preset_on_every_backend_that_it_declares() -> None:
    run_pairs = {(one.schedule, one.backend) for one in SAMPLE if one.ubatches > 1}
    declared = {(name, backend) for name, schedule in presets().items() for backend in schedule.backends}
    assert declared <= run_pairs
    assert len(SAMPLE) < len(ACCEPTED) / 3


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices: more threads than one only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    changes = {key: value for key, value in SMALL.items() if key not in ("num_hidden_layers", "hidden_size")}
    return folder, generate_model_folder(folder, seed=1, hidden_size=64, num_layers=3, **changes)


@pytest.fixture(scope="module")
def reference(model: Model) -> Callable[[int], dict[str, list[int]]]:
    """The tokens of the same requests on one rank, unsplit, on plain CPU tensors."""
    kept: dict[int, dict[str, list[int]]] = {}

    def tokens(ranks: int) -> dict[str, list[int]]:
        if ranks not in kept:
            job = job_of(model, Combination("nccl", "", 1, ranks, "NONE"))
            alone = config("nccl", data_parallel_size=1, enable_dbo=False, num_kv_blocks=256, max_num_batched_tokens=64)
            twin = replace(job, config=alone, requests=[[spec for rank in job.requests for spec in rank]])
            found: dict[str, list[int]] = {}
            for outcome in RankMain(twin)(LocalWorld()):
                for request, token in outcome.tokens.items():
                    found.setdefault(request, []).append(token)
            kept[ranks] = found
        return kept[ranks]

    return tokens


def job_of(model: Model, one: Combination) -> RankJob:
    options = {key: value for key, value in one.options.items() if key != "dbo_schedule"}
    return numeric_job(*model, LENGTHS[one.ranks], backend=one.backend, schedule=one.schedule, new_tokens=3, **options)


def check_tokens(model: Model, one: Combination, expected: dict[str, list[int]]) -> None:
    launched = run(job_of(model, one))
    assert str(verdict_of(launched).verdict) == "proved"
    found = tokens_of(launched)
    assert found == expected
    assert bool(split_steps(launched)) == (one.ubatches > 1)


@pytest.mark.parametrize("one", SAMPLE, ids=str)
def test_a_sample_gives_the_tokens_of_the_reference(
    model: Model, reference: Callable[[int], dict[str, list[int]]], one: Combination
) -> None:
    check_tokens(model, one, reference(one.ranks))


@pytest.mark.slow
@pytest.mark.parametrize("one", [one for one in ACCEPTED if one not in SAMPLE], ids=str)
def test_all_others_give_them_too(
    model: Model, reference: Callable[[int], dict[str, list[int]]], one: Combination
) -> None:
    check_tokens(model, one, reference(one.ranks))
