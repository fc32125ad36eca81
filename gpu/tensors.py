"""Between numpy and tensors of one device (needs torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dbo import registry
from dbo.contract.torch_task_state import TorchTaskState
from dbo.moe.row_ops import TorchRowOps
from dbo.moe.symm_copy_ops import TorchCopyRows

if TYPE_CHECKING:
    from gpu.device import GpuWorld


class DeviceTensors:
    """`dbo.contract.world.Tensors` over torch tensors on the rank's device."""

    def __init__(self, world: GpuWorld) -> None:
        self.world = world
        self.device = world.device

    def from_numpy(self, array: np.ndarray, name: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array).copy()).to(self.device)

    def from_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor's values on the device."""
        return tensor.to(self.device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed array on the device."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def to_host(self, array: torch.Tensor, why: str) -> np.ndarray:
        self.world.host_wait(self.world.current_stream(), why)
        host = array.detach().cpu()
        return host.float().numpy() if host.is_floating_point() else host.numpy()

    def cat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def rows(self, array: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return array[start:stop]

    def take(self, array: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        return array.index_select(0, self.from_numpy(index, "rows"))

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record_stream(self, array: torch.Tensor, stream: Any) -> None:
        # Also in a capture, where a freed array's bytes may go to the next kernel captured on its own stream: with other
        # streams on record they stay with it until the capture ends.
        cuda = getattr(stream, "cuda", None)
        if cuda is not None:
            array.record_stream(cuda)


class Told:
    """`work`, whose methods say first that something is launched at an exchange's point.

    Args:
        silent: names of those that launch nothing.
    """

    def __init__(self, world: GpuWorld, work: Any, *, silent: Sequence[str] = ()) -> None:
        self._world = world
        self._work = work
        self._silent = silent

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._work, name)
        if name in self._silent:
            return method

        def launch(*args: Any) -> Any:
            self._world.trace.launches()
            return method(*args)

        return launch


def row_ops(world: GpuWorld) -> Any:
    """`dbo.moe.nccl.RowOps` and `dbo.moe.deepep_v2.ValidRows`."""
    return Told(world, TorchRowOps(), silent=("empty_rows",))


def copy_rows(world: GpuWorld) -> Any:
    """`dbo.moe.symm_copy.CopyRows`, by this device's kernels where it has some."""
    kernels = registry.layer_kernels(world.device.type)
    return Told(world, TorchCopyRows() if kernels is None else kernels.copy_rows)


class StreamTaskState:
    """What a ubatch thread gets from the thread that started its work: torch's state, the device and its current stream."""

    def __init__(self, world: GpuWorld) -> None:
        self._world = world
        self._stream = world.current_stream()
        self._state = TorchTaskState(world.device.type)

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        before = self._world.current_stream()
        self._world.set_stream(self._stream)
        try:
            return self._state.run(work, *args)
        finally:
            self._world.set_stream(before)
