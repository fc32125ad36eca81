"""Torch storages of a `WorkspaceManager` as buffers of a trace. Needs torch."""

from __future__ import annotations

import torch

from dbo.trace import Access
from sim.world import SimWorld


class Bytes:
    """What `tests.faults.pair.op` reads and writes: the bytes of a tensor, as the trace names them."""

    def __init__(self, buffer: int, tensor: torch.Tensor) -> None:
        self.buffer = buffer
        start = tensor.storage_offset() * tensor.itemsize
        self._access = Access.interval(buffer, start, start + tensor.numel() * tensor.itemsize)

    def access(self) -> Access:
        return self._access


class Storages:
    """One buffer for each storage; a storage that is seen stays alive, so that its address names it."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._seen: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __call__(self, tensor: torch.Tensor, name: str = "staging") -> Bytes:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            buffer = self._world.engine.new_buffer(self._world.rank, name, storage.nbytes())
            self._seen[storage.data_ptr()] = (buffer, storage)
        return Bytes(self._seen[storage.data_ptr()][0], tensor)
