"""Runs a case and judges it. Ordering mode needs no torch; numeric mode loads `fuzz.numeric`.

report = run_case(parse_token("f1:…"))
surprise(case, report)          "" when the report says what the case calls for
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dbo import config as configuration
from dbo.check import Report, judge
from dbo.config import DBOConfig, ModelShape
from dbo.contract import World
from dbo.engine.requests import Request
from dbo.errors import UsageError, refusal
from dbo.model.config import ModelConfig
from dbo.program import Program
from dbo.rank import CleanPrograms, RankJob, RequestSpec, start_rank
from dbo.runner import StepOutcome
from dbo.schedule import to_text
from dbo.schedule import validate as validate_schedule
from dbo.trace import Trace
from fuzz.case import Case
from sim.faults import CATALOGUE, Fault
from sim.faults.clean_run import CleanRun
from sim.world import launch

HIDDEN_SIZE = 64
VOCAB_SIZE = 260
# A small model, so no backend has kernels for its width: the simulator carries any width and type.
CAPABILITIES = ("any_hidden_size", "any_dtype")
# A planted fault may fail every step in the same way. All ranks count alike, since a failed step fails on all of them.
MAX_FAILED_STEPS = 2
# Far more steps than any case needs; a run that reaches it is cut short and says so.
MAX_STEPS = 400


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a case left: its trace, every rank's steps, and the errors that ended ranks."""

    trace: Trace
    outcomes: tuple[tuple[StepOutcome, ...], ...]
    errors: tuple[BaseException | None, ...]

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Sampled tokens by request id, in order."""
        found: dict[str, list[int]] = {}
        for outcome in (outcome for rank in self.outcomes for outcome in rank):
            for id, token in outcome.tokens.items():
                found.setdefault(id, []).append(token)
        return found


def run_case(case: Case) -> Report:
    """Run a case in the simulator and judge its trace.

    Raises:
        UsageError: the case names something that cannot work; the message says what.
    """
    return judge(run(case).trace)


def run(case: Case) -> Ran:
    """Run a case in the simulator.

    Raises:
        UsageError: as `run_case`.
    """
    job = job_of(case)
    launched = launch(CaseMain(case=case, job=job), ranks=case.ranks, mode=case.mode)
    values: list[Sequence[StepOutcome]] = [value or () for value in launched.values]
    launched.trace.meta |= {
        "backend": case.backend, "ubatches": case.ubatches, "schedule": to_text(case.schedule), "seed": 0,
        "config": configuration.effective(job.config),
    }  # fmt: skip
    if any(len(outcomes) >= MAX_STEPS for outcomes in values):
        launched.trace.meta |= {"complete": False, "why_cut": f"{MAX_STEPS} steps"}
    return Ran(trace=launched.trace, outcomes=tuple(map(tuple, values)), errors=tuple(launched.errors))


def clean_twin(case: Case) -> tuple[CleanRun, Report]:
    """The same case without its fault: what its trace offers, and its report."""
    clean, report, _ = _clean(dataclasses.replace(case, fault=""))
    return clean, report


def clean_run(case: Case) -> Ran:
    """The run of the same case without its fault."""
    return _clean(dataclasses.replace(case, fault=""))[2]


@lru_cache(maxsize=64)
def _clean(case: Case) -> tuple[CleanRun, Report, Ran]:
    ran = run(case)
    return CleanRun(ran.trace), judge(ran.trace), ran


def fault_of(case: Case) -> Fault | None:
    """The planted fault, or None.

    Raises:
        UsageError: the catalogue has no such fault.
    """
    if not case.fault:
        return None
    name = case.fault.partition(":")[0]
    for fault in CATALOGUE:
        if fault.name == name:
            return fault
    known = ", ".join(fault.name for fault in CATALOGUE)
    raise UsageError(refusal("a case plants a fault of the catalogue", f"choose one of {known}", fault=name))


def bites(case: Case) -> bool:
    """Whether the planted fault comes into effect, judged by the clean twin alone."""
    fault = fault_of(case)
    return fault is not None and case.fault in {fault.inject(site) for site in fault.sites(clean_twin(case)[0])}


def surprise(case: Case, report: Report) -> str:
    """What the report says against what the case calls for; "" when they agree.

    A clean case calls for `proved`, a planted one for its fault's id. Where nothing says that the fault takes effect
    (`bites`), both will do.
    """
    fault = fault_of(case)
    due = [f"violated({id})" for id in (fault.id, *fault.also)] if fault is not None else []
    if not due or not bites(case):
        due.append("proved")
    if str(report.verdict) in due:
        return ""
    why = f"; {report.violations[0].sentence}" if report.violations else ""
    return f"{report.verdict} where {' or '.join(due)} is due{why}"


def wrong_tokens(case: Case, ran: Ran) -> list[str]:
    """Ids of requests of a clean numeric run whose tokens differ from those of one unsplit rank. Needs torch.

    An aborted request may have fewer.
    """
    from fuzz.numeric import tokens_alone

    specs = [_spec(case, rank, index) for rank, plans in enumerate(case.requests) for index in range(len(plans))]
    expected = tokens_alone(model_config_of(case), config_of(case), case.schedule, specs)
    aborted = {
        _request_id(rank, index)
        for rank, plans in enumerate(case.requests)
        for index, plan in enumerate(plans)
        if plan.aborted is not None
    }
    found = {spec.id: ran.tokens.get(spec.id, []) for spec in specs}
    return [
        id for id, tokens in found.items() if tokens != (expected[id][: len(tokens)] if id in aborted else expected[id])
    ]


def job_of(case: Case) -> RankJob:
    """What every rank runs.

    Raises:
        UsageError: the configuration, the schedule or the fault is refused.
    """
    config = config_of(case)
    model = model_config_of(case)
    shape = ModelShape(
        hidden_size=model.hidden_size, num_experts=model.n_routed_experts, num_heads=model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings,
    )  # fmt: skip
    configuration.validate(config, shape, capabilities=CAPABILITIES)
    validate_schedule(case.schedule, backend=case.backend, num_ubatches=case.ubatches)
    fault = fault_of(case)
    where = case.fault.partition(":")[2]
    program_of: Callable[[int], Program] = CleanPrograms() if fault is None else fault.programs(config, where)
    weights_of = None
    if case.mode == "numeric":
        from fuzz.numeric import weights

        weights_of = weights(model)
    return RankJob(
        config=config, model_config=model, schedule=case.schedule, requests=(), weights_of=weights_of,
        program_of=program_of, max_steps=MAX_STEPS,
    )  # fmt: skip


def config_of(case: Case) -> DBOConfig:
    """The configuration of a case."""
    longest = max((p.prompt_tokens + p.new_tokens for rank in case.requests for p in rank), default=1)
    low_latency: dict[str, Any] = {}
    if case.backend == "deepep_low_latency":
        low_latency["low_latency_max_tokens_per_rank"] = case.max_batched_tokens
    return DBOConfig(
        data_parallel_size=case.ranks, enable_expert_parallel=True, enable_dbo=True, num_ubatches=case.ubatches,
        dbo_decode_token_threshold=case.decode_threshold, dbo_prefill_token_threshold=case.prefill_threshold,
        split_points=case.split_points, dbo_schedule=to_text(case.schedule), all2all_backend=case.backend,
        max_num_batched_tokens=case.max_batched_tokens, max_num_seqs=case.max_seqs, max_model_len=longest,
        block_size=case.block_size, num_kv_blocks=case.num_kv_blocks, dtype="float32", **low_latency,
    )  # fmt: skip


def model_config_of(case: Case) -> ModelConfig:
    """The model of a case: small, and as deep and as wide in experts as the case says."""
    return ModelConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=case.dense_layers + case.moe_layers, num_attention_heads=2, kv_lora_rank=16,
        q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=case.experts,
        n_shared_experts=1, num_experts_per_tok=case.top_k, max_position_embeddings=4096,
        first_k_dense_replace=case.dense_layers,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CaseMain:
    """The program of one rank: requests arrive and are aborted between steps, until nothing is left to happen."""

    case: Case
    job: RankJob

    def __call__(self, world: World) -> list[StepOutcome]:
        with self._mode():
            return self._steps(world)

    def _mode(self) -> AbstractContextManager[Any]:
        if self.case.mode == "ordering":
            return contextlib.nullcontext()
        from fuzz.numeric import inference_mode

        return inference_mode()

    def _steps(self, world: World) -> list[StepOutcome]:
        runner = start_rank(world, self.job)
        waiting = list(enumerate(self.case.requests[world.rank]))
        outcomes: list[StepOutcome] = []
        while len(outcomes) < self.job.max_steps:
            for index, plan in [entry for entry in waiting if entry[1].arrives <= runner.next_step]:
                waiting.remove((index, plan))
                runner.scheduler.add(self._request(world.rank, index))
            for index, plan in enumerate(self.case.requests[world.rank]):
                if plan.aborted is not None and plan.aborted <= runner.next_step:
                    runner.scheduler.abort(_request_id(world.rank, index))
            last = runner.next_step >= self.case.last_event
            outcomes.append(runner.step())
            failed = sum(outcome.error is not None for outcome in outcomes)
            if failed >= MAX_FAILED_STEPS or (last and outcomes[-1].all_idle):
                break
        return outcomes

    def _request(self, rank: int, index: int) -> Request:
        spec = _spec(self.case, rank, index)
        return Request(id=spec.id, prompt_token_ids=spec.prompt_token_ids, max_new_tokens=spec.max_new_tokens)


def _spec(case: Case, rank: int, index: int) -> RequestSpec:
    """A request of a case. Any prompt does, as long as different requests have different ones."""
    plan = case.requests[rank][index]
    ids = (1 + (17 * rank + 31 * index + 7 * i * (index + 1)) % (VOCAB_SIZE - 1) for i in range(plan.prompt_tokens))
    return RequestSpec(id=_request_id(rank, index), prompt_token_ids=tuple(ids), max_new_tokens=plan.new_tokens)


def _request_id(rank: int, index: int) -> str:
    return f"r{rank}.{index}"
