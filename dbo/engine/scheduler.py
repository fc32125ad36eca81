"""Which tokens of which requests run in this step: continuous batching with chunked prefill over a paged KV cache.

    add / fork / abort / finish      at any time
    batch = schedule()               decide a step; blocks are taken now
    update(sample(...))              the step ran: count its tokens, append the sampled ones
    discard()                        the step failed: nothing of it counts, the next schedule() plans it again

Deterministic: the same calls give the same batches. Between two steps every running request is older than every waiting
one, and both are in order of arrival; that is what makes three short rules enough.

* Running requests continue, oldest first; then the oldest waiting ones start, while the token budget, a seat and blocks
  are left. Nobody overtakes the oldest waiting request.
* A running request that finds no free block takes blocks from the newest running one, which starts over later
  (recompute; its sampled tokens are kept).
* Nobody is admitted in a step that preempted: a newcomer would take the blocks that an older request just lacked.

What follows from them, and is checked as a property: only the newest running request can be in the middle of its prompt
(whoever is cut has used up the budget), so decodes come first in every batch without being sorted there; every running
request gets at least one token in every step; the oldest always moves on, and since `add` refuses what the whole cache
could not hold, every request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from dbo.engine.kv_blocks import BlockPool, num_blocks_for
from dbo.engine.requests import Request, RequestState
from dbo.engine.scheduled import ScheduledBatch, ScheduledRequest
from dbo.errors import EngineError, PromptError, UsageError


class EngineConfig(Protocol):
    """The part of the configuration that the request side reads."""

    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def block_size(self) -> int:
        """Tokens that one block holds on one rank."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of a rank's cache, the null block included."""

    @property
    def decode_context_parallel_size(self) -> int: ...


class RequestScheduler:
    """The requests of one DP replica. The ranks of a DCP group each run one, with the same calls.

    Attributes:
        waiting, running: live requests, oldest first.
        pool: the KV blocks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.block_tokens = config.block_size * config.decode_context_parallel_size
        self.pool = BlockPool(config.num_kv_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._live: dict[str, Request] = {}
        self._in_flight: list[tuple[Request, ScheduledRequest]] | None = None  # scheduled, not yet updated
        self._admitted: list[Request] = []  # by the last schedule()

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            PromptError: prompt and output do not fit in the model length or in the whole KV cache.
            UsageError: its id is in use, or it has been queued before.
        """
        if request.id in self._live or request.state is not RequestState.WAITING:
            rule = "a request is added once, under an id that no live request has"
            raise UsageError.of(rule, fix="use a new Request", request=request.id, state=request.state.value)
        longest = len(request.prompt_token_ids) + request.max_new_tokens
        limit = min(self._config.max_model_len, self.pool.capacity * self.block_tokens + 1)
        if longest > limit:  # + 1: the last token is sampled, never computed
            rule = "prompt and output fit in the model length and in the KV cache"
            fix = "shorten the prompt, lower max_new_tokens, or raise max_model_len and num_kv_blocks"
            raise PromptError.of(rule, fix=fix, request=request.id, tokens=longest, limit=limit)
        self._live[request.id] = request
        self.waiting.append(request)

    def fork(self, parent_id: str, new_id: str) -> Request:
        """Queue a request that continues from the tokens that a live one knows now, and return it.

        At its admission it takes over, by reference, the full blocks that a running parent has computed by the end of
        that step; so in that step it may read KV that the parent writes (`reads_new_kv`).

        Raises:
            UsageError: no live request has `parent_id`, or one has `new_id`.
        """
        parent = self._live.get(parent_id)
        if parent is None:
            raise UsageError.of("a live request is forked", fix="fork before it ends", parent=parent_id)
        child = Request(
            id=new_id,
            prompt_token_ids=parent.prompt_token_ids,
            max_new_tokens=parent.max_new_tokens,
            sampling=parent.sampling,
            eos_token_id=parent.eos_token_id,
            output_token_ids=list(parent.output_token_ids),
            parent=parent,
            num_forked_tokens=parent.num_tokens,
        )
        self.add(child)
        return child

    def abort(self, request_id: str) -> bool:
        """Drop a live request and free its blocks; False when there is none (it may just have ended)."""
        return self._end(request_id, RequestState.ABORTED)

    def finish(self, request_id: str) -> bool:
        """End a live request early and keep its output; False when there is none."""
        return self._end(request_id, RequestState.FINISHED)

    def schedule(self) -> ScheduledBatch:
        """Decide the next step. An idle batch (no requests) is a normal answer, and needs no `update`.

        Raises:
            EngineError: the previous batch has been neither updated nor discarded.
        """
        if self._in_flight is not None:
            rule = "a batch is updated or discarded before the next is scheduled"
            raise EngineError.of(rule, fix="call update() or discard()", requests=len(self._in_flight))
        chunks: dict[Request, int] = {}
        self._admitted = []
        if self._continue_running(chunks):
            self._admit_waiting(chunks)
        rows = [(request, self._row(request, num_tokens)) for request, num_tokens in chunks.items()]
        self._in_flight = rows or None
        return ScheduledBatch(requests=tuple(row for _, row in rows), block_tokens=self.block_tokens)

    def update(self, sampled: Mapping[str, int]) -> list[Request]:
        """The scheduled step ran; returns the requests that it finished, in row order.

        Args:
            sampled: a token for exactly the requests of `ScheduledBatch.sampled`. Those of requests that were aborted
                meanwhile are dropped.

        Raises:
            EngineError: tokens are missing, or there are tokens of requests that did not sample.
        """
        in_flight = self._in_flight or []
        expected = {row.request_id for _, row in in_flight if row.samples}
        if expected != sampled.keys():
            rule = "exactly the requests that sample get a token"
            fix = "pass sample()'s result for the same batch"
            raise EngineError.of(
                rule, fix=fix, missing=sorted(expected - sampled.keys()), extra=sorted(sampled.keys() - expected)
            )
        self._in_flight = None
        finished = []
        for request, row in in_flight:
            if request.state is not RequestState.RUNNING:
                continue
            request.num_computed_tokens = row.seq_len
            if row.samples:
                request.output_token_ids.append(int(sampled[row.request_id]))
                if request.is_complete:
                    self.finish(request.id)
                    finished.append(request)
        return finished

    def discard(self) -> None:
        """The scheduled step failed: plan it again next time. Blocks stay, and what was half written is rewritten.

        Requests admitted in that step give their blocks back: they may share blocks that were never computed.
        """
        if self._in_flight is None:
            return
        self._in_flight = None
        for request in reversed(self._admitted):
            if request.state is RequestState.RUNNING:
                self._preempt_newest()

    def _continue_running(self, chunks: dict[Request, int]) -> bool:
        """Schedule the running requests, oldest first; False when one had to be preempted."""
        budget = self._config.max_num_batched_tokens
        preempted = False
        for request in list(self.running):
            if request.state is not RequestState.RUNNING:
                break  # preempted for an older one, and so are all that follow
            num_tokens = min(request.num_pending_tokens, budget)
            needed = num_blocks_for(request.num_computed_tokens + num_tokens, self.block_tokens)
            needed -= len(request.block_ids)
            while needed > self.pool.num_free:
                preempted = True
                if self._preempt_newest() is request:
                    return False
            request.block_ids += self.pool.allocate(needed)
            chunks[request] = num_tokens
            budget -= num_tokens
        return not preempted

    def _admit_waiting(self, chunks: dict[Request, int]) -> None:
        """Start waiting requests, oldest first, while there is a seat, a token of budget and blocks for the chunk."""
        budget = self._config.max_num_batched_tokens - sum(chunks.values())
        while self.waiting and budget and len(self.running) < self._config.max_num_seqs:
            request = self.waiting[0]
            shared = self._shareable(request, chunks)
            computed = len(shared) * self.block_tokens
            num_tokens = min(request.num_tokens - computed, budget)
            needed = num_blocks_for(computed + num_tokens, self.block_tokens) - len(shared)
            if needed > self.pool.num_free:
                return
            self.pool.share(shared)
            request.block_ids = shared + self.pool.allocate(needed)
            request.num_computed_tokens = computed
            request.state = RequestState.RUNNING
            self.running.append(self.waiting.popleft())
            self._admitted.append(request)
            chunks[request] = num_tokens
            budget -= num_tokens

    def _shareable(self, child: Request, chunks: dict[Request, int]) -> list[int]:
        """The parent's blocks that are full of common tokens by the end of this step; one token is left to run."""
        parent = child.parent
        if parent is None:
            return []
        computed = parent.num_computed_tokens + chunks.get(parent, 0)
        common = min(computed, child.num_forked_tokens, child.num_tokens - 1)
        # A parent that does not run holds no blocks.
        return parent.block_ids[: common // self.block_tokens]

    def _preempt_newest(self) -> Request:
        victim = self.running.pop()
        self._release(victim)
        victim.restart()
        self.waiting.appendleft(victim)
        return victim

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []

    def _end(self, request_id: str, state: RequestState) -> bool:
        request = self._live.pop(request_id, None)
        if request is None:
            return False
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)
        request.state = state
        request.parent = None
        return True

    def _row(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        return ScheduledRequest(
            request_id=request.id,
            token_ids=request.tokens(start, stop),
            num_computed_tokens=start,
            block_ids=tuple(request.block_ids[: num_blocks_for(stop, self.block_tokens)]),
            is_prefilling=request.is_prefilling,
            samples=stop == request.num_tokens,
            sampling=request.sampling,
            output_index=len(request.output_token_ids),
        )
