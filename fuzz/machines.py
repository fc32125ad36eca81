"""State machines over coordination: several ranks' schedulers, columns, votes and decisions, without the simulator.

Requests arrive, fork, finish and are aborted; ranks go idle and wake. Hypothesis chooses what happens and when; each
rank decides by itself from the table that all ranks filled in, and must decide like the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dbo.batch.coordinate import Decision, RankColumn, decide, exchange, vote
from dbo.batch.slicing import maybe_create_ubatch_slices
from dbo.config import DBOConfig
from dbo.engine.requests import Request
from dbo.engine.scheduled import ScheduledBatch, reads_new_kv, uniform_query_len
from dbo.engine.scheduler import RequestScheduler

MAX_TOKENS = 24


class Table:
    """An all-reduce over ranks that run one after another: the sum of what was put in so far, read when it is full."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[np.ndarray] = []

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    @property
    def total(self) -> np.ndarray:
        return np.asarray(np.sum(self.parts, axis=0), dtype=np.int32)


class Member:
    """One rank's end of a `Table`; what `dbo.batch.coordinate.exchange` takes for a group."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table = table
        self.rank = rank
        self.size = table.size

    def all_reduce(self, table: np.ndarray, *, tag: int) -> np.ndarray:
        self.table.parts.append(table)
        return table


class CoordinationMachine(RuleBasedStateMachine):
    """Ranks that step together; every step's checks are the properties."""

    @initialize(
        ranks=st.integers(2, 4),
        ubatches=st.integers(2, 3),
        decode=st.integers(0, 4),
        prefill=st.integers(0, 10),
        batched=st.integers(6, MAX_TOKENS),
        seats=st.integers(1, 6),
        block_size=st.sampled_from([1, 3, 4]),
        graphs=st.booleans(),
    )
    def start(
        self,
        ranks: int,
        ubatches: int,
        decode: int,
        prefill: int,
        batched: int,
        seats: int,
        block_size: int,
        graphs: bool,
    ) -> None:
        self.config = DBOConfig(
            data_parallel_size=ranks,
            enable_expert_parallel=True,
            enable_dbo=True,
            num_ubatches=ubatches,
            dbo_decode_token_threshold=ubatches + decode,
            dbo_prefill_token_threshold=ubatches + prefill,
            max_num_batched_tokens=batched,
            max_num_seqs=min(seats, batched),
            block_size=block_size,
            max_model_len=MAX_TOKENS,
            num_kv_blocks=2 * MAX_TOKENS,
            cudagraph_mode="FULL" if graphs else "NONE",
        )
        self.schedulers = [RequestScheduler(self.config) for _ in range(ranks)]
        self.live: list[dict[str, Request]] = [{} for _ in range(ranks)]
        self.steps = [0] * ranks
        self.made = 0

    # -- what happens between steps -----------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 3), prompt=st.integers(1, 16), new=st.integers(1, 5))
    def arrive(self, rank: int, prompt: int, new: int) -> None:
        rank %= len(self.schedulers)
        id, self.made = f"q{self.made}", self.made + 1
        request = Request(id=id, prompt_token_ids=tuple(range(1, prompt + 1)), max_new_tokens=new)
        self.schedulers[rank].add(request)
        self.live[rank][id] = request

    @rule(prompt=st.integers(1, 16), new=st.integers(1, 5))
    def arrive_everywhere(self, prompt: int, new: int) -> None:
        for rank in range(len(self.schedulers)):
            self.arrive(rank, max(1, prompt - rank), new)

    @precondition(lambda self: any(self.live))
    @rule(data=st.data(), how=st.sampled_from(["abort", "finish", "fork"]))
    def end_or_fork(self, data: st.DataObject, how: str) -> None:
        rank = data.draw(st.sampled_from([r for r, live in enumerate(self.live) if live]))
        id = data.draw(st.sampled_from(sorted(self.live[rank])))
        if how != "fork":
            assert getattr(self.schedulers[rank], how)(id)
            del self.live[rank][id]
        elif self.live[rank][id].num_tokens < MAX_TOKENS - 8:
            child, self.made = f"q{self.made}", self.made + 1
            self.live[rank][child] = self.schedulers[rank].fork(id, child)

    @precondition(lambda self: any(self.live))
    @rule(rank=st.integers(0, 3))
    def go_idle(self, rank: int) -> None:
        rank %= len(self.schedulers)
        for id in list(self.live[rank]):
            self.schedulers[rank].abort(id)
        self.live[rank].clear()

    # -- a step -------------------------------------------------------------------------------------------------------

    @rule(fails=st.sampled_from([False, False, False, True]))
    def step(self, fails: bool) -> None:
        """One step on all ranks; a failing one is scheduled again."""
        table = Table(len(self.schedulers))
        batches = [scheduler.schedule() for scheduler in self.schedulers]
        columns = [self._column(rank, batch) for rank, batch in enumerate(batches)]
        for rank, column in enumerate(columns):
            exchange(table.member(rank), column)
        # Each rank decides by itself, from what it read.
        decisions = [decide(table.total, self.config) for _ in self.schedulers]
        assert all(decision == decisions[0] for decision in decisions)
        assert [RankColumn.from_array(column) for column in table.total.T] == columns
        self._check(decisions[0], batches, columns)
        for rank, (scheduler, batch) in enumerate(zip(self.schedulers, batches, strict=True)):
            self.steps[rank] += 1
            if fails:
                scheduler.discard()
                continue
            finished = scheduler.update({r.request_id: 1 for r in batch.sampled}) if batch.requests else []
            for request in finished:
                del self.live[rank][request.id]

    def _column(self, rank: int, batch: ScheduledBatch) -> RankColumn:
        step = self.steps[rank]
        if batch.is_idle:
            return RankColumn.idle(step)
        query_len, dependent = uniform_query_len(batch), reads_new_kv(batch)
        wish = vote(self.config, num_tokens=batch.num_tokens, uniform_decode=query_len > 0, allowed=not dependent)
        return RankColumn(
            step=step,
            real_tokens=batch.num_tokens,
            padded_tokens=batch.num_tokens,
            vote=wish,
            wants_full=self.config.cudagraph_mode == "FULL" and query_len > 0,
            uniform_query_len=query_len,
            reads_new_kv=dependent,
        )

    def _check(self, decision: Decision, batches: Sequence[ScheduledBatch], columns: Sequence[RankColumn]) -> None:
        busy = [not batch.is_idle for batch in batches]
        rows = decision.num_tokens_padded
        assert decision.all_idle == (not any(busy))
        assert busy == [bool(live) for live in self.live]
        if decision.all_idle:
            assert not decision.split and set(rows) == {0}
            return
        assert all(padded >= max(1, column.real_tokens) for padded, column in zip(rows, columns, strict=True))
        full = decision.cudagraph_mode == "FULL"
        if decision.split or full:
            assert len(set(rows)) == 1
        else:
            assert rows == tuple(max(1, column.padded_tokens) for column in columns)
        if full:
            assert rows[0] in self.config.cudagraph_capture_sizes
        if decision.split:
            assert all(column.vote and not column.reads_new_kv for column in columns)
            for batch, padded in zip(batches, rows, strict=True):
                self._check_slices(decision, batch, padded)
        else:
            assert decision.num_ubatches == 1 and decision.reason.startswith("not split: ")

    def _check_slices(self, decision: Decision, batch: ScheduledBatch, padded: int) -> None:
        """No ubatch is empty, and real tokens and rows are cut without a gap."""
        lengths = [r.query_len for r in batch.requests]
        real, full = maybe_create_ubatch_slices(
            True, lengths, padded, len(lengths), decision.num_ubatches, decision.split_points
        )
        assert real is not None and full is not None and len(real) == len(full) == self.config.num_ubatches
        assert all(not piece.is_empty() and piece.num_tokens > 0 for piece in (*real, *full))
        assert sum(piece.num_tokens for piece in real) == batch.num_tokens
        assert sum(piece.num_tokens for piece in full) == padded
        for left, right in zip(full, full[1:], strict=False):
            assert left.token_slice.stop == right.token_slice.start

    @invariant()
    def every_rank_is_in_the_same_step(self) -> None:
        assert len(set(getattr(self, "steps", [0]))) == 1
