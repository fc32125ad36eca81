"""Needs torch. `copy_` and `to`: between host and device (a stream write, or a host read), and on the device."""

from __future__ import annotations

from typing import Any

import torch

from sim.tensors import shapes
from sim.tensors.hostread import copy_to_host, read_on_host
from sim.tensors.kernels import copy_from_host
from sim.tensors.operands import Operands
from sim.tensors.queued import functional, in_place, reads_of
from sim.tensors.tensor import SimTensor


def copy_(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """``target.copy_(source)``."""
    target, source = args[0], args[1]
    if not isinstance(target, SimTensor):
        target.copy_(copy_to_host(source, "copy_"))
    elif isinstance(source, SimTensor):
        operands = Operands(func, args, kwargs)
        shapes.outputs(func, operands)
        in_place(func, name, operands, [target], blind=True)
    else:
        copy_from_host(target, source)
    return target


def to_copy(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """``tensor.to(...)`` where it makes a copy: to the host by a host read, else by a queued operation."""
    device = kwargs.get("device")
    operands = Operands(func, args, kwargs)
    if device is None or torch.device(device).type != "cpu":
        return functional(func, name, operands)
    return read_on_host(
        args[0]._storage.device,
        "cpu",
        "copy_d2h",
        reads_of(operands.tensors),
        lambda: func(*operands.args, **operands.kwargs),
    )
