"""Decode context parallelism (DCP): exchange partial attention between the C ranks of a group, and merge.

Shape legend, and the suffixes that names carry (`out_BHD`, `lse_BH`, `recv_CBNP`):

    B   rows: decode tokens of the batch, graph padding included
    H   query heads before the exchange;  N = H / C, the heads a rank holds after it
    D   head dimension of the partial output (any size, not only powers of two)
    C   ranks of the DCP group;  L = `lse_pack_dim(dtype)`, payload elements that carry one LSE;  P = D + L
    R   requests of the batch

Usage, step by step:

 1. Every rank computes all H heads against *its* share of the keys. The partial output is normalised by the rank's own
    softmax, and the LSE is the log-sum-exp of its own scores. FATAL: returning LSE 0 for a row without local keys. A
    row without keys has no weight, and 0 is the weight of one key. Pass `seq_lens` and `query_start_loc` and the pack
    writes minus infinity for you; what the output holds there (0, 1e30, NaN) does not matter.
 2. `seq_lens` are *local* lengths. FATAL: passing the request's whole length: no shard is ever empty then.
 3. Say the base that the attention kernel used: `is_lse_base_on_e`. FATAL: merging a base-2 LSE as base e. The sum
    still looks like attention (weights .25/.75 become .170/.830), and only the accuracy of long contexts falls.
 4. Build one `WorkspaceManager` for each rank and give every ubatch its own slot. FATAL: two ubatches in one slot: the
    second pack overwrites what the first exchange is still sending.
 5. Warm up with the largest batch, then `workspace.lock()`. Capture inside `workspace.capturing(graph)`. FATAL:
    capturing with staging that a later call may grow: the graph keeps the freed address.
 6. Call `dcp_a2a_lse_reduce` on every rank of the group, in the same order, also with B = 0. FATAL: skipping the call
    on an idle rank, or two ubatches in another order on one rank: the collectives pair with the wrong partner.
 7. The result is `[B, N, D]`: heads rank·N … rank·N + N - 1. Apply the rank's part of the output projection to it, then
    all-reduce over the group.

`a2a_direct` (package `gpu.kernels`) replaces the collective by stores into the peers' memory; `dbo.dcp.direct` holds
its protocol and its memory layout, without torch. The names exported here need torch and load it when first asked for.

collectives       the paths that `a2a` replaces, kept as oracles and as the baseline of every benchmark
context_parallel  `ContextParallel` over torch tensors: one of the three exchanges
direct            the protocol of `a2a_direct` and its memory layout
exchange          `a2a`: one packed all-to-all, then the merge
groups            the group of an exchange: a `torch.distributed` group, or anything that has the same methods
interface         what a model on one rank of a DCP group asks of its group
local             C virtual ranks in one process: one thread each, collectives by copying
merging           the LSE-weighted sum of partial outputs, stable and blind to what empty shards hold
oracle            slow, obvious float64 references: what the exchange must equal
packing           one payload for output and LSE: `[C, B, N, D + L]` in the output's dtype, bit for bit
workspace         staging memory that is handed out again and again
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbo.dcp.collectives import ag_rs, two_collectives
    from dbo.dcp.exchange import dcp_a2a_lse_reduce
    from dbo.dcp.groups import DCPGroup
    from dbo.dcp.merging import merge
    from dbo.dcp.packing import empty_rows, lse_pack_dim, pack, unpack

__all__ = [
    "DCPGroup",
    "ag_rs",
    "dcp_a2a_lse_reduce",
    "empty_rows",
    "lse_pack_dim",
    "merge",
    "pack",
    "two_collectives",
    "unpack",
]

_HOMES = {
    "exchange": ("dcp_a2a_lse_reduce",),
    "groups": ("DCPGroup",),
    "merging": ("merge",),
    "packing": ("empty_rows", "lse_pack_dim", "pack", "unpack"),
    "collectives": ("ag_rs", "two_collectives"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
