"""Decode context parallelism between processes (needs torch): a rank's end of its DCP group, over gloo or NCCL.

World = DP x DCP, and the ranks of a group are consecutive. Every exchange of a group, the direct one included, is numbered,
on the board and in the trace as exchanges between all ranks are. All of them run behind the caller's current stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dbo.dcp.context_parallel import TorchContextParallel
from dbo.dcp.exchange import TORCH_KERNELS, PackKernels
from dbo.dcp.interface import DCPShape, place_in_groups
from dbo.dcp.workspace import WorkspaceManager
from dbo.errors import NotAvailable
from dbo.ubatching.forward_context import get_forward_context
from gpu.group import Exchanges, rows_as_bytes

if TYPE_CHECKING:
    from gpu.device import GpuWorld

# Newer names of the same calls; the older ones warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def context_parallel(world: GpuWorld, shape: DCPShape) -> TorchContextParallel:
    """This rank's end of its group. Every rank of the world calls it, once, before the first step.

    Raises:
        NotAvailable: ranks share a device, which NCCL refuses; or the direct exchange is asked for without devices.
    """
    _refuse(world, shape)
    replica, _, members = place_in_groups(world.rank, shape.size)
    # Every rank makes all groups, in one order: torch numbers them alike on all ranks.
    made = [
        world.process_groups.make(range(first, first + shape.size), world.device)
        for first in range(0, world.size, shape.size)
    ]
    group = DistDCPGroup(world, replica, members, made[replica])
    workspace = WorkspaceManager(world.device, is_capturing=lambda: world.trace.capturing, recorder=world.trace)
    dist.barrier(group=world.process_groups.control)  # nobody begins, and fails, while a peer still connects
    direct = None
    if shape.backend == "a2a_direct":
        from gpu.dcp.direct import DeviceDirect

        direct = DeviceDirect(group, shape)
        world.at_end.append(direct.check)
    return TorchContextParallel(
        shape, group, workspace=workspace, kernels=_kernels(world), current_ubatch=current_ubatch, direct=direct
    )


def current_ubatch() -> int:
    """Of the calling host line's forward pass."""
    return get_forward_context().ubatch


def _refuse(world: GpuWorld, shape: DCPShape) -> None:
    if world.process_groups.data is None:
        rule = "the ranks of a DCP group meet through NCCL, which refuses two ranks on one device"
        fix = "use one device a rank, or --device cpu"
        raise NotAvailable.of(rule, fix=fix, decode_context_parallel_size=shape.size, device=world.device)
    if shape.backend == "a2a_direct" and not world.asynchronous:
        rule = "a2a_direct stores into the peers' device memory"
        fix = "on CPU tensors use --dcp-comm-backend a2a or ag_rs"
        raise NotAvailable.of(rule, fix=fix, dcp_comm_backend=shape.backend, device=world.device)


def _kernels(world: GpuWorld) -> PackKernels:
    if not world.asynchronous:
        return TORCH_KERNELS
    try:
        from gpu.kernels.packed import TRITON_KERNELS
    except ImportError:  # without Triton
        return TORCH_KERNELS
    return TRITON_KERNELS


class DistDCPGroup:
    """One rank's end; satisfies `dbo.dcp.context_parallel.SummingGroup`.

    Args:
        replica: number of the group. members: its ranks. process_group: the torch one over them.
    """

    def __init__(self, world: GpuWorld, replica: int, members: tuple[int, ...], process_group: Any) -> None:
        self.world = world
        self.members = members
        self.world_size = len(members)
        self.rank = members.index(world.rank)
        self.device_group = process_group
        self._exchanges = Exchanges(world, f"dcp{replica}", members)
        if world.rows is not None:
            world.rows.joins_dcp(members)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Chunk c of `input` `[C, …]` goes to peer c."""
        with self.exchange("all_to_all_single", input):
            dist.all_to_all_single(rows_as_bytes(output), rows_as_bytes(input), group=self.device_group)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Inputs of all peers in `output` `[C, …]`."""
        with self.exchange("all_gather", input):
            _all_gather(_bytes(output), _bytes(input), group=self.device_group)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """The sum of chunk c of all inputs `[C, …]`."""
        with self.exchange("reduce_scatter", input):
            _reduce_scatter(output.view(-1), input.view(-1), group=self.device_group)

    def all_reduce(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """The sum of all inputs, the same bits on every peer: each sum is made once and handed on, or is of two."""
        output.copy_(input)
        with self.exchange("all_reduce", input):
            dist.all_reduce(output, group=self.device_group)

    @contextmanager
    def exchange(self, op: str, input: torch.Tensor) -> Iterator[None]:
        """Around launching an exchange of `input`. What the caller launches next is work at its point again."""
        with self._exchanges.exchange(op, {"shape": list(map(int, input.shape)), "dtype": str(input.dtype)}):
            yield
        self.world.trace.launches()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes: no backend looks at what it moves, and gloo has no 16-bit types."""
    return tensor.view(-1).view(torch.uint8)
