"""Needs torch. For code that writes its own device kernels (collectives, all-to-all): tensors in and out, opaque work.

out = poisoned_empty((n, h), torch.bfloat16, rank)
x_raw, out_raw = raw(x), raw(out)
submit_kernel("dispatch", reads=[x], writes=[out], run=lambda: out_raw.copy_(x_raw))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dbo.errors import DeviceTensorError, UsageError
from dbo.trace import Access
from sim.tensors.hostread import refuse_in_capture
from sim.tensors.launch import below_autograd, submit
from sim.tensors.layout import layout, layout_of
from sim.tensors.operands import refuse_mix
from sim.tensors.queued import reads_of
from sim.tensors.registry import device_of
from sim.tensors.tensor import SimTensor, Storage, fresh, torch_device, view_on


def _sim(tensor: Any) -> SimTensor:
    if not isinstance(tensor, SimTensor):
        raise UsageError.of("a tensor on sim is needed", fix='move it: tensor.to("sim:0")', got=type(tensor).__name__)
    return tensor


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor that holds `tensor`'s bytes. For queued work only: until then the bytes are poison or stale."""
    return _sim(tensor)._raw


def accesses(tensor: torch.Tensor) -> Access:
    """The bytes of `tensor`, exactly, as a strided box in its buffer."""
    return _sim(tensor)._access


def wrap(data: torch.Tensor, rank: int, name: str = "wrapped") -> SimTensor:
    """A tensor on ``sim:rank`` over the bytes of the CPU tensor `data`, valid at once, in a buffer of its own.

    The buffer is as long as `data`'s storage. Two tensors that share a storage must not both be wrapped: take views of
    the result instead, or their accesses would name two buffers.
    """
    if data.device.type != "cpu" or isinstance(data, SimTensor):
        raise UsageError.of("wrap takes a CPU tensor", fix="use the device tensor as it is", device=data.device)
    with below_autograd():
        data = torch.ops.aten.alias.default(data.detach())
    return view_on(Storage(rank, data.untyped_storage().nbytes(), name), data)


def poisoned_empty(shape: Sequence[int], dtype: torch.dtype, rank: int, name: str = "empty") -> SimTensor:
    """A contiguous tensor of poison on ``sim:rank``, for a kernel to write."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return fresh(layout(tuple(shape), tuple(reversed(strides)), dtype), rank, name)


def to_sim(data: Any, rank: int, *, name: str = "to_sim") -> SimTensor:
    """A queued host-to-device copy of a numpy array or CPU tensor. The host may change `data` as soon as this returns.

    Raises:
        CaptureError: a graph capture is open.
    """
    source = torch.as_tensor(data)
    if source.device.type != "cpu":
        raise UsageError.of("to_sim copies from the host", fix="use tensor.clone()", device=source.device)
    device = device_of(rank)
    refuse_in_capture(device, "host-to-device copy", "copy into a persistent tensor before the capture")
    with below_autograd():
        staged = source.detach().clone()
    out = fresh(layout_of(staged), rank, name)
    into = out._raw
    submit(device, "copy_h2d", (), reads_of([out]), lambda: _copy(into, staged))
    return out


def copy_from_host(target: SimTensor, source: torch.Tensor) -> None:
    """Queue ``target.copy_(source)`` for a CPU tensor, whose values are taken now.

    Raises:
        CaptureError: a graph capture is open.
        RuntimeError: the shapes do not broadcast.
    """
    if source.device.type != "cpu":
        refuse_mix("copy_", target._storage.rank, source.device)
    device = target._storage.device
    refuse_in_capture(device, "host-to-device copy", "copy into a persistent tensor before the capture")
    with below_autograd():
        staged = source.detach().clone()
        staged.expand(target._layout.shape)
    into = target._raw
    submit(device, "copy_h2d", (), reads_of([target]), lambda: _copy(into, staged))


def submit_kernel(
    name: str, *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], run: Callable[[], None]
) -> None:
    """Queue `run` as one opaque operation that reads and writes whole tensors, on the calling task's current stream.

    `run` works on `raw` twins, below autograd. All tensors are of one rank.

    Raises:
        DeviceTensorError: no tensor at all, or tensors of two ranks.
    """
    read, written = [_sim(t) for t in reads], [_sim(t) for t in writes]
    tensors = [*read, *written]
    if not tensors:
        raise DeviceTensorError.of(
            "a kernel names what it touches", fix="pass at least one tensor in reads or writes", kernel=name
        )
    first = tensors[0]._storage
    for other in tensors:
        if other._storage.rank != first.rank:
            refuse_mix(name, first.rank, torch_device(other._storage.rank))
    submit(first.device, name, reads_of(read), reads_of(written), run)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)
