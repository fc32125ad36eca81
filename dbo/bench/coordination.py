"""All inputs of the DP coordination, up to renaming ranks, judged by what a decision promises. Numpy only.

`dbo.batch.coordinate.decide` treats the ranks alike: renamed ranks give the same decision, renamed. So of all tables over
some classes of columns, one for each multiset of classes has to be looked at: C(R + K - 1, R) instead of K ** R.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations_with_replacement

import numpy as np

from dbo.batch.coordinate import Common, Decision, RankColumn, decide
from dbo.batch.slicing import maybe_create_ubatch_slices
from dbo.errors import DBOError

STEP = 7
IDLE = RankColumn.idle(STEP)
SMALL = RankColumn(step=STEP, real_tokens=3, padded_tokens=3)
"""Below the threshold: votes no."""
MIXED = RankColumn(step=STEP, real_tokens=40, padded_tokens=40, vote=True)
"""Prefill and decode together: votes to split, takes no graph."""
UNIFORM = RankColumn(step=STEP, real_tokens=24, padded_tokens=24, vote=True, wants_full=True, uniform_query_len=1)
"""Decode only: votes to split and wants a graph. Has fewer tokens than the others' padding, half of them at least."""
CLASSES = (IDLE, SMALL, MIXED, UNIFORM)
COMMON = Common(num_ubatches=2, cudagraph_capture_sizes=(8, 32, 64))


def cases(ranks: int, classes: Sequence[RankColumn] = CLASSES) -> Iterator[tuple[RankColumn, ...]]:
    """One table for each multiset of classes: the columns, by rank."""
    return combinations_with_replacement(classes, ranks)


def judge_all(ranks: int, *, common: Common = COMMON) -> int:
    """Decide and judge every case; returns how many there were.

    Raises:
        DBOError: a decision that breaks a promise.
    """
    arrays = {column: column.to_array() for column in CLASSES}
    count = 0
    for columns in cases(ranks):
        table = np.stack([arrays[column] for column in columns], axis=1)
        judge(columns, decide(table, common), common)
        count += 1
    return count


def judge(columns: Sequence[RankColumn], decision: Decision, common: Common) -> None:
    """What a decision promises to all ranks.

    Raises:
        DBOError: names the promise.
    """
    busy = [c for c in columns if c.real_tokens]
    padded = decision.num_tokens_padded
    _hold(decision.all_idle == (not busy), "nobody runs exactly when nobody has work", decision)
    _hold(len(padded) == len(columns), "the decision says what every rank runs", decision)
    _hold(
        all(p >= c.real_tokens for c, p in zip(columns, padded, strict=True)), "padding never drops a token", decision
    )
    _hold(decision.all_idle or min(padded) >= 1, "a rank without work runs a dummy batch while others work", decision)
    _hold(decision.split or bool(decision.reason), "an unsplit step has a reason", decision)
    full = decision.cudagraph_mode == "FULL"
    _hold(not full or all(c.wants_full for c in busy), "a graph runs only where every busy rank wants one", decision)
    _hold(not full or padded[0] in common.cudagraph_capture_sizes, "a graph has a captured size", decision)
    if decision.split or full:
        _hold(len(set(padded)) == 1, "ranks that split or replay run equally many rows", decision)
    if decision.split:
        _hold(all(c.vote for c in columns), "a step is split only when every rank votes for it", decision)
        for tokens in {c.real_tokens for c in columns}:
            no_empty = _no_empty_ubatch(tokens, padded[0], decision.num_ubatches, decision.split_points)
            _hold(no_empty, "no ubatch is empty on any rank", decision)


@cache
def _no_empty_ubatch(tokens: int, padded: int, num_ubatches: int, points: tuple[int, ...]) -> bool:
    unpadded, _ = maybe_create_ubatch_slices(True, [1] * tokens, padded, tokens, num_ubatches, points)
    return unpadded is not None and not any(piece.is_empty() for piece in unpadded)


def _hold(promise: bool, rule: str, decision: Decision) -> None:
    if not promise:
        raise DBOError.of(rule, fix="mend dbo.batch.coordinate", decision=decision)
