"""What every point of a layer launches, as data: names and logical arrays, for the compiled form of a schedule.

Arrays are named within a ubatch; each write makes a new one, which later reads of the name mean. Two are not like that:
`cache` (one a layer, written in place, shared by the ubatches) and the symmetric receive buffers of a send, which every
rank writes on all ranks.
tests/sim/test_compiled.py compares every line with what the real program launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Launch:
    """One operation.

    Attributes:
        name: as in the trace.
        reads, writes: logical arrays.
        kind: "op"; "collective": arrive, meet all ranks, exchange; "send": a send, a transfer beside the streams, a
            meeting; "recv": the receive of the latest send of the same half.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kind: str = "op"


BEGIN = (Launch("embed", ("input_ids",), ("hidden",)),)
END = (Launch("norm", ("hidden",), ("normed",)),)
LAYER_END = (
    Launch("add", ("routed", "shared_out"), ("moe_out",)),
    Launch("residual", ("attn_out", "moe_out"), ("hidden",)),
)
POINTS: Mapping[str, tuple[Launch, ...]] = MappingProxyType(
    {
        "A0": (Launch("qkv", ("hidden", "positions"), ("qkv",)),),
        "A1": (
            Launch("kv_write", ("qkv",), ("cache",)),
            Launch("attention", ("qkv", "cache"), ("attended",)),
            Launch("o_proj", ("attended", "hidden"), ("attn_out",)),
            Launch("gate", ("attn_out",), ("ids",)),
            Launch("gate_weights", ("attn_out",), ("weights",)),
        ),
        "S": (Launch("shared_experts", ("attn_out",), ("shared_out",)),),
    }
)
EXCHANGES: Mapping[str, Mapping[str, tuple[Launch, ...]]] = MappingProxyType(
    {
        "deepep_low_latency": {
            "D.send": (Launch("dispatch", ("attn_out", "ids"), (), "send"),),
            "D.recv": (Launch("dispatch", (), ("arrived", "counts"), "recv"),),
            "MLP": (Launch("experts", ("arrived", "counts"), ("expert_out",)),),
            "C.send": (Launch("combine", ("expert_out", "weights"), (), "send"),),
            "C.recv": (Launch("combine", (), ("routed", "combine_counts"), "recv"),),
        },
        "nccl": {
            "D.send": (
                Launch("pack", ("attn_out", "ids"), ("rows",)),
                Launch("pack routing", ("ids", "weights"), ("routing",)),
                Launch("all_to_all_single", ("rows",), ("arrived",), "collective"),
                Launch("all_to_all_single", ("routing",), ("got_routing",), "collective"),
            ),
            "D.recv": (Launch("unpack ids", ("got_routing",), ("arrived_ids",)),),
            "MLP": (Launch("experts", ("arrived", "arrived_ids", "got_routing"), ("expert_out",)),),
            "C.send": (Launch("all_to_all_single", ("expert_out",), ("got",), "collective"),),
            "C.recv": (Launch("reduce", ("got",), ("routed",)),),
            "copy": (Launch("copy", ("routed",), ("routed",)),),
        },
    }
)
