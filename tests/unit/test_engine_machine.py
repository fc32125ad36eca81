"""Hypothesis drives the request side as an engine would, over a KV cache that remembers what was written.

Each cache slot stores the whole prefix of tokens that its key stands for. A step first writes the slots of its rows,
then reads every key of every request through the block table. So a block that is shared wrongly, freed early, written
twice or skipped shows up as a wrong prefix, whatever the cause. The "model" is a function of request and prefix; a
request's output must be what it would have produced alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dbo.batch.slicing import NULL_BLOCK, NULL_SLOT, DCPLayout
from dbo.engine.batch import ModelInputs, build_batch
from dbo.engine.kv_blocks import num_blocks_for
from dbo.engine.requests import Request, RequestState
from dbo.engine.scheduled import ScheduledBatch, reads_new_kv, uniform_query_len
from dbo.engine.scheduler import RequestScheduler

EOS = 0
Prefix = tuple[int, ...]

arrival = st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(1, 8), st.booleans())
"""Prompt, most new tokens, and whether a fork arrives right behind."""


@dataclass(frozen=True, kw_only=True)
class Config:
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_kv_blocks: int
    decode_context_parallel_size: int
    max_model_len: int = 24


def next_token(request_id: str, prefix: Prefix) -> int:
    """A model with eleven tokens in which forks diverge and the end token comes up now and then."""
    return (sum((i + 1) * t for i, t in enumerate(prefix)) + sum(request_id.encode())) % 11


def output_alone(request: Request, known: Prefix, num_produced: int) -> list[int]:
    produced = list(known[len(known) - num_produced :])
    while len(produced) < request.max_new_tokens and (len(produced) == num_produced or produced[-1] != EOS):
        produced.append(next_token(request.id, (*known, *produced[num_produced:])))
    return produced


class EngineMachine(RuleBasedStateMachine):
    """Adds, forks, ends and steps; the invariants and each step's checks are the properties."""

    @initialize(
        budget=st.integers(1, 12),
        seats=st.integers(1, 5),
        block_size=st.sampled_from([1, 2, 4]),
        blocks=st.integers(3, 12),
        dcp=st.sampled_from([1, 2]),
    )
    def start(self, budget: int, seats: int, block_size: int, blocks: int, dcp: int) -> None:
        self.config = Config(
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            block_size=block_size,
            num_kv_blocks=blocks,
            decode_context_parallel_size=dcp,
        )
        self.scheduler = RequestScheduler(self.config)
        self.caches: list[dict[int, Prefix]] = [{} for _ in range(dcp)]
        self.requests: list[Request] = []
        self.expected: dict[str, list[int]] = {}
        self.progress: dict[str, tuple[int, int]] = {}
        self.tokens_run: dict[str, int] = {}

    # -- what an engine does ------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(arrival, min_size=2, max_size=4))
    def add(self, arrivals: list[tuple[list[int], int, bool]]) -> None:
        longest = min(self.config.max_model_len, self.scheduler.pool.capacity * self.scheduler.block_tokens + 1)
        for prompt, new, forked in arrivals:
            prompt = prompt[: longest - 1]
            request = Request(
                id=f"r{len(self.requests)}",
                prompt_token_ids=tuple(prompt),
                max_new_tokens=min(new, longest - len(prompt)),
                eos_token_id=EOS,
            )
            self.scheduler.add(request)
            self._remember(request)
            if forked:
                self._remember(self.scheduler.fork(request.id, f"r{len(self.requests)}"))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live()))
        self._remember(self.scheduler.fork(parent.id, f"r{len(self.requests)}"))

    @precondition(lambda self: len(self.live()) > 2)
    @rule(data=st.data(), how=st.sampled_from(["abort", "finish"]))
    def end(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.live()))
        assert getattr(self.scheduler, how)(request.id)
        assert not getattr(self.scheduler, how)(request.id)

    @rule(count=st.integers(1, 3))
    def steps(self, count: int) -> None:
        for _ in range(count):
            batch, inputs = self._schedule()
            self._run(batch, inputs)
            self._update(batch)

    @precondition(lambda self: len(self.live()) > 2)
    @rule(data=st.data())
    def step_during_which_a_request_is_aborted(self, data: st.DataObject) -> None:
        batch, inputs = self._schedule()
        self._run(batch, inputs)
        self.scheduler.abort(data.draw(st.sampled_from(self.live())).id)
        self._update(batch)

    @rule(data=st.data())
    def step_that_fails(self, data: st.DataObject) -> None:
        """Some of its rows have overwritten their keys with garbage; requests may be aborted before the retry."""
        _, inputs = self._schedule()
        for cache, rank_inputs in zip(self.caches, inputs, strict=True):
            for slot in rank_inputs.plan.slot_mapping[: data.draw(st.integers(0, 9))]:
                cache[int(slot)] = (-1,)
        if len(self.live()) > 2 and data.draw(st.booleans()):
            self.scheduler.abort(data.draw(st.sampled_from(self.live())).id)  # while it runs
        self.scheduler.discard()
        if len(self.live()) > 2 and data.draw(st.booleans()):
            self.scheduler.abort(data.draw(st.sampled_from(self.live())).id)

    def teardown(self) -> None:
        """No starvation: left alone, everybody ends, with the output it would have had alone."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.discard()  # after a failed rule, so that its own error is the one reported
        # Each step moves the oldest request on by a token at least.
        limit = sum(r.num_tokens + r.max_new_tokens for r in self.requests)
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests:
                break
            self.steps(1)
        assert not self.scheduler.has_unfinished_requests
        assert self.scheduler.pool.num_free == self.scheduler.pool.capacity
        assert self.scheduler.schedule().is_idle

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_held_by_exactly_the_running_requests(self) -> None:
        pool = self.scheduler.pool
        holders = [0] * pool.num_blocks
        for request in self.requests:
            if request.state is not RequestState.RUNNING:
                assert not request.block_ids
            if request.state is RequestState.WAITING:
                assert request.num_computed_tokens == 0
            assert len(set(request.block_ids)) == len(request.block_ids)
            for block in request.block_ids:
                holders[block] += 1
        assert holders[NULL_BLOCK] == 0
        assert holders == [pool.references(b) for b in range(pool.num_blocks)]
        assert pool.num_free == pool.capacity - sum(1 for n in holders if n)

    @invariant()
    def the_queues_hold_exactly_the_live_in_order_of_arrival(self) -> None:
        queues = [*self.scheduler.running, *self.scheduler.waiting]
        assert queues == self.live()
        assert len(self.scheduler.running) <= self.config.max_num_seqs

    def live(self) -> list[Request]:
        return [r for r in self.requests if r.state in (RequestState.RUNNING, RequestState.WAITING)]

    # -- the pieces of a step -----------------------------------------------------------------------------------------

    def _remember(self, request: Request) -> None:
        self.requests.append(request)
        known = request.tokens(0, request.num_tokens)
        self.expected[request.id] = output_alone(request, known, len(request.output_token_ids))

    def _schedule(self) -> tuple[ScheduledBatch, list[ModelInputs]]:
        dcp = self.config.decode_context_parallel_size
        had_work = bool(self.live())
        oldest = self.live()[:1]
        batch = self.scheduler.schedule()
        by_id = {r.id: r for r in self.requests}
        assert batch.is_idle != had_work
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert len(batch.requests) <= self.config.max_num_seqs
        assert oldest == self.scheduler.running[: len(oldest)]
        assert [r.request_id for r in batch.requests] == [r.id for r in self.scheduler.running]
        kinds = [r.is_prefilling for r in batch.requests]
        assert kinds == sorted(kinds)
        for row in batch.requests:
            request = by_id[row.request_id]
            assert row.query_len > 0
            assert row.token_ids == request.tokens(row.num_computed_tokens, row.seq_len)
            assert row.samples == (row.seq_len == request.num_tokens)
            assert len(row.block_ids) == num_blocks_for(row.seq_len, self.scheduler.block_tokens)
            assert row.is_prefilling or row.query_len == 1
        inputs = [
            build_batch(
                batch,
                num_tokens_padded=batch.num_tokens + 2,
                dcp_layout=DCPLayout(size=dcp, rank=rank) if dcp > 1 else None,
            )
            for rank in range(dcp)
        ]
        query_lens = np.diff(inputs[0].plan.query_start_loc)
        uniform = had_work and not any(kinds) and len(set(query_lens.tolist())) == 1
        assert uniform_query_len(batch) == (query_lens[0] if uniform else 0)
        return batch, inputs

    def _run(self, batch: ScheduledBatch, inputs: list[ModelInputs]) -> None:
        """Write all keys of the step, then check what attention would read."""
        by_id = {r.id: r for r in self.requests}
        written: dict[tuple[int, int], str] = {}
        for rank, (cache, (plan, input_ids, _, ids)) in enumerate(zip(self.caches, inputs, strict=True)):
            for i, request_id in enumerate(ids):
                for row in range(plan.query_start_loc[i], plan.query_start_loc[i + 1]):
                    slot, position = int(plan.slot_mapping[row]), int(plan.positions[row])
                    prefix = by_id[request_id].tokens(0, position + 1)
                    assert input_ids[row] == prefix[-1]
                    if slot != NULL_SLOT:
                        assert (rank, slot) not in written
                        written[rank, slot] = request_id
                        cache[slot] = prefix
            padding = slice(plan.num_actual_tokens, None)
            assert not input_ids[padding].any() and not plan.positions[padding].any()
            assert (plan.slot_mapping[padding] == NULL_SLOT).all()
        crossed = False
        for rank, (cache, (plan, _, _, ids)) in enumerate(zip(self.caches, inputs, strict=True)):
            block_size, dcp = self.config.block_size, self.config.decode_context_parallel_size
            assert (plan.seq_lens - np.diff(plan.query_start_loc) == plan.num_computed_tokens).all()
            for i, request_id in enumerate(ids):
                here = [p for p in range(plan.seq_lens[i]) if p % dcp == rank]
                if dcp > 1:
                    assert plan.dcp_local_seq_lens is not None and plan.dcp_local_seq_lens[i] == len(here)
                for local, position in enumerate(here):
                    slot = int(plan.block_table[i, local // block_size]) * block_size + local % block_size
                    assert cache.get(slot) == by_id[request_id].tokens(0, position + 1)
                    crossed |= written.get((rank, slot), request_id) != request_id
        assert reads_new_kv(batch) == crossed

    def _update(self, batch: ScheduledBatch) -> None:
        by_id = {r.id: r for r in self.requests}
        for row in batch.requests:
            request = by_id[row.request_id]
            before = self.progress.get(row.request_id, (-1, 0))
            if before[0] == request.num_preemptions:  # each token once, none skipped, unless it had to start over
                assert row.num_computed_tokens == before[1]
            else:
                assert row.num_computed_tokens == 0 or request.num_forked_tokens > 0
            self.progress[row.request_id] = (request.num_preemptions, row.seq_len)
        sampled = {
            r.request_id: next_token(r.request_id, by_id[r.request_id].tokens(0, r.seq_len)) for r in batch.sampled
        }
        for request in self.scheduler.update(sampled):
            assert request.state is RequestState.FINISHED
            assert request.output_token_ids == self.expected[request.id]


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=15, deadline=None)
TestEngineMachine = EngineMachine.TestCase
