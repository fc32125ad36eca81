"""The integer plan of one (u)batch: `BatchPlan`. Numpy only.

Shape symbols: R request rows (padding rows of a graph included), T token rows (padding included), MB blocks a request.
Tokens are laid out request after request; padding rows follow the last real token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

NULL_BLOCK = 0
"""Reserved block of every paged KV cache; no request ever owns it."""

NULL_SLOT = 0
"""First slot of the null block: where rows that must not touch a real key write theirs."""


@dataclass(frozen=True, kw_only=True)
class DCPLayout:
    """Where keys live in a DCP group: position p on peer (p // interleave) mod size.

    Attributes:
        size, rank: of the group, and of this peer in it.
        interleave: consecutive positions that stay on one peer.
    """

    size: int
    rank: int
    interleave: int = 1

    def local_seq_lens(self, seq_lens_R: np.ndarray) -> np.ndarray:
        """Keys of each request that live on this peer, int32 `[R]`."""
        round_tokens = self.size * self.interleave
        whole, rest = np.divmod(np.asarray(seq_lens_R, dtype=np.int64), round_tokens)
        here = np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        return (whole * self.interleave + here).astype(np.int32)

    def max_local_len(self, seq_len: int) -> int:
        """Most keys that a request of `seq_len` has on any peer: a bound that all peers share."""
        whole, rest = divmod(seq_len, self.size * self.interleave)
        return whole * self.interleave + min(rest, self.interleave)

    def count_before(self, position: Any) -> Any:
        """Keys at positions below `position` that live on this peer, for a torch tensor."""
        rest = position % (self.size * self.interleave) - self.rank * self.interleave
        return position // (self.size * self.interleave) * self.interleave + rest.clamp(0, self.interleave)

    def positions(self, local: Any) -> Any:
        """Where in the request this peer's `local`-th key stands; an integer or an array of any kind."""
        return (local // self.interleave * self.size + self.rank) * self.interleave + local % self.interleave


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """One (u)batch in integers: the numpy form of `dbo.batch.attention_metadata.CommonAttentionMetadata`.

    Attributes:
        query_start_loc: int32 `[R + 1]`; tokens of request i are rows [query_start_loc[i], query_start_loc[i + 1]).
        seq_lens: int32 `[R]`, keys of a request after this (u)batch; 0 for padding rows.
        num_computed_tokens: int32 `[R]`, keys before it; seq_lens - query length, always.
        num_reqs: R, padding rows included.
        num_actual_tokens: real tokens.
        num_tokens_padded: T, token rows that run; rows from num_actual_tokens on are padding.
        max_query_len, max_seq_len: over the R requests; 0 when there is none.
        block_table: int32 `[R, MB]`, blocks of a request in order, `NULL_BLOCK` where it has none.
        slot_mapping: int64 `[T]`, cache slot that a row writes; `NULL_SLOT` for padding and other DCP peers' keys.
        positions: int64 `[T]`, position in the request; 0 for padding.
        causal: attention is causal.
        is_prefilling: bool `[R]`, the request still computes its prompt.
        dcp_local_seq_lens: int32 `[R]`, seq_lens counted on this DCP peer; None without DCP.
        dcp_layout: how keys are spread; None without DCP.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    num_computed_tokens: np.ndarray
    num_reqs: int
    num_actual_tokens: int
    num_tokens_padded: int
    max_query_len: int
    max_seq_len: int
    block_table: np.ndarray
    slot_mapping: np.ndarray
    positions: np.ndarray
    causal: bool
    is_prefilling: np.ndarray
    dcp_local_seq_lens: np.ndarray | None = None
    dcp_layout: DCPLayout | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: every field by name, arrays as nested lists. Two plans are equal iff these are."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
