"""The model on a DCP group, with numbers: tokens of one rank that has all keys, with DBO, without, and in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra `torch`)")

from dbo.engine.components import Components  # noqa: E402
from dbo.engine.runner import StepOutcome  # noqa: E402
from dbo.job.compare import compare  # noqa: E402
from dbo.job.local import LocalWorld  # noqa: E402
from dbo.job.rank import RankJob, RankMain  # noqa: E402
from dbo.model.config import load_model_config  # noqa: E402
from dbo.model.generator import generate_model_folder  # noqa: E402
from sim.faults import dcp_group as faults  # noqa: E402
from sim.world import SimRun  # noqa: E402
from tests.sim.job_harness import SMALL, config, numeric_job, outcomes_of, run, split_steps, verdict_of  # noqa: E402

LENGTHS = {1: ((7, 3, 1, 4),), 2: ((7, 3), (1, 4))}
Found = dict[str, tuple[list[int], list[Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    generate_model_folder(path, seed=3, **(SMALL | {"num_hidden_layers": 2}))
    return path


def job(folder: Path, exchange: str, replicas: int, size: int, **options: Any) -> RankJob:
    dcp = {"decode_context_parallel_size": size, "dcp_comm_backend": exchange}
    return numeric_job(folder, load_model_config(folder), LENGTHS[replicas], new_tokens=3, **(dcp | options))


def by_request(outcomes: Sequence[Sequence[StepOutcome]]) -> Found:
    found: Found = {}
    for ranks in outcomes:
        for outcome in ranks:
            for id, token in outcome.tokens.items():
                tokens, logits = found.setdefault(id, ([], []))
                tokens.append(token)
                logits.append(outcome.logits[id])
    return found


def reference(asked: RankJob) -> Found:
    """The same requests on one rank on plain CPU tensors, which has all keys and is never split."""
    alone = config(data_parallel_size=1, enable_dbo=False, enable_expert_parallel=False, num_kv_blocks=256)
    together = [[spec for mine in asked.requests for spec in mine]]
    twin = replace(asked, config=alone, requests=together, program_of=lambda rank: Components())
    return by_request([RankMain(twin)(LocalWorld())])


def every_peer_agrees_with_the_reference(launched: SimRun, asked: RankJob) -> bool:
    size = asked.config.decode_context_parallel_size
    want, outcomes = reference(asked), outcomes_of(launched)
    said = [compare(want, by_request(outcomes[peer::size]), dtype="float32") for peer in range(size)]
    return all(s.tokens_equal and s.max_rel_err is not None and s.max_rel_err < 1e-4 for s in said)


CASES = (
    ("a2a", 1, 2, {}),
    ("ag_rs", 1, 2, {"enable_dbo": False, "cp_kv_cache_interleave_size": 2}),
    ("a2a_direct", 2, 2, {}),
    ("a2a", 2, 2, {"enable_dbo": False}),
    ("ag_rs", 1, 4, {"cp_kv_cache_interleave_size": 4}),
    ("a2a_direct", 1, 4, {"enable_dbo": False}),
    ("a2a", 2, 2, {"cudagraph_mode": "FULL", "capture_sizes": (2, 4, 8)}),
    ("a2a_direct", 1, 4, {"cudagraph_mode": "FULL", "capture_sizes": (4, 8)}),
    ("a2a", 1, 2, {"cudagraph_mode": "FULL", "capture_sizes": (4, 8), "enable_dbo": False}),
    ("a2a", 1, 2, {"cudagraph_mode": "FULL", "capture_sizes": (4, 8)}),
    ("a2a_direct", 1, 2, {"cudagraph_mode": "FULL", "capture_sizes": (4, 8), "backend": "deepep_low_latency"}),
)


@pytest.mark.parametrize(
    ("exchange", "replicas", "size", "options"),
    CASES,
    ids=[f"{e}-dp{r}-dcp{c}-{'-'.join(f'{k}={v}' for k, v in o.items())}" for e, r, c, o in CASES],
)
def test_tokens_are_those_of_one_rank(
    folder: Path, exchange: str, replicas: int, size: int, options: dict[str, Any]
) -> None:
    asked = job(folder, exchange, replicas, size, **options)
    launched = run(asked)
    report = verdict_of(launched)
    assert str(report.verdict) == "proved", report.violations
    assert bool(split_steps(launched)) is asked.config.enable_dbo
    assert any(launched.trace.of_kind("replay")) is ("cudagraph_mode" in options)
    assert every_peer_agrees_with_the_reference(launched, asked)


def test_an_empty_shard_that_counts_changes_the_logits(folder: Path) -> None:
    """The comparison can fail: a request of one token has no key on peer 1, and LSE 0 gives that shard a weight."""
    asked = job(folder, "a2a", 1, 2, enable_dbo=False)
    wrong = replace(asked, program_of=lambda rank: faults.plant(faults.zero_lse_of_empty_shards))
    assert not every_peer_agrees_with_the_reference(run(wrong), asked)
