"""Needs torch and devices with peer access. Regions that all ranks of a group can write: torch's symmetric memory, or CUDA IPC.

No multicast: peers are reached by plain stores through mapped addresses.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # noqa: F401 - how tensors are sent between processes

from dbo.dcp.direct import ALIGNMENT_BYTES, DirectLayout
from dbo.errors import NotAvailable

_mapped: list[Any] = []  # handles keep the peers' memory mapped for as long as the process lives


def shared_regions(nbytes: int, process_group: Any, control: Any) -> list[torch.Tensor]:
    """By rank, a zeroed region `[nbytes]` uint8 that all of them can write, this rank's own among them.

    A collective call; it returns only when every rank has zeroed its own, so that no flag can be wiped. A region stays
    mapped for as long as the process lives.

    Args:
        process_group: NCCL, over devices that reach each other: torch's symmetric memory. None: all ranks share one
            device, which torch refuses, and memory comes over CUDA IPC.
        control: gloo, over the same ranks.

    Raises:
        NotAvailable: these devices cannot share memory.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    rank, size = dist.get_rank(control), dist.get_world_size(control)
    if process_group is None:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        packed: list[Any] = [None] * size
        dist.all_gather_object(packed, bytes(ForkingPickler.dumps(own)), group=control)
        regions = [own if source == rank else pickle.loads(told) for source, told in enumerate(packed)]
    else:
        own, handle = _symmetric(nbytes, process_group, device)
        regions = [own if peer == rank else handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(size)]
        own.zero_()
        torch.cuda.synchronize()
    dist.barrier(control)
    _mapped.append(regions)
    return regions


def symmetric_region(layout: DirectLayout, group: Any) -> tuple[torch.Tensor, list[int]]:
    """A zeroed region of this rank, and the addresses of all ranks' regions by rank.

    Returns only when every rank has zeroed its own, so that no flag can be wiped.

    Args:
        group: a NCCL process group over devices that reach each other.

    Raises:
        NotAvailable: torch cannot share memory between these devices.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    region, handle = _symmetric(layout.total_bytes, group, device)
    if any(pointer % ALIGNMENT_BYTES for pointer in handle.buffer_ptrs):
        rule = "symmetric regions are aligned to 256 bytes"
        raise NotAvailable.of(rule, fix="use --dcp-comm-backend a2a", addresses=list(handle.buffer_ptrs))
    region.zero_()
    torch.cuda.synchronize()
    dist.barrier(group)
    return region, list(handle.buffer_ptrs)


def _symmetric(nbytes: int, group: Any, device: torch.device) -> tuple[torch.Tensor, Any]:
    """A region of torch's symmetric memory and its handle, which maps those of the peers."""
    import torch.distributed._symmetric_memory as symmetric

    try:
        region = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(region, group.group_name)
    except RuntimeError as error:
        rule = "a direct exchange needs devices that can map each other's memory"
        fix = "use --dcp-comm-backend a2a, and another backend than symm_copy"
        raise NotAvailable.of(rule, fix=fix, device=device, error=str(error)[:80]) from error
    _mapped.append(handle)
    return region, handle
