"""What the tests of whole runs share: a small model, jobs over it, and how to launch them. No torch without numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dbo.check import judge
from dbo.check.report import Report
from dbo.config import DBOConfig, effective
from dbo.engine.components import Components
from dbo.engine.runner import StepOutcome
from dbo.job.rank import FolderWeights, RankJob, RankMain, RequestSpec
from dbo.model.config import ModelConfig, parse_model_config
from dbo.schedule import load_schedule, parse_schedule, to_text
from sim.world import SimRun, launch

BACKENDS = ("deepep_low_latency", "nccl")

SMALL: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}


def config(backend: str = "nccl", **changes: Any) -> DBOConfig:
    """Two ranks, small steps, thresholds that most steps reach."""
    options: dict[str, Any] = {
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_dbo": True,
        "all2all_backend": backend,
        "dbo_decode_token_threshold": 2,
        "dbo_prefill_token_threshold": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_model_len": 128,
        "block_size": 4,
        "num_kv_blocks": 64,
        "dtype": "float32",
    }
    if backend == "deepep_low_latency":
        options["low_latency_max_tokens_per_rank"] = 16
    options |= changes
    if not options["enable_dbo"]:
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            options.pop(name)
    return DBOConfig(**options)


def requests(lengths: Sequence[Sequence[int]], new_tokens: int = 3) -> tuple[tuple[RequestSpec, ...], ...]:
    """Prompts of the given lengths, by rank; their tokens depend on nothing but the request's place."""
    return tuple(
        tuple(
            RequestSpec(
                id=f"r{rank}.{i}",
                prompt_token_ids=tuple((37 * rank + 11 * i + 7 * t * t + 3 * t) % 256 for t in range(n)),
                max_new_tokens=new_tokens,
            )
            for i, n in enumerate(mine)
        )
        for rank, mine in enumerate(lengths)
    )


def ordering_job(
    lengths: Sequence[Sequence[int]] = ((9, 5), (7, 6)),
    *,
    backend: str = "nccl",
    schedule: str = "",
    new_tokens: int = 3,
    programs: Callable[[int], Components] | None = None,
    model: dict[str, Any] | None = None,
    **changes: Any,
) -> RankJob:
    """A job without numbers. `schedule` is a preset's name, or the text of a schedule."""
    chosen = config(backend, **({"data_parallel_size": len(lengths)} | changes))
    text = schedule or chosen.dbo_schedule
    job = RankJob(
        config=chosen,
        model_config=parse_model_config(SMALL | (model or {})),
        schedule=parse_schedule(text) if "\n" in text else load_schedule(text),
        requests=requests(lengths, new_tokens),
    )
    return job if programs is None else replace(job, program_of=programs)


def numeric_job(folder: Path, model_config: ModelConfig, *args: Any, **kwargs: Any) -> RankJob:
    """The same job with the weights of `folder`; its outcomes keep their logits."""
    job = ordering_job(*args, **kwargs)
    weights_of = FolderWeights(folder=str(folder), config=model_config, dtype=job.config.dtype)
    return replace(job, model_config=model_config, weights_of=weights_of, keep_logits=True)


def run(job: RankJob, **options: Any) -> SimRun:
    """Launch the job, and put into the trace's meta what `dbo check` puts there."""
    mode = "ordering" if job.weights_of is None else "numeric"
    launched = launch(RankMain(job), ranks=job.config.num_ranks, mode=mode, **options)
    launched.trace.meta |= {
        "backend": job.config.all2all_backend,
        "schedule": to_text(job.schedule),
        "ubatches": job.config.num_ubatches,
        "seed": 0,
        "config": effective(job.config),
    }
    return launched


def verdict_of(launched: SimRun, *, expect_raise: bool = False) -> Report:
    """What the detectors say."""
    return judge(launched.trace, expect_raise=expect_raise)


def outcomes_of(launched: SimRun) -> list[list[StepOutcome]]:
    """What every rank did. A rank whose program raised out of its main task fails the test here."""
    assert launched.errors == [None] * len(launched.errors), launched.errors
    return [list(value) for value in launched.values]


def tokens_of(launched: SimRun) -> dict[str, list[int]]:
    """Every request's tokens, over all ranks and steps."""
    found: dict[str, list[int]] = {}
    for outcomes in outcomes_of(launched):
        for outcome in outcomes:
            for request, token in outcome.tokens.items():
                found.setdefault(request, []).append(token)
    return found


def split_steps(launched: SimRun) -> list[int]:
    """The steps that ran in ubatches on rank 0."""
    return [o.step for o in outcomes_of(launched)[0] if o.decision is not None and o.decision.split]
