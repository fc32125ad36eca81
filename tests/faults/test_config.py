"""Options that are accepted, and then ignored or fatal."""

from __future__ import annotations

from typing import Any

import pytest

from dbo.check import judge
from dbo.config import DBOConfig, ModelShape, effective, validate
from dbo.errors import ConfigError
from dbo.job.rank import RankJob, run_rank
from dbo.schedule import load_schedule
from dbo.trace import Trace
from tests.faults.pair import Pair, check_pair, run
from tests.sim.job_harness import ordering_job

SHAPE = ModelShape(hidden_size=64, num_experts=8, num_heads=4)


def started(*, validates: bool, **options: Any) -> Trace:
    """A whole run from a command line: options, validation (or not), ranks."""
    given: dict[str, Any] = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_dbo": True,
        "all2all_backend": "nccl",
        "dbo_decode_token_threshold": 2,
        "dbo_prefill_token_threshold": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_model_len": 128,
        "block_size": 4,
        "num_kv_blocks": 64,
        "dtype": "float32",
    } | options
    config = DBOConfig(**given)
    if validates:
        validate(config, SHAPE)
    lengths = ((9, 5), (7, 6))[: config.data_parallel_size]
    template = ordering_job(lengths)
    job = RankJob(
        config=config,
        model_config=template.model_config,
        schedule=load_schedule("mlp_shared_overlap"),
        requests=template.requests,
    )
    return run(lambda world: run_rank(world, job), ranks=config.num_ranks, config=effective(config), backend="nccl")


def refused(name: str, *, says: str, option: str, **options: Any) -> Pair:
    return Pair(
        case="vllm-project/vllm#54493",
        name=name,
        id="config",
        uses="dbo.config.validate",
        buggy=lambda: started(validates=False, **options),
        fixed=lambda: started(validates=True, **options),
        culprit={"rank": 0},
        says=(says,),
        refuses=option,
    )


PAIRS = [
    refused(
        "backend",
        says="died in set-up with ArgumentError",
        option="all2all_backend=allgather",
        all2all_backend="allgather",
    ),
    refused("one rank", says="data_parallel_size=1", option="data_parallel_size=1", data_parallel_size=1),
    refused(
        "no experts",
        says="enable_expert_parallel=False",
        option="enable_expert_parallel=False",
        enable_expert_parallel=False,
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


@pytest.mark.parametrize("option", ["dbo_decode_token_threshold", "dbo_prefill_token_threshold"])
@pytest.mark.parametrize("threshold", [0, 1])
def test_a_threshold_below_one_token_a_ubatch_is_refused_by_name(option: str, threshold: int) -> None:
    with pytest.raises(ConfigError, match=f"{option}={threshold}"):
        started(validates=True, **{option: threshold})


def test_valid_tuples_start_and_run_to_the_end() -> None:
    trace = started(validates=True, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    assert judge(trace).verdict.text == "proved"
    assert any(record.attrs["decision"]["split"] for record in trace.of_kind("decide"))


def test_valid_without_dbo_too() -> None:
    off = {"enable_dbo": False, "dbo_decode_token_threshold": None, "dbo_prefill_token_threshold": None}
    trace = started(validates=True, **off)
    assert judge(trace).verdict.text == "proved"
    assert not any(record.attrs["decision"]["split"] for record in trace.of_kind("decide"))
