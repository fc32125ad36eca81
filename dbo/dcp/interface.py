"""What a model on one rank of a DCP group asks of its group. No torch: ordering worlds implement it over symbols.

Shapes as in `dbo.dcp`, and T rows of a (u)batch, c = `rank`, S = ceil(T / C) rows that a peer dispatches to experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class ContextParallel(Protocol):
    """One rank's end of its DCP group. Every rank of the group makes the same calls in the same order.

    Attributes:
        size, rank: C, and this peer's place c.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def reduce_heads(self, out_THD: Any, lse_TH: Any, seq_lens: Any, query_start_loc: Any) -> Any:
        """Partial outputs of all heads `[T, H, D]` with their LSE `[T, H]` -> `[T, H / C, D]`, own heads over all keys.

        `seq_lens` `[R]` are *local* lengths; with `query_start_loc` `[R + 1]` they say which rows have no key here.
        """

    def all_reduce(self, x: Any) -> Any:
        """The sum of every peer's `x`, the same bits on every peer."""

    def all_gather_rows(self, rows: Any) -> Any:
        """Every peer's `[S, …]`, one below the other in order of peers: `[C * S, …]`."""

    def staging(self, graph: str) -> Any:
        """A context manager around the capture of `graph`: what is staged inside belongs to it."""


@dataclass(frozen=True, kw_only=True)
class DCPShape:
    """What a world needs to know to build a `ContextParallel`.

    Attributes:
        size: C. backend: "ag_rs", "a2a" or "a2a_direct".
        max_rows: rows of the largest (u)batch. num_ubatches: slots of the staging.
        heads, head_dim: H, and D of the partial output.
        dtype: of the partial output, by name.
    """

    size: int
    backend: str
    max_rows: int
    num_ubatches: int
    heads: int
    head_dim: int
    dtype: str


def rows_of_peer(rows: int, size: int) -> int:
    """S: how many of T rows each peer dispatches; the last ones may find padding only."""
    return -(-rows // size)


def real_rows_of_peer(real: int, rows: int, size: int, peer: int) -> int:
    """How many of the rows that `peer` dispatches are real, where the first `real` of T rows are."""
    share = rows_of_peer(rows, size)
    return max(0, min(share, real - peer * share))


def place_in_groups(rank: int, size: int) -> tuple[int, int, tuple[int, ...]]:
    """(DP replica, peer, ranks of its group) of a rank: rank = replica * C + peer."""
    replica, peer = divmod(rank, size)
    return replica, peer, tuple(range(replica * size, (replica + 1) * size))
