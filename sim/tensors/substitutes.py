"""Needs torch. Stand-ins for kernels that devices have and the CPU lacks.

Code that asks ``device.type == "cpu"`` takes the device's path on sim, and may meet one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _histc(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.histc` of integers, which counts in float64 and is exact up to 2**53."""
    if data.dtype.is_floating_point:
        return torch.ops.aten.histc.default(data, *args, **kwargs)
    return torch.ops.aten.histc.default(data.double(), *args, **kwargs).to(data.dtype)


KERNELS: dict[str, Callable[..., Any]] = {"aten::histc": _histc}


def kernel_of(func: Any) -> Callable[..., Any]:
    """What runs on the CPU for the operation `func`."""
    return KERNELS.get(func._schema.name, func) if func._overloadname == "default" else func
