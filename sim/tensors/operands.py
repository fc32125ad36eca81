"""Needs torch. Takes the arguments of an operation apart: CPU twins of the tensors, the rank, a key for caches."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dbo.errors import DeviceTensorError
from sim.tensors.device import NAME, resolve_rank
from sim.tensors.tensor import SimTensor, torch_device

CPU = torch.device("cpu")
META = torch.device("meta")
_ATOMS = frozenset((int, float, bool, type(None), str, torch.dtype, torch.memory_format, torch.layout, complex))
_Nested = (list, tuple)


class Operands:
    """The arguments of one call.

    Attributes:
        args, kwargs: with CPU twins in place of `SimTensor`s and ``cpu`` in place of a sim device.
        tensors: the `SimTensor`s among the arguments, in order.
        rank: where the results live: the rank named by a ``device=`` argument, else the tensors'; -1: on the host.
        key: equal for two calls whose results have equal shapes, strides and dtypes.
    """

    __slots__ = ("args", "kwargs", "tensors", "rank", "key")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[SimTensor] = []
        self.rank: int | None = None
        key: list[Any] = [func, torch.get_default_dtype()]
        self.args = [self._take(func, a, key) for a in args]
        self.kwargs = {}
        for name, value in kwargs.items():
            key.append(name)
            self.kwargs[name] = self._take(func, value, key)
        self.key = tuple(key)
        tensors = self.tensors
        if tensors:
            rank = tensors[0]._storage.rank
            for other in tensors:
                if other._storage.rank != rank:
                    refuse_mix(func, rank, torch_device(other._storage.rank))
            if self.rank is None:
                self.rank = rank
            elif self.rank not in (rank, -1):
                refuse_mix(func, rank, torch_device(self.rank))

    def _take(self, func: Any, value: Any, key: list[Any]) -> Any:
        kind = value.__class__
        if kind is SimTensor:
            self.tensors.append(value)
            key.append(value._layout)
            return value._raw
        if kind in _ATOMS:
            key.append(kind)
            key.append(value)
            return value
        if isinstance(value, _Nested):
            key.append(len(value))
            return [self._take(func, v, key) for v in value]
        if isinstance(value, torch.Tensor):
            if value.dim():
                refuse_mix(func, self.tensors[0]._storage.rank if self.tensors else None, value.device)
            key.append(value.dtype)
            return value.detach().clone()  # the host may change it before the operation runs
        if kind is torch.device:
            if value.type == NAME:
                self.rank = resolve_rank(value)
                value = CPU
            else:
                self.rank = -1
            key.append(value)
            return value
        key.append(value)
        return value

    def on_meta(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with meta tensors in place of tensors."""
        return [_map(a, _meta, META) for a in self.args], {k: _map(v, _meta, META) for k, v in self.kwargs.items()}

    def on_zeros(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with CPU tensors of zeros in place of tensors."""
        return [_map(a, _zeros, CPU) for a in self.args], {k: _map(v, _zeros, CPU) for k, v in self.kwargs.items()}


def refuse_mix(func: Any, rank: int | None, other: torch.device) -> NoReturn:
    """Raise what torch says when one operation is given tensors of two devices."""
    here = "sim" if rank is None else torch_device(rank)
    fix = f'copy it first: tensor.to("{here}")'
    if other.type == NAME:
        fix = "ranks exchange data by collectives of their group only"
    raise DeviceTensorError.of(
        "Expected all tensors to be on the same device (0-dim CPU tensors excepted)",
        fix=fix,
        op=getattr(func, "_schema", func).name if hasattr(func, "_schema") else func,
        found=f"{here} and {other}",
    )


def _map(value: Any, make: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, list):
        return [_map(v, make, device) for v in value]
    return device if value is CPU else value


def _meta(data: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=META)


def _zeros(data: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=CPU).zero_()
