"""Runs a case and judges it. Ordering mode needs no torch; numeric mode loads `fuzz.numeric`.

report = run_case(parse_token("f2:…"))
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

import numpy as np

from dbo import config as configuration
from dbo.check import Report, judge
from dbo.config import DBOConfig, ModelShape
from dbo.contract.world import World
from dbo.engine.components import Components
from dbo.engine.requests import Request
from dbo.engine.runner import StepOutcome
from dbo.errors import UsageError
from dbo.job.rank import CleanPrograms, RankJob, RequestSpec, start_rank
from dbo.job.reference import by_request, compare_peers, note_reference
from dbo.job.types import Reference
from dbo.model.config import ModelConfig
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
    """What a case left: its trace, every rank's steps, and the errors that ended ranks.

    Attributes:
        peers: ranks of a DCP group: each of them samples every token of its replica.
    """

    trace: Trace
    outcomes: tuple[tuple[StepOutcome, ...], ...]
    errors: tuple[BaseException | None, ...]
    peers: int = 1

    def said(self, peer: int) -> dict[str, tuple[list[int], list[np.ndarray]]]:
        """Sampled tokens and the logits behind them, by request id and in order, as this peer of each group has them."""
        return by_request(self.outcomes[peer :: self.peers])

    @property
    def whole(self) -> bool:
        """It came to its end, and no step of it failed."""
        failed = any(outcome.error is not None for rank in self.outcomes for outcome in rank)
        return not failed and not any(self.errors) and bool(self.trace.meta.get("complete", True))


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
    if case.mode == "ordering":
        return _run(case)
    from fuzz.numeric import one_thread

    with one_thread():
        return _run(case)


def _run(case: Case) -> Ran:
    job = job_of(case)
    launched = launch(CaseMain(case=case, job=job), ranks=case.ranks, mode=case.mode)
    values: list[Sequence[StepOutcome]] = [value or () for value in launched.values]
    launched.trace.meta |= {
        "backend": case.backend,
        "ubatches": case.ubatches,
        "schedule": to_text(case.schedule),
        "seed": 0,
        "config": configuration.effective(job.config),
    }
    if any(len(outcomes) >= MAX_STEPS for outcomes in values):
        launched.trace.meta |= {"complete": False, "why_cut": f"{MAX_STEPS} steps"}
    ran = Ran(
        trace=launched.trace, outcomes=tuple(map(tuple, values)), errors=tuple(launched.errors), peers=case.dcp_size
    )
    if case.mode == "numeric" and ran.whole:
        note_reference(ran.trace, _reference(case, ran), "float32")
    return ran


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
    raise UsageError.of("a case plants a fault of the catalogue", fix=f"choose one of {known}", fault=name)


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
    said = [ran.said(peer) for peer in range(case.dcp_size)]
    expected = _alone(case, ran)
    return [id for id, (tokens, _) in expected.items() if any(found.get(id, ([], []))[0] != tokens for found in said)]


def _reference(case: Case, ran: Ran) -> Reference:
    """Every peer's tokens and logits against those of one unsplit rank."""
    expected = {id: said for id, said in _alone(case, ran).items() if said[0]}
    said = compare_peers(expected, ran.outcomes, config_of(case))
    return Reference(tokens_equal=said.tokens_equal and said.logits_close, max_rel_err=said.max_rel_err)


@lru_cache(maxsize=64)
def _said_alone(case: Case) -> dict[str, tuple[list[int], list[np.ndarray]]]:
    """What the requests of a case get from one unsplit rank; the same for all faults that are planted in it."""
    from fuzz.numeric import said_alone

    specs = [_spec(case, at, index) for at, replica in enumerate(case.requests) for index, _ in enumerate(replica)]
    return said_alone(model_config_of(case), config_of(case), case.schedule, specs)


def _alone(case: Case, ran: Ran) -> dict[str, tuple[list[int], list[np.ndarray]]]:
    """What the requests of a case get from one unsplit rank; of an aborted one, as much as it has in `ran`."""
    plans = {(at, index): plan for at, replica in enumerate(case.requests) for index, plan in enumerate(replica)}
    expected = dict(_said_alone(dataclasses.replace(case, fault="")))
    found = ran.said(0)
    for (replica, index), plan in plans.items():
        id = _request_id(replica, index)
        if plan.aborted is not None:
            got = len(found.get(id, ([], []))[0])
            expected[id] = expected[id][0][:got], expected[id][1][:got]
    return expected


def job_of(case: Case) -> RankJob:
    """What every rank runs.

    Raises:
        UsageError: the configuration, the schedule or the fault is refused.
    """
    config = config_of(case)
    model = model_config_of(case)
    shape = ModelShape(
        hidden_size=model.hidden_size,
        num_experts=model.n_routed_experts,
        num_heads=model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings,
    )
    configuration.validate(config, shape, capabilities=CAPABILITIES)
    validate_schedule(case.schedule, backend=case.backend, num_ubatches=case.ubatches)
    fault = fault_of(case)
    where = case.fault.partition(":")[2]
    program_of: Callable[[int], Components] = CleanPrograms() if fault is None else fault.programs(config, where)
    weights_of = None
    if case.mode == "numeric":
        from fuzz.numeric import weights

        weights_of = weights(model)
    return RankJob(
        config=config,
        model_config=model,
        schedule=case.schedule,
        requests=(),
        weights_of=weights_of,
        program_of=program_of,
        keep_logits=weights_of is not None,
        max_steps=MAX_STEPS,
    )


def config_of(case: Case) -> DBOConfig:
    """The configuration of a case."""
    longest = max((p.prompt_tokens + p.new_tokens for rank in case.requests for p in rank), default=1)
    low_latency: dict[str, Any] = {}
    if case.backend == "deepep_low_latency":
        low_latency["low_latency_max_tokens_per_rank"] = case.max_batched_tokens
    return DBOConfig(
        data_parallel_size=case.ranks // case.dcp_size,
        enable_expert_parallel=True,
        enable_dbo=True,
        num_ubatches=case.ubatches,
        dbo_decode_token_threshold=case.decode_threshold,
        dbo_prefill_token_threshold=case.prefill_threshold,
        split_points=case.split_points,
        dbo_schedule=to_text(case.schedule),
        all2all_backend=case.backend,
        max_num_batched_tokens=case.max_batched_tokens,
        max_num_seqs=case.max_seqs,
        max_model_len=longest,
        block_size=case.block_size,
        num_kv_blocks=case.num_kv_blocks,
        dtype="float32",
        cudagraph_mode="FULL" if case.graphs else "NONE",
        capture_sizes=case.capture_sizes,
        decode_context_parallel_size=case.dcp_size,
        dcp_comm_backend=case.dcp_backend,
        cp_kv_cache_interleave_size=case.interleave,
        shared_experts=case.shared_experts,
        **low_latency,
    )


def model_config_of(case: Case) -> ModelConfig:
    """The model of a case: small, and as deep and as wide in experts as the case says; a DCP peer keeps two heads."""
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=case.dense_layers + case.moe_layers,
        num_attention_heads=2 * case.dcp_size,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=case.experts,
        n_shared_experts=1,
        num_experts_per_tok=case.top_k,
        max_position_embeddings=4096,
        first_k_dense_replace=case.dense_layers,
    )


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
        replica = world.rank // self.case.dcp_size  # the peers of a DCP group schedule the same requests
        plans = self.case.requests[replica]
        waiting = list(enumerate(plans))
        outcomes: list[StepOutcome] = []
        while len(outcomes) < self.job.max_steps:
            for index, plan in [entry for entry in waiting if entry[1].arrives <= runner.next_step]:
                waiting.remove((index, plan))
                runner.scheduler.add(self._request(replica, index))
            for index, plan in enumerate(plans):
                if plan.aborted is not None and plan.aborted <= runner.next_step:
                    runner.scheduler.abort(_request_id(replica, index))
            last = runner.next_step >= self.case.last_event
            outcomes.append(runner.step())
            failed = sum(outcome.error is not None for outcome in outcomes)
            if failed >= MAX_FAILED_STEPS or (last and outcomes[-1].all_idle):
                break
        return outcomes

    def _request(self, replica: int, index: int) -> Request:
        spec = _spec(self.case, replica, index)
        return Request(id=spec.id, prompt_token_ids=spec.prompt_token_ids, max_new_tokens=spec.max_new_tokens)


def _spec(case: Case, replica: int, index: int) -> RequestSpec:
    """A request of a case. Any prompt does, as long as different requests have different ones."""
    plan = case.requests[replica][index]
    ids = (1 + (17 * replica + 31 * index + 7 * i * (index + 1)) % (VOCAB_SIZE - 1) for i in range(plan.prompt_tokens))
    return RequestSpec(id=_request_id(replica, index), prompt_token_ids=tuple(ids), max_new_tokens=plan.new_tokens)


def _request_id(replica: int, index: int) -> str:
    return f"r{replica}.{index}"
