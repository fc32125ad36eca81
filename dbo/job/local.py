"""A world of one rank on plain CPU tensors (needs torch): no simulator, no devices. The reference runs here.

Streams and events do nothing, since a CPU operation is done when it returns; there are no ubatch threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dbo.errors import NotAvailable
from dbo.moe.row_ops import TorchRowOps


class LocalStream:
    """Work is done when it is issued."""

    name = "compute"

    def wait_event(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


class LocalGroup:
    """A group of one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank = 0
        self.size = 1

    def all_reduce(self, table: np.ndarray, *, tag: int) -> np.ndarray:
        return table.copy()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
    ) -> None:
        output.copy_(input)


class LocalTensors:
    """CPU tensors."""

    def from_numpy(self, array: np.ndarray, name: str) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def from_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def to_host(self, array: torch.Tensor, why: str) -> np.ndarray:
        return array.float().numpy()

    def cat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def rows(self, array: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return array[start:stop]

    def take(self, array: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        return array[torch.from_numpy(index)]

    def record_stream(self, array: torch.Tensor, stream: LocalStream) -> None:
        return None


class LocalRecorder:
    """Records nothing."""

    keeps = False

    def host(self, kind: str, name: str = "", **attrs: Any) -> None:
        return None


class LocalWorld:
    """See `dbo.contract.world.World`; backend `nccl` only, no ubatches."""

    rank = 0
    size = 1
    mode = "numeric"

    def __init__(self) -> None:
        self.compute = self.comm = LocalStream()
        self.group = LocalGroup("ep")
        self.control = LocalGroup("dp.cpu")
        self.tensors = LocalTensors()
        self.trace = LocalRecorder()
        self.row_ops = TorchRowOps()

    @property
    def host(self) -> Any:
        rule = "the local world runs unsplit steps only"
        raise NotAvailable.of(rule, fix="run a split step in world sim or gpu", world="local")

    def at_point(self, point: str, *, layer: int) -> None:
        return None

    def launches(self) -> None:
        return None

    def in_ubatch(self, ubatch: int, *, step: int) -> None:
        return None

    def current_stream(self) -> LocalStream:
        return self.compute

    def set_stream(self, stream: LocalStream) -> None:
        return None

    def set_real_tokens(self, tokens: int) -> None:
        return None

    def fail(self, error: BaseException) -> None:
        raise error

    def recover(self, step: int) -> int:
        return step + 1
