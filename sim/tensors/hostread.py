"""Needs torch. Host reads: the host waits for a stream to learn a value, as its program declares or by accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from dbo.errors import CaptureError, DBOError
from dbo.trace import Access
from sim.tensors.launch import submit
from sim.tensors.protocol import TensorDevice

T = TypeVar("T")
_declared: ContextVar[str | None] = ContextVar("sim_declared_host_read", default=None)


@contextmanager
def declared_host_read(why: str) -> Iterator[None]:
    """Host reads of the calling task inside the block are meant, and reported as `why`."""
    token = _declared.set(why)
    try:
        yield
    finally:
        _declared.reset(token)


def refuse_in_capture(device: TensorDevice, what: str, fix: str) -> None:
    """Raise `CaptureError` while `device` captures a graph."""
    if device.capturing:
        raise CaptureError.of("an open graph capture forbids it", fix=fix, operation=what, rank=device.rank)


def read_on_host(device: TensorDevice, why: str, name: str, reads: tuple[Access, ...], compute: Callable[[], T]) -> T:
    """Queue `compute` like an operation that reads `reads`, wait for the current stream, return its result.

    Raises:
        CaptureError: a graph capture is open.
        Exception: whatever the queued work raised, if the device passes it on.
    """
    refuse_in_capture(device, f"host read ({why})", "read the value before the capture or after the replay")
    result: list[Any] = []
    submit(device, name, reads, (), lambda: result.append(compute()))
    declared = _declared.get()
    device.host_read(why if declared is None else declared, declared=declared is not None)
    if not result:
        raise DBOError.of(
            "host_read returns after what is queued on the current stream has run",
            fix="wait for the stream to drain in TensorDevice.host_read",
            why=why,
            rank=device.rank,
        )
    return result[-1]


def copy_to_host(tensor: Any, why: str) -> torch.Tensor:
    """The values of a `SimTensor` as a new CPU tensor with the same strides, by a host read."""
    data = tensor._raw
    device = tensor._storage.device
    return read_on_host(device, why, "copy_d2h", (tensor._access,), lambda: data.clone())
