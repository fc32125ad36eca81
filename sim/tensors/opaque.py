"""Needs torch. Composites that stay whole, because they choose their kernels by the device: on sim, the CPU's choice.

`scaled_dot_product_attention` would fall back to plain matrix products on an unknown device. As one operation it takes
the CPU's fused kernel, so that the values are the CPU's bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sim.tensors.device import BACKEND_KEY
from sim.tensors.operands import Operands
from sim.tensors.queued import functional

NAMES = ("scaled_dot_product_attention",)
_library = torch.library.Library("aten", "IMPL")


def whole(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queue the composite `func` as one operation; where gradients are wanted it is decomposed instead."""
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return functional(func, name, Operands(func, args, kwargs))


def install() -> None:
    """Catch the composites above autograd too, where torch would take them apart before dispatch."""
    for name in NAMES:
        func = getattr(torch.ops.aten, name).default
        _library.impl(name, partial(_kernel, func, name), f"Autograd{BACKEND_KEY}")


def _kernel(func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return whole(func, name, args, kwargs)
