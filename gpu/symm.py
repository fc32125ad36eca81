"""Needs torch and devices with peer access. Regions that all ranks of a group can write: torch's symmetric memory.

No multicast: peers are reached by plain stores through mapped addresses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dbo.dcp.direct import ALIGNMENT_BYTES, DirectLayout
from dbo.errors import NotAvailable, refusal

_mapped: list[Any] = []  # handles keep the peers' memory mapped for as long as the process lives


def symmetric_region(layout: DirectLayout, group: Any) -> tuple[torch.Tensor, list[int]]:
    """A zeroed region of this rank, and the addresses of all ranks' regions by rank.

    Returns only when every rank has zeroed its own, so that no flag can be wiped.

    Args:
        group: a NCCL process group over devices that reach each other.

    Raises:
        NotAvailable: torch cannot share memory between these devices.
    """
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        region = symmetric.empty(layout.total_bytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(region, group.group_name)
    except RuntimeError as error:
        rule = "the direct exchange needs devices that can map each other's memory"
        raise NotAvailable(refusal(rule, "use --dcp-comm-backend a2a", device=device, error=str(error)[:80])) from error
    if any(pointer % ALIGNMENT_BYTES for pointer in handle.buffer_ptrs):
        rule = "symmetric regions are aligned to 256 bytes"
        raise NotAvailable(refusal(rule, "use --dcp-comm-backend a2a", addresses=list(handle.buffer_ptrs)))
    region.zero_()
    torch.cuda.synchronize()
    dist.barrier(group)
    _mapped.append(handle)
    return region, list(handle.buffer_ptrs)
