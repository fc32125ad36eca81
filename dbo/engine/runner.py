"""`GPUModelRunner`: one engine step after another on one rank, the same calls on every rank.

    schedule → coordinate → plan and slices → forward → sample → update

A step that fails anywhere ends on every rank: the others see `PeerFailed`, all meet in `World.recover`, the batch is
scheduled again, and the next step starts clean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dbo.batch.coordinate import Decision, RankColumn, vote
from dbo.batch.plan import BatchPlan, DCPLayout
from dbo.batch.slicing import default_split_points
from dbo.config import DBOConfig
from dbo.contract.world import World
from dbo.dcp.interface import real_rows_of_peer, rows_of_peer
from dbo.engine.batch import ModelInputs, build_batch, dummy_batch
from dbo.engine.components import Components
from dbo.engine.sampling import sample
from dbo.engine.scheduled import ScheduledBatch, reads_new_kv, uniform_query_len
from dbo.engine.scheduler import RequestScheduler
from dbo.errors import UBatchError, Unwinding
from dbo.trace import kinds
from dbo.ubatching.forward_context import ForwardContext, SerialPlayer, override_forward_context
from dbo.ubatching.graphs import graph_key


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one rank did in one step.

    Attributes:
        step: its number.
        decision: what all ranks did; None when the step failed before it was known.
        column: what this rank told the others.
        slices: token ranges (start, stop) of the ubatches; empty when not split.
        tokens: sampled, by request id.
        logits: rows of logits behind them, by request id (kept only when the runner was asked to).
        error: what ended the step, or None.
    """

    step: int
    decision: Decision | None = None
    column: RankColumn | None = None
    slices: tuple[tuple[int, int], ...] = ()
    tokens: dict[str, int] = field(default_factory=dict)
    logits: dict[str, np.ndarray] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def all_idle(self) -> bool:
        return self.decision is not None and self.decision.all_idle


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """One rank's model and what it computes with.

    Attributes:
        model: what `UBatchWrapper` wraps.
        kv_caches: one paged cache per layer.
        metadata_of: from a `BatchPlan` to what the model's attention reads.
    """

    model: Any
    kv_caches: Sequence[Any]
    metadata_of: Callable[[Any], Any]


class GPUModelRunner:
    """One rank's runner.

    Args:
        world: the rank's world.
        config: the common configuration.
        loaded: the model and what it computes with; of the model only `compute_logits` is called here.
        wrapper: called like the model.
        scheduler: the rank's requests.
        program: exchangeable pieces.
        keep_logits: keep the rows of logits in the outcomes.
        serial: run split steps one ubatch after another (the twin that DBO must be bit-equal to).
    """

    def __init__(
        self,
        *,
        world: World,
        config: DBOConfig,
        loaded: LoadedModel,
        wrapper: Any,
        scheduler: RequestScheduler,
        program: Components | None = None,
        keep_logits: bool = False,
        serial: bool = False,
    ) -> None:
        self.world = world
        self.config = config
        self.model = loaded.model
        self.wrapper = wrapper
        self.kv_caches = loaded.kv_caches
        self.metadata_of = loaded.metadata_of
        self.scheduler = scheduler
        self.program = program or Components()
        self.keep_logits = keep_logits
        self.serial = serial
        self.next_step = 0

    def step(self) -> StepOutcome:
        """Run one step. Errors end up in the outcome; the next call works."""
        step, self.next_step = self.next_step, self.next_step + 1
        self.world.in_ubatch(-1, step=step)
        if self.program.skips_step(step):
            return StepOutcome(step=step)
        batch = self.scheduler.schedule()
        self.world.trace.host(kinds.STEP_BEGIN, tokens=batch.num_tokens, requests=len(batch.requests))
        try:
            outcome = self._run(step, batch)
        except Unwinding:
            raise
        except BaseException as error:
            return self._failed(step, error)
        self.world.in_ubatch(-1, step=step)
        self.world.trace.host(
            kinds.STEP_END,
            status="idle" if batch.is_idle else "ok",
            error="",
            rows=len(outcome.tokens),
            expected_rows=len(batch.sampled),
            live_threads=self.wrapper.live_threads,
        )
        return outcome

    def _failed(self, step: int, error: BaseException) -> StepOutcome:
        self.world.in_ubatch(-1, step=step)
        first = error.__cause__ if isinstance(error, UBatchError) and error.__cause__ is not None else error
        if first is error:  # the ring has not recorded it
            self.world.trace.host(kinds.ERROR, type(error).__name__, type=type(error).__name__, message=str(error))
        self.world.trace.host(
            kinds.STEP_END,
            status="error",
            error=type(first).__name__,
            rows=0,
            expected_rows=0,
            live_threads=self.wrapper.live_threads,
        )
        self.world.fail(error)
        if not isinstance(first, Exception):  # Ctrl-C and the like end the run, not the step
            raise first
        self.scheduler.discard()
        self.next_step = self.world.recover(step)
        return StepOutcome(step=step, error=error)

    def _run(self, step: int, batch: ScheduledBatch) -> StepOutcome:
        column = self._column(step, batch)
        table = self.program.exchange(self.world.control, column)
        decision: Decision = self.program.decide(table, self.config)
        if self.world.trace.keeps:
            self.world.trace.host(
                kinds.DECIDE, column=column.to_dict(), table=table.tolist(), decision=decision.to_dict()
            )
        if decision.all_idle:
            return StepOutcome(step=step, decision=decision, column=column)
        inputs = self._inputs(batch, decision)
        context = self._forward_context(step, [r.query_len for r in batch.requests], decision, inputs)
        hidden = self._forward(context, inputs)
        tokens, logits = self._sample(batch, inputs, hidden)
        if batch.requests:
            self.scheduler.update(tokens)
        slices = tuple((s.token_slice.start, s.token_slice.stop) for s in context.ubatch_slices or ())
        return StepOutcome(step=step, decision=decision, column=column, slices=slices, tokens=tokens, logits=logits)

    def _column(self, step: int, batch: ScheduledBatch) -> RankColumn:
        if batch.is_idle:
            return RankColumn.idle(step)
        query_len = uniform_query_len(batch)
        dependent = reads_new_kv(batch)
        wants_full = self.config.cudagraph_mode == "FULL" and query_len > 0
        return RankColumn(
            step=step,
            real_tokens=batch.num_tokens,
            padded_tokens=batch.num_tokens,
            vote=vote(self.config, num_tokens=batch.num_tokens, uniform_decode=query_len > 0, allowed=not dependent),
            wants_full=wants_full,
            uniform_query_len=query_len,
            reads_new_kv=dependent,
        )

    def _inputs(self, batch: ScheduledBatch, decision: Decision) -> ModelInputs:
        """The batch laid out; a graph has fixed numbers of requests and blocks."""
        rows = decision.num_tokens_padded[self.world.rank]
        if decision.cudagraph_mode != "FULL":
            return build_batch(batch, num_tokens_padded=rows, dcp_layout=self._dcp_layout)
        return build_batch(
            batch,
            num_tokens_padded=rows,
            num_reqs_padded=rows // decision.uniform_query_len,
            block_table_width=self._table_width,
            dcp_layout=self._dcp_layout,
        )

    def _forward_context(
        self, step: int, query_lens: Sequence[int], decision: Decision, inputs: ModelInputs
    ) -> ForwardContext:
        plan = inputs.plan
        _, padded = self.program.make_slices(
            decision.split,
            query_lens,
            plan.num_tokens_padded,
            plan.num_reqs,
            decision.num_ubatches,
            decision.split_points or None,
        )
        context = ForwardContext(
            attn_metadata=None,
            kv_caches=self.kv_caches,
            num_tokens=plan.num_tokens_padded,
            num_real_tokens=plan.num_actual_tokens,
            step=step,
            player=SerialPlayer(self.world),
            num_tokens_across_ranks=[rows_of_peer(rows, self._dcp_size) for rows in decision.num_tokens_padded],
            dcp_size=self._dcp_size,
        )
        parts = [plan] if padded is None else [self.program.slice_plan(plan, piece) for piece in padded]
        self.world.trace.host(kinds.USE, what="rows", slot="forward", size=max(p.num_tokens_padded for p in parts))
        if padded is not None and self.world.trace.keeps:
            self.world.trace.host(kinds.SLICES, parent=plan.to_dict(), ubatches=[p.to_dict() for p in parts])
        if decision.cudagraph_mode == "FULL":
            query_len = decision.uniform_query_len
            context.graph_key = graph_key(
                self.config,
                self.wrapper.schedule.name,
                num_tokens=[p.num_tokens_padded for p in parts],
                num_reqs=[p.num_reqs for p in parts],
                query_len=query_len,
            )
            size, peer = self._dcp_size, self.world.rank % self._dcp_size
            context.real_tokens = [
                real_rows_of_peer(p.num_actual_tokens, p.num_tokens_padded, size, peer) for p in parts
            ]
            parts = [self._baked(part, query_len) for part in parts]
        metadata = [self.metadata_of(part) for part in parts]
        if padded is None:
            context.attn_metadata = metadata[0]
        else:
            context.ubatch_slices, context.ubatch_metadata = padded, metadata
        return context

    def _baked(self, plan: BatchPlan, query_len: int) -> BatchPlan:
        """Host counts that every replay of a graph shares; the real ones are in the device tensors."""
        return replace(
            plan,
            num_actual_tokens=plan.num_tokens_padded,
            max_query_len=query_len,
            max_seq_len=self.config.max_model_len,
        )

    @property
    def _table_width(self) -> int:
        return -(-self.config.max_model_len // (self.config.block_size * self._dcp_size))

    @property
    def _dcp_size(self) -> int:
        return self.config.decode_context_parallel_size

    @property
    def _dcp_layout(self) -> DCPLayout | None:
        """How this rank's group spreads keys; rank = replica * C + peer."""
        size = self._dcp_size
        if size == 1:
            return None
        peer = self.world.rank % size
        return DCPLayout(size=size, rank=peer, interleave=self.config.cp_kv_cache_interleave_size)

    def capture_graphs(self) -> None:
        """The capture phase: before the first step, on all ranks, largest size first; split and unsplit."""
        if self.config.cudagraph_mode != "FULL":
            return
        self.wrapper.graphs.capturing = True
        try:
            for tokens in sorted(self.config.cudagraph_capture_sizes, reverse=True):
                for split in (True, False) if self._may_split(tokens) else (False,):
                    self._capture(tokens, split)
        except Unwinding:
            raise
        except BaseException as error:  # the run cannot begin: whoever waits for this rank is told
            self.world.fail(error)
            raise
        finally:
            self.wrapper.graphs.capturing = False

    def _may_split(self, tokens: int) -> bool:
        points = self.config.split_points
        if points and points[-1] >= tokens:  # a step of this size leaves the last ubatch nothing, so it is not split
            return False
        return self.config.enable_dbo and tokens >= max(
            self.config.num_ubatches, self.config.dbo_decode_token_threshold
        )

    def _capture(self, tokens: int, split: bool) -> None:
        ubatches = self.config.num_ubatches if split else 1
        points = (self.config.split_points or default_split_points(tokens, ubatches)) if split else ()
        decision = Decision(
            split=split,
            num_tokens_padded=(tokens,) * self.world.size,
            cudagraph_mode="FULL",
            split_points=points,
            num_ubatches=ubatches,
            all_idle=False,
            uniform_query_len=1,
            reason="",
        )
        inputs = dummy_batch(
            num_reqs=tokens, query_len=1, block_table_width=self._table_width, dcp_layout=self._dcp_layout
        )
        # Runs of the capture phase have negative step numbers, two each: the warm-up and the capture.
        step = -2 * (len(self.wrapper.graphs.steps) + 1)
        self.world.in_ubatch(-1, step=step)
        context = self._forward_context(step, [1] * tokens, decision, inputs)
        with override_forward_context(context):
            self.wrapper.capture(**self._arguments(inputs))

    def _forward(self, context: ForwardContext, inputs: ModelInputs) -> Any:
        arguments = self._arguments(inputs)
        with override_forward_context(context):
            if self.serial and context.ubatch_slices is not None:
                return self.wrapper.run_serially(**arguments)
            return self.wrapper(**arguments)

    def _arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        tensors = self.world.tensors
        return {
            "input_ids": tensors.from_numpy(inputs.input_ids, "input_ids"),
            "positions": tensors.from_numpy(inputs.plan.positions, "positions"),
        }

    def _sample(
        self, batch: ScheduledBatch, inputs: ModelInputs, hidden: Any
    ) -> tuple[dict[str, int], dict[str, np.ndarray]]:
        chosen = batch.sampled
        if not chosen:
            if batch.requests:
                # Nothing is read back, yet the scheduler is about to count on this KV: if a peer fails first, the step
                # must fail here too, or the keys of these tokens would be missing for good.
                self.world.compute.synchronize()
            return {}, {}
        self.world.at_point("sample", layer=-1)
        rows = self.world.tensors.take(hidden, inputs.logit_rows)
        logits = self.world.tensors.to_host(self.model.compute_logits(rows), "sample")
        tokens = sample(logits, chosen)
        kept = {r.request_id: logits[i] for i, r in enumerate(chosen)} if self.keep_logits else {}
        return tokens, kept
