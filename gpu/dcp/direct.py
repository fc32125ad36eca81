"""`a2a_direct` of a run (needs torch, Triton and devices that reach each other): a region and an end for each ubatch.

Everything is allocated when the group is made, before any capture: a graph bakes the addresses of regions and of state, which
stay. The epoch lives in device memory, so eager steps and replays mix. Kernels are compiled by the first call of a shape,
eager or in the warm-up run before a capture. One kernel pushes, waits and merges, so in the trace it is one exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dbo.dcp.direct import DirectLayout
from dbo.dcp.interface import DCPShape
from dbo.errors import PeerFailed
from gpu.alltoall.symm import symmetric_region
from gpu.kernels.exchange import DirectExchange, ExchangeTuning, dcp_direct_lse_reduce

if TYPE_CHECKING:
    from gpu.dcp.group import DistDCPGroup

SPARED_SMS = 64
"""SMs that a direct kernel leaves empty, so that a kernel of another communicator always finds room beside it.

Both spin until their peers come. Under DBO the dispatch of one ubatch (NCCL: up to 64 blocks, each nearly an SM) runs beside
the attention of the other: were the first to fill the device on one rank and the second on another, neither could go on.
"""


class DeviceDirect:
    """One rank's end; `dbo.dcp.context_parallel.Direct`."""

    def __init__(self, group: DistDCPGroup, shape: DCPShape) -> None:
        self.group = group
        dtype = getattr(torch, shape.dtype)
        layout = DirectLayout(
            world_size=shape.size,
            max_rows=shape.max_rows * shape.heads // shape.size,
            row_bytes=shape.head_dim * dtype.itemsize,
        )
        tuning = tuning_beside_others(group.world.device)
        self.ends = []
        for _ in range(shape.num_ubatches):
            region, addresses = symmetric_region(layout, group.device_group)
            end = DirectExchange(layout=layout, rank=group.rank, region=region, peer_addresses=addresses, tuning=tuning)
            self.ends.append(end)
        out = torch.empty((1, shape.heads, shape.head_dim), dtype=dtype, device=group.world.device)
        lse = torch.empty((1, shape.heads), dtype=torch.float32, device=group.world.device)
        lens = torch.empty(2, dtype=torch.int32, device=group.world.device)
        self.ends[0].prepare(out, lse, seq_lens=lens[:1], query_start_loc=lens)

    def reduce(
        self,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        ubatch: int,
    ) -> torch.Tensor:
        """`[T, H / C, D]`, the merge over all peers. Rows of the largest (u)batch fit, so there is no other way."""
        with self.group.exchange("dcp.direct", out_THD):
            merged = dcp_direct_lse_reduce(
                out_THD,
                lse_TH,
                self.group,
                seq_lens=seq_lens,
                query_start_loc=query_start_loc,
                exchange=self.ends[ubatch],
            )
        assert isinstance(merged, torch.Tensor)
        return merged

    def check(self) -> None:
        """Waits for the device.

        Raises:
            PeerFailed: a peer's signal did not come in time; results since then are wrong.
        """
        for end in self.ends:
            try:
                end.check()
            except PeerFailed as error:
                member = self.group.members[error.rank]
                raise PeerFailed(member, f"rank {self.group.world.rank} waited in vain for its part") from error


def tuning_beside_others(device: torch.device) -> ExchangeTuning:
    """One program on each SM that is not spared, with more warps than a program among several would have."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return ExchangeTuning(programs=max(1, sms - SPARED_SMS), num_warps=8)
