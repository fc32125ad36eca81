"""Needs torch. What fresh memory holds until the operation that fills it has run: values nobody mistakes for data."""

from __future__ import annotations

import torch

_VALUES: dict[torch.dtype, float | int | bool] = {
    torch.int8: -77,
    torch.uint8: 179,
    torch.int16: -7_777,
    torch.int32: -777_777_777,
    torch.int64: -7_777_777_777_777,  # out of bounds for every index, negative ones included
    torch.bool: True,  # a bool has no odd value; the race report is the witness there
}


def poison_value(dtype: torch.dtype) -> complex | float | int | bool:
    """NaN for floating and complex types, a large negative number for integers, True for bool."""
    if dtype.is_floating_point:
        return float("nan")
    if dtype.is_complex:
        return complex("nan+nanj")  # both parts: a real view of it is poison, too
    return _VALUES.get(dtype, 77)  # unsigned 16 to 64 bit


def poison_(data: torch.Tensor) -> torch.Tensor:
    """Overwrite a CPU tensor with poison, in place."""
    return data.fill_(poison_value(data.dtype))


def is_poison(data: torch.Tensor) -> torch.Tensor:
    """Where a CPU tensor holds poison: a bool tensor of the same shape (all False for bool)."""
    if data.dtype is torch.bool:
        return torch.zeros_like(data)
    if data.dtype.is_floating_point or data.dtype.is_complex:
        return torch.isnan(data)
    return data == poison_value(data.dtype)
