"""Needs torch. Kernels for tensors that are born on sim: ``torch.empty(..., device="sim")`` and what is built on it.

`zeros`, `ones`, `full`, `eye`, `rand`, … make an empty tensor and fill it, so that the filling is a queued write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sim.tensors.device import BACKEND_KEY, resolve_rank
from sim.tensors.kernels import copy_from_host
from sim.tensors.launch import submit
from sim.tensors.layout import layout_of
from sim.tensors.queued import reads_of
from sim.tensors.registry import device_of
from sim.tensors.tensor import SimTensor, fresh

_library = torch.library.Library("aten", "IMPL")  # registrations last as long as this object


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> SimTensor:
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return fresh(layout_of(like), resolve_rank(device), "empty")


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> SimTensor:
    like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return fresh(layout_of(like), resolve_rank(device), "empty")


def _randperm(
    n: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> SimTensor:
    drawn = torch.randperm(n, generator=generator, dtype=dtype or torch.int64, device="cpu")
    return _written("randperm", drawn, resolve_rank(device))


def _randperm_default(n: int, **kwargs: Any) -> SimTensor:
    return _randperm(n, None, **kwargs)


def _arange(
    start: Any,
    end: Any,
    step: Any = 1,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> SimTensor:
    """torch's own way would resize an empty tensor: one more buffer a call."""
    return _written("arange", torch.arange(start, end, step, dtype=dtype, device="cpu"), resolve_rank(device))


def _written(name: str, values: torch.Tensor, rank: int) -> SimTensor:
    """A tensor that a queued operation without operands fills with `values`."""
    out = fresh(layout_of(values), rank, name)
    into = out._raw

    def run() -> None:
        into.copy_(values)

    submit(device_of(rank), name, (), reads_of([out]), run)
    return out


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What ``torch.tensor(values, device="sim")`` calls, which skips Python dispatch."""
    if isinstance(target, SimTensor) and not isinstance(source, SimTensor):
        copy_from_host(target, source)
    else:
        target.copy_(source)
    return target


def install() -> None:
    """Register the kernels with torch, once."""
    for name, kernel in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("randperm.generator", _randperm),
        ("randperm", _randperm_default),
        ("arange.start_step", _arange),
        ("_copy_from", _copy_from),
    ):
        _library.impl(name, kernel, BACKEND_KEY)
