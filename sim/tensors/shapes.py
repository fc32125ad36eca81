"""Needs torch. What an operation will return, known before it runs: layouts, cached by operation, layouts and scalars.

Three ways, in this order: a rule of our own (where the CPU's meta kernel is missing or wrong), a run on meta tensors, a
run on zeros. None of them looks at data, so none of them has to wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sim.tensors.launch import below_autograd
from sim.tensors.layout import Layout, layout, layout_of
from sim.tensors.operands import Operands
from sim.tensors.substitutes import kernel_of

Result = Any  # a Layout, a constant, or a tuple or list of these

LIMIT = 1 << 16
_cache: dict[Any, Result] = {}
RULES: dict[str, Callable[[Operands], Result]] = {}


def outputs(func: Any, operands: Operands) -> Result:
    """The results of ``func`` as a tree: a `Layout` for each tensor, other values as they are.

    Raises:
        Exception: what torch raises for these arguments, for example for shapes that do not fit.
    """
    try:
        return _cache[operands.key]
    except KeyError:
        cacheable = True
    except TypeError:  # an argument that cannot be hashed
        cacheable = False
    with torch._C.DisableTorchFunction(), below_autograd():
        result = _infer(func, operands)
    if cacheable:
        if len(_cache) >= LIMIT:
            _cache.clear()
        _cache[operands.key] = result
    return result


def _infer(func: Any, operands: Operands) -> Result:
    rule = RULES.get(func._schema.name)
    if rule is not None:
        found = rule(operands)
        if found is not None:
            return found
    args, kwargs = operands.on_meta()
    try:
        return as_layouts(func(*args, **kwargs))
    except Exception:  # no meta kernel, or arguments that do not fit: the CPU's own kernel knows, and says it best
        args, kwargs = operands.on_zeros()
        return as_layouts(kernel_of(func)(*args, **kwargs))


def as_layouts(value: Any) -> Result:
    """The tree of layouts of a tree of tensors."""
    if isinstance(value, torch.Tensor):
        return layout_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(as_layouts(v) for v in value) if isinstance(value, tuple) else [as_layouts(v) for v in value]
    return value


def _grouped_mm(operands: Operands) -> Layout | None:
    """``_grouped_mm(a, b, offs, bias, out_dtype)``: 2-D operands are cut in groups along their free or summed axis."""
    a, b = operands.args[0], operands.args[1]
    offs = operands.args[2] if len(operands.args) > 2 else operands.kwargs.get("offs")
    out_dtype = operands.args[4] if len(operands.args) > 4 else operands.kwargs.get("out_dtype")
    dtype = out_dtype or a.dtype
    groups = offs.shape[0] if offs is not None else a.shape[0]
    shape: tuple[int, ...]
    if a.dim() == 2 and b.dim() == 2:
        shape = (groups, a.shape[0], b.shape[1])
    elif a.dim() == 2:
        shape = (a.shape[0], b.shape[-1])
    elif b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[-1])
    align = 16 // dtype.itemsize
    row = -(-shape[-1] // align) * align  # rows are padded to 16 bytes
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return layout(shape, strides, dtype)


def _repeat_interleave(operands: Operands) -> Layout | None:
    """With ``output_size`` given, the length is known without a look at the repeats."""
    size = operands.kwargs.get("output_size")
    return None if size is None else layout((size,), (1,), operands.args[0].dtype)


RULES["aten::_grouped_mm"] = _grouped_mm
RULES["aten::repeat_interleave"] = _repeat_interleave
