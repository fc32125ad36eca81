"""One rank's whole program: build the model, the cache, the wrapper and the runner in a world, then step to the end.

This is what a world's `launch` runs on every rank, simulated or real, and what the reference runs on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dbo.config import DBOConfig, compare_configs, effective, facts
from dbo.contract.world import World, symbolic_tensors, torch_tensors
from dbo.dcp.interface import ContextParallel, DCPShape
from dbo.engine.components import Components
from dbo.engine.requests import Request
from dbo.engine.runner import GPUModelRunner, LoadedModel, StepOutcome
from dbo.engine.scheduler import RequestScheduler
from dbo.errors import ArgumentError
from dbo.model.config import ModelConfig
from dbo.moe.deepep_high_throughput import DeepEPHighThroughputPrepareAndFinalize
from dbo.moe.deepep_low_latency import DeepEPLowLatencyPrepareAndFinalize
from dbo.moe.deepep_v2 import DeepEPV2PrepareAndFinalize
from dbo.moe.interface import FusedMoEPrepareAndFinalizeModular
from dbo.moe.nccl import NcclPrepareAndFinalize
from dbo.moe.side_stream import SideStream
from dbo.moe.symm_copy import NEARLY_ALL, SymmCopyPrepareAndFinalize, share_needed
from dbo.schedule import Schedule
from dbo.trace import kinds
from dbo.ubatching.wrapper import UBatchWrapper


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """A request as the job states it. Ids are unique over all ranks."""

    id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int


class CleanPrograms:
    """Every rank runs the shipped program."""

    def __call__(self, rank: int) -> Components:
        return Components()


@dataclass(frozen=True, kw_only=True)
class FolderWeights:
    """This rank's weights from a model folder, as CPU tensors (needs torch when called)."""

    folder: str
    config: ModelConfig
    dtype: str

    def __call__(self, ep_rank: int, ep_size: int) -> dict[str, Any]:
        import torch

        from dbo.model.loader import load_weights

        return load_weights(
            self.folder, self.config, ep_rank=ep_rank, ep_size=ep_size, dtype=getattr(torch, self.dtype)
        )


SPARE_STEPS = 1000
"""Steps beyond those that requests need: for some that fail and are made again."""
MOST_FAILURES = 8
"""Steps that fail one after another before a run ends: a failed step's requests are scheduled again, and may fail again."""


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What every rank runs. It is a value and can be pickled, so that a world may run ranks in processes of their own.

    Attributes:
        config, model_config, schedule: the same on all ranks.
        weights_of: (ep_rank, ep_size) -> this rank's weights as CPU tensors; None in ordering mode.
        requests: by DP replica; the ranks of a DCP group have the same.
        program_of: rank -> its program.
        keep_logits: keep rows of logits in the outcomes.
        serial: run split steps one ubatch after another.
        max_steps: stop after so many steps even if requests are left; 0: after more than they can need.
    """

    config: DBOConfig
    model_config: ModelConfig
    schedule: Schedule
    requests: Sequence[Sequence[RequestSpec]]
    weights_of: Callable[[int, int], dict[str, Any]] | None = None
    program_of: Callable[[int], Components] = field(default_factory=CleanPrograms)
    keep_logits: bool = False
    serial: bool = False
    max_steps: int = 0

    @property
    def most_steps(self) -> int:
        """Steps after which the run ends. Each step brings some replica's request a token on, unless it fails."""
        needed = [sum(len(r.prompt_token_ids) + r.max_new_tokens for r in replica) for replica in self.requests]
        return self.max_steps or SPARE_STEPS + max(needed, default=0)


@dataclass(frozen=True)
class RankMain:
    """The program that a world's `launch` runs on every rank."""

    job: RankJob

    def __call__(self, world: Any) -> list[StepOutcome]:
        """`world` is a `dbo.contract.world.World`, or what of one an unsplit step needs (`dbo.job.local`)."""
        if self.job.weights_of is None:
            return run_rank(world, self.job)
        import torch

        with torch.inference_mode():
            return run_rank(world, self.job)


def run_rank(world: World, job: RankJob) -> list[StepOutcome]:
    """Step until all ranks are idle, or nothing but failures comes; one outcome a step.

    Raises:
        ConfigError: the ranks were told different things.
    """
    runner = start_rank(world, job)
    # The ranks of a DCP group share requests: each schedules them by itself, with the same calls.
    for spec in job.requests[world.rank // job.config.decode_context_parallel_size]:
        runner.scheduler.add(
            Request(id=spec.id, prompt_token_ids=spec.prompt_token_ids, max_new_tokens=spec.max_new_tokens)
        )
    outcomes: list[StepOutcome] = []
    failures = 0
    while len(outcomes) < job.most_steps:
        outcome = runner.step()
        outcomes.append(outcome)
        failures = failures + 1 if outcome.error is not None else 0
        if outcome.all_idle or failures == MOST_FAILURES:
            break
    return outcomes


def start_rank(world: World, job: RankJob) -> GPUModelRunner:
    """Everything before the first step: the configuration agreed on, the runner built, sizes reserved, graphs captured.

    Raises:
        ConfigError: the ranks were told different things.
    """
    program = job.program_of(world.rank)
    agree_on_config(world, job.config, program)
    runner = build_runner(world, job, program)
    profiled = max(rows for shape in program.profile(job.config) for rows in shape)
    world.trace.host(kinds.RESERVE, what="rows", slot="forward", size=profiled)
    runner.capture_graphs()
    return runner


def agree_on_config(world: World, config: DBOConfig, program: Components) -> None:
    """Gather every rank's effective configuration once; any difference stops every rank."""
    mine = program.effective_config(effective(config))
    world.trace.host(kinds.CONFIG, config=mine)
    compare_configs(world.control.all_gather_object(mine))


def build_runner(world: World, job: RankJob, program: Components) -> GPUModelRunner:
    """The runner of one rank, with an empty cache and no requests."""
    config, model_config = job.config, job.model_config
    moe_layers = [i for i in range(model_config.num_hidden_layers) if model_config.is_moe_layer(i)]
    backend = program.prepare_finalize(make_prepare_finalize(world, config, model_config))
    group = make_context_parallel(world, config, model_config, program)
    loaded = (
        _skeleton(world, config, model_config, backend, program, group)
        if job.weights_of is None
        else _torch_model(world, config, model_config, job.weights_of(world.rank, world.size), backend, program, group)
    )
    wrapper = UBatchWrapper(
        loaded.model,
        world=world,
        schedule=job.schedule,
        backend=config.all2all_backend,
        moe_layers=moe_layers,
        program=program,
    )
    if group is not None:
        wrapper.graphs.staging = group.staging
    return GPUModelRunner(
        world=world,
        config=config,
        loaded=loaded,
        wrapper=wrapper,
        scheduler=RequestScheduler(config),
        program=program,
        keep_logits=job.keep_logits,
        serial=job.serial,
    )


def make_context_parallel(
    world: World, config: DBOConfig, model_config: ModelConfig, program: Components
) -> ContextParallel | None:
    """This rank's end of its DCP group; None when it has all keys of its requests."""
    if config.decode_context_parallel_size == 1:
        return None
    shape = DCPShape(
        size=config.decode_context_parallel_size,
        backend=str(config.dcp_comm_backend),
        max_rows=config.max_num_batched_tokens,
        num_ubatches=config.num_ubatches,
        heads=model_config.num_attention_heads,
        head_dim=model_config.kv_lora_rank,
        dtype=config.dtype,
    )
    found: ContextParallel = program.context_parallel(world.context_parallel(shape))
    return found


def make_prepare_finalize(
    world: World, config: DBOConfig, model_config: ModelConfig
) -> FusedMoEPrepareAndFinalizeModular:
    """The all-to-all backend that the configuration names, in this world."""
    num_experts = model_config.n_routed_experts
    if config.all2all_backend == "deepep_low_latency":
        return DeepEPLowLatencyPrepareAndFinalize(
            world,
            world.low_latency,
            num_experts=num_experts,
            max_tokens_per_rank=config.low_latency_max_tokens_per_rank,
        )
    # Under graphs no host may wait for counts, in eager steps neither: all steps are then of one kind.
    worst_case, comm_sms = config.cudagraph_mode == "FULL", config.dbo_comm_sms
    if config.all2all_backend == "deepep_high_throughput":
        return DeepEPHighThroughputPrepareAndFinalize(
            world, world.high_throughput, num_experts=num_experts, worst_case=worst_case, comm_sms=comm_sms
        )
    if config.all2all_backend == "deepep_v2":
        world.elastic.reserve(
            tokens=config.max_num_batched_tokens,
            hidden=model_config.hidden_size,
            num_topk=model_config.num_experts_per_tok,
        )
        return DeepEPV2PrepareAndFinalize(
            world,
            world.elastic,
            num_experts=num_experts,
            worst_case=worst_case,
            comm_sms=comm_sms,
            max_tokens_per_rank=config.max_num_batched_tokens,
        )
    if config.all2all_backend == "symm_copy":
        row_bytes = facts.DTYPE_BYTES[config.dtype] * model_config.hidden_size, 8 * model_config.num_experts_per_tok
        world.symmetric.reserve(ubatches=config.num_ubatches, rows=config.max_num_batched_tokens, row_bytes=row_bytes)
        top_k = model_config.num_experts_per_tok
        nearly_all = share_needed(ranks=world.size, num_experts=num_experts, top_k=top_k) >= NEARLY_ALL
        return SymmCopyPrepareAndFinalize(world, num_experts=num_experts, worst_case=worst_case or nearly_all)
    if config.all2all_backend == "nccl":
        return NcclPrepareAndFinalize(world, num_experts=num_experts)
    rule = "every accepted backend is built"
    raise ArgumentError.of(rule, fix="add it to make_prepare_finalize", all2all_backend=config.all2all_backend)


def _skeleton(
    world: World,
    config: DBOConfig,
    model_config: ModelConfig,
    backend: Any,
    program: Components,
    group: ContextParallel | None,
) -> LoadedModel:
    from dbo.model.skeleton import SkeletonModel

    caches = []
    width = model_config.kv_lora_rank + model_config.qk_rope_head_dim
    for layer in range(model_config.num_hidden_layers):
        cache = symbolic_tensors(world).empty((config.num_kv_blocks * config.block_size, width), f"kv_cache.{layer}")
        cache.notes["block_size"] = config.block_size
        caches.append(cache)
    kernel = partial(program.kernel, shared_placement=config.shared_experts, side=SideStream(world))
    model = SkeletonModel(model_config, world, backend, kernel, group)
    return LoadedModel(model=model, kv_caches=caches, metadata_of=lambda plan: plan)


def _torch_model(
    world: World,
    config: DBOConfig,
    model_config: ModelConfig,
    weights: dict[str, Any],
    backend: Any,
    program: Components,
    group: ContextParallel | None,
) -> LoadedModel:
    from dbo.batch.attention_metadata import from_plan
    from dbo.model.deepseek_v2 import DeepseekV2ForCausalLM
    from dbo.model.layout import EMBEDDING

    tensors = torch_tensors(world)
    model = DeepseekV2ForCausalLM(
        model_config,
        {name: tensors.from_torch(weight) for name, weight in weights.items()},
        make_prepare_finalize=lambda layer: backend,
        make_kernel=lambda layer, prepare_finalize, experts, shared_experts: program.kernel(
            prepare_finalize, experts, shared_experts, config.shared_experts, SideStream(world)
        ),
        ep_rank=world.rank,
        ep_size=world.size,
        context_parallel=group,
    )
    width = model_config.kv_lora_rank + model_config.qk_rope_head_dim
    shape = (config.num_kv_blocks, config.block_size, width)
    dtype = weights[EMBEDDING].dtype
    caches = [tensors.zeros(shape, dtype) for _ in range(model_config.num_hidden_layers)]

    def to_device(array: np.ndarray) -> Any:
        return tensors.from_numpy(array, "metadata")

    return LoadedModel(model=model, kv_caches=caches, metadata_of=lambda plan: from_plan(plan, to_device))
