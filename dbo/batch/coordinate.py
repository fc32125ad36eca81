"""One decision for all DP ranks: split or not, how many tokens to run, graphs or not. Numpy only.

Every step, every rank puts one column into an int32 table `[7, R]` (R ranks), one SUM all-reduce fills it in
everywhere, and `decide` turns it into the same `Decision` on every rank. Nothing local is consulted, then or later; an
idle rank takes part like any other, since its peers' exchanges need it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dbo.batch.slicing import default_split_points
from dbo.errors import ArgumentError, StepDrift

NUM_ROWS = 7
"""Rows of the table, one a field of `RankColumn`, in the order of its fields."""

ROW_STEP, ROW_REAL, ROW_PADDED, ROW_VOTE, ROW_WANTS_FULL, ROW_QUERY_LEN, ROW_READS_NEW_KV = range(NUM_ROWS)


@dataclass(frozen=True, kw_only=True)
class RankColumn:
    """What one rank tells the others about its batch.

    Attributes:
        step: number of the engine step.
        real_tokens: scheduled tokens; 0: the rank is idle.
        padded_tokens: after the rank's own padding, graphs aside; 0 or 1 when idle.
        vote: the rank wants to split; an idle one never does.
        wants_full: the rank wants to replay a full graph.
        uniform_query_len: the query length of all its requests; 0: mixed, or idle.
        reads_new_kv: one of its requests reads KV that another one of the same batch writes.
    """

    step: int
    real_tokens: int
    padded_tokens: int
    vote: bool = False
    wants_full: bool = False
    uniform_query_len: int = 0
    reads_new_kv: bool = False

    @classmethod
    def idle(cls, step: int) -> RankColumn:
        """The column of a rank that has nothing to do in this step and runs a dummy batch if others run."""
        return cls(step=step, real_tokens=0, padded_tokens=1)

    def to_array(self) -> np.ndarray:
        """int32 `[7]`."""
        return np.array([int(getattr(self, f.name)) for f in dataclasses.fields(self)], dtype=np.int32)

    @classmethod
    def from_array(cls, column: np.ndarray) -> RankColumn:
        """Read what `to_array` wrote."""
        step, real, padded, vote_, wants_full, query_len, reads_new_kv = (int(v) for v in column)
        return cls(
            step=step,
            real_tokens=real,
            padded_tokens=padded,
            vote=bool(vote_),
            wants_full=bool(wants_full),
            uniform_query_len=query_len,
            reads_new_kv=bool(reads_new_kv),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)


class VoteConfig(Protocol):
    """What `vote` reads from a configuration; a `DBOConfig` is one."""

    @property
    def enable_dbo(self) -> bool: ...
    @property
    def dbo_decode_token_threshold(self) -> int: ...
    @property
    def dbo_prefill_token_threshold(self) -> int: ...


class CommonConfig(Protocol):
    """What `decide` reads from the common configuration; a `DBOConfig` is one."""

    @property
    def num_ubatches(self) -> int: ...
    @property
    def split_points(self) -> tuple[int, ...] | None: ...
    @property
    def cudagraph_capture_sizes(self) -> Sequence[int]: ...


@dataclass(frozen=True, kw_only=True)
class Common:
    """A `CommonConfig` by itself, for tools and tests that have no whole configuration."""

    num_ubatches: int = 2
    split_points: tuple[int, ...] | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do in this step.

    Attributes:
        split: run the step in `num_ubatches` ubatches, cut at `split_points`.
        num_tokens_padded: token rows that each rank runs, by rank; all 0 when all ranks are idle.
        cudagraph_mode: "FULL" or "NONE".
        split_points: U - 1 token counts when split, else empty.
        num_ubatches: U when split, else 1.
        all_idle: no rank has a token; nobody runs a forward.
        uniform_query_len: of the graph that is replayed; 0 without one.
        reason: why the step is not split, one sentence; empty when it is.
    """

    split: bool
    num_tokens_padded: tuple[int, ...]
    cudagraph_mode: str
    split_points: tuple[int, ...]
    num_ubatches: int
    all_idle: bool
    uniform_query_len: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: tuples as lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


class Reducer(Protocol):
    """The part of `dbo.contract.world.Group` that coordination uses."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, table: np.ndarray, *, tag: int) -> np.ndarray:
        """The sum of every member's int32 `[7, R]`, on every member. Blocks the calling host task."""


def vote(config: VoteConfig, *, num_tokens: int, uniform_decode: bool, allowed: bool = True) -> bool:
    """Does this rank want to split its batch?

    Args:
        num_tokens: real tokens; an idle rank has none and votes no.
        uniform_decode: every request decodes, all with the same query length.
        allowed: False when this batch must stay whole, for example since one request reads another's new KV.
    """
    threshold = config.dbo_decode_token_threshold if uniform_decode else config.dbo_prefill_token_threshold
    return config.enable_dbo and allowed and num_tokens > 0 and num_tokens >= threshold


def exchange(group: Reducer, column: RankColumn) -> np.ndarray:
    """Fill in the table, int32 `[7, R]`: one SUM all-reduce of tables that are zero outside the own column.

    Every rank calls it exactly once a step, idle or not, in the same order.

    Args:
        group: all ranks of the run; its `all_reduce` blocks until every rank has called.
        column: this rank's.
    """
    table = np.zeros((NUM_ROWS, group.size), dtype=np.int32)
    table[:, group.rank] = column.to_array()
    return np.asarray(group.all_reduce(table, tag=column.step), dtype=np.int32)


def decide(table: np.ndarray, common: CommonConfig) -> Decision:
    """The decision, a pure function of the table and the common configuration.

    Args:
        table: int32 `[7, R]`, one `RankColumn` a rank.

    Raises:
        StepDrift: the ranks are not in the same step.
        ValueError: a table of another shape, or a column that contradicts itself.
    """
    columns = _columns(table)
    steps = [c.step for c in columns]
    if len(set(steps)) > 1:
        raise StepDrift(steps)
    busy = [c for c in columns if c.real_tokens > 0]
    if not busy:
        return _unsplit((0,) * len(columns), reason="not split: all ranks are idle", all_idle=True)
    tokens = max(c.padded_tokens for c in busy)
    query_len = _common_query_len(busy)
    captured = [s for s in common.cudagraph_capture_sizes if s >= tokens] if query_len else []
    full = bool(captured)
    if full:
        tokens = min(captured)
    else:
        query_len = 0
    points = common.split_points or default_split_points(tokens, common.num_ubatches)
    reason = _why_not_split(columns, points, tokens, query_len, common)
    if reason:
        own = tuple(c.padded_tokens if c.real_tokens else 1 for c in columns)
        return _unsplit((tokens,) * len(columns) if full else own, reason=reason, query_len=query_len)
    return Decision(
        split=True,
        num_tokens_padded=(tokens,) * len(columns),
        cudagraph_mode="FULL" if full else "NONE",
        split_points=points,
        num_ubatches=common.num_ubatches,
        all_idle=False,
        uniform_query_len=query_len,
        reason="",
    )


def _columns(table: np.ndarray) -> list[RankColumn]:
    table = np.asarray(table)
    if table.ndim != 2 or table.shape[0] != NUM_ROWS or not table.shape[1]:
        raise ArgumentError.of(
            "the table has one column a rank", fix="exchange it with `exchange`", shape=table.shape, rows=NUM_ROWS
        )
    columns = [RankColumn.from_array(c) for c in table.T]
    for rank, c in enumerate(columns):
        idle_and_wants = c.real_tokens == 0 and (c.vote or c.padded_tokens > 1)
        if table[:, rank].min() < 0 or (c.real_tokens and c.padded_tokens < c.real_tokens) or idle_and_wants:
            raise ArgumentError.of(
                "a column has no negative number, padding is not below the real tokens, and an idle rank "
                "votes no and pads to one token at most",
                fix="make it with RankColumn and vote",
                rank=rank,
                column=table[:, rank].tolist(),
            )
    return columns


def _common_query_len(busy: list[RankColumn]) -> int:
    """The query length with which every busy rank wants a full graph; 0 when they do not agree."""
    lengths = {c.uniform_query_len for c in busy}
    return lengths.pop() if all(c.wants_full for c in busy) and len(lengths) == 1 else 0


def _why_not_split(
    columns: list[RankColumn], points: tuple[int, ...], tokens: int, query_len: int, common: CommonConfig
) -> str:
    """One sentence, or nothing when the step is split."""
    no = [rank for rank, c in enumerate(columns) if not c.vote]
    if no:
        return f"not split: {_named(no)} voted no"
    dependent = [rank for rank, c in enumerate(columns) if c.reads_new_kv]
    if dependent:
        return f"not split: a request of {_named(dependent)} reads KV that another of the same batch writes"
    if not points or points[0] < 1:
        return f"not split: {tokens} tokens do not make {common.num_ubatches} ubatches"
    if common.split_points and query_len and any(p % query_len for p in points):
        return f"not split: split points {list(points)} cut inside a query of length {query_len}, which no graph does"
    empty = [rank for rank, c in enumerate(columns) if points[-1] >= c.real_tokens]
    if empty:
        return f"not split: the last ubatch, from token {points[-1]} on, would be empty on {_named(empty)}"
    return ""


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _unsplit(tokens: tuple[int, ...], *, reason: str, query_len: int = 0, all_idle: bool = False) -> Decision:
    return Decision(
        split=False,
        num_tokens_padded=tokens,
        cudagraph_mode="FULL" if query_len else "NONE",
        split_points=(),
        num_ubatches=1,
        all_idle=all_idle,
        uniform_query_len=query_len,
        reason=reason,
    )
