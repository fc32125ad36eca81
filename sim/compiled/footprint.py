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
class FootprintLaunch:
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


BEGIN = (FootprintLaunch("embed", ("input_ids",), ("hidden",)),)
END = (FootprintLaunch("norm", ("hidden",), ("normed",)),)
LAYER_END = (
    FootprintLaunch("add", ("routed", "shared_out"), ("moe_out",)),
    FootprintLaunch("residual", ("attn_out", "moe_out"), ("hidden",)),
)
POINTS: Mapping[str, tuple[FootprintLaunch, ...]] = MappingProxyType(
    {
        "A0": (FootprintLaunch("qkv", ("hidden", "positions"), ("qkv",)),),
        "A1": (
            FootprintLaunch("kv_write", ("qkv",), ("cache",)),
            FootprintLaunch("attention", ("qkv", "cache"), ("attended",)),
            FootprintLaunch("o_proj", ("attended", "hidden"), ("attn_out",)),
            FootprintLaunch("gate", ("attn_out",), ("ids",)),
            FootprintLaunch("gate_weights", ("attn_out",), ("weights",)),
        ),
        "S": (FootprintLaunch("shared_experts", ("attn_out",), ("shared_out",)),),
    }
)
EXCHANGES: Mapping[str, Mapping[str, tuple[FootprintLaunch, ...]]] = MappingProxyType(
    {
        "deepep_low_latency": {
            "D.send": (FootprintLaunch("dispatch", ("attn_out", "ids"), (), "send"),),
            "D.recv": (FootprintLaunch("dispatch", (), ("arrived", "counts"), "recv"),),
            "MLP": (FootprintLaunch("experts", ("arrived", "counts"), ("expert_out",)),),
            "C.send": (FootprintLaunch("combine", ("expert_out", "weights"), (), "send"),),
            "C.recv": (FootprintLaunch("combine", (), ("routed", "combine_counts"), "recv"),),
        },
        "nccl": {
            "D.send": (
                FootprintLaunch("pack", ("attn_out", "ids"), ("rows",)),
                FootprintLaunch("pack routing", ("ids", "weights"), ("routing",)),
                FootprintLaunch("all_to_all_single", ("rows",), ("arrived",), "collective"),
                FootprintLaunch("all_to_all_single", ("routing",), ("got_routing",), "collective"),
            ),
            "D.recv": (FootprintLaunch("unpack ids", ("got_routing",), ("arrived_ids",)),),
            "MLP": (FootprintLaunch("experts", ("arrived", "arrived_ids", "got_routing"), ("expert_out",)),),
            "C.send": (FootprintLaunch("all_to_all_single", ("expert_out",), ("got",), "collective"),),
            "C.recv": (FootprintLaunch("reduce", ("got",), ("routed",)),),
            "copy": (FootprintLaunch("copy", ("routed",), ("routed",)),),
        },
    }
)
