"""Faults of a DCP group, planted in one rank's end of it: `Components.context_parallel` wraps what the world has built.

plant(stale_flag)       -> a function from a program to the program with the fault
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dbo.engine.components import Components

Wrap = Callable[[Any], Any]


def plant(wrap: Wrap, program: Components | None = None) -> Components:
    """`program` (the shipped one by default) with `wrap` around this rank's end of its group."""
    return replace(program or Components(), context_parallel=wrap)


def missing_flag(group: Any) -> Any:
    """This rank pushes to nobody: its flags never come."""
    group.direct.peers_to_push = lambda others: ()
    return group


def stale_flag(group: Any) -> Any:
    """From the second exchange on the merge is satisfied with the flags of the one before."""
    group.direct.wanted_epoch = lambda epoch: max(1, epoch - 1)
    return group


def one_parity(group: Any) -> Any:
    """One region for all epochs: a peer that runs ahead writes what is still to be read."""
    group.direct.parities = 1
    return group


def wrong_parity(group: Any) -> Any:
    """Pushes go to the region of the other epoch."""
    group.direct.parity_to_push = lambda epoch: (epoch + 1) % 2
    return group


def exchange_after_sum(group: Any) -> Any:
    """The first exchange of heads comes after a sum, which the other ranks do not make."""
    reduce, calls = group.reduce_heads, []

    def late(out: Any, lse: Any, seq_lens: Any, query_start_loc: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            group.all_reduce(lse)
        return reduce(out, lse, seq_lens, query_start_loc)

    group.reduce_heads = late
    return group


def zero_lse_of_empty_shards(group: Any) -> Any:
    """A row without local keys has LSE 0, the weight of one key, instead of minus infinity. Numeric mode."""
    reduce = group.reduce_heads

    def zeroing(out: Any, lse: Any, seq_lens: Any, query_start_loc: Any) -> Any:
        empty = lse == float("-inf")
        filled = out.masked_fill(empty[:, :, None], 0.0)
        return reduce(filled, lse.masked_fill(empty, 0.0), seq_lens * 0 + 1, query_start_loc)

    group.reduce_heads = zeroing
    return group
