"""Needs torch. Operations that run at issue: views, and changes of metadata (`t_`, `unsqueeze_`, `resize_`)."""

from __future__ import annotations

from typing import Any

import torch

from dbo.errors import NotAvailable
from sim.tensors.launch import below_autograd
from sim.tensors.operands import refuse_mix
from sim.tensors.poison import poison_value
from sim.tensors.tensor import SimTensor, Storage, adopt, view_on


def view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A view, or a list of views, of the first argument."""
    base = args[0]
    if not isinstance(base, SimTensor):
        refuse_mix(func, None, base.device)
    made = func(base._raw, *args[1:], **kwargs)
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch._C._InferenceMode(False):  # a view of a normal tensor is a normal tensor: it shares version counters
            return _wrap(made, base._storage)
    return _wrap(made, base._storage)


def _wrap(made: Any, storage: Storage) -> Any:
    if isinstance(made, torch.Tensor):
        return view_on(storage, made)
    return [_wrap(m, storage) for m in made]


def change_in_place(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> SimTensor:
    """Change sizes, strides or offset of the first argument; what is queued already keeps seeing the old ones."""
    tensor = args[0]
    if not isinstance(tensor, SimTensor) or any(isinstance(a, torch.Tensor) for a in args[1:]):
        raise NotAvailable.of(
            "a tensor on sim keeps its storage", fix="use copy_ or a view instead", op=name, self=type(tensor).__name__
        )
    data = torch.ops.aten.alias.default(tensor._raw)
    with below_autograd():
        before = data.untyped_storage().nbytes()
        func(data, *args[1:], **kwargs)
        after = data.untyped_storage().nbytes()
        if after > before:
            whole = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
            _poison_tail(whole, before, data.dtype)
    if after > before or data.numel() * data.itemsize > tensor._storage.nbytes:
        tensor._storage.grow(after)
    with torch._C._InferenceMode(tensor.is_inference()):
        made = view_on(tensor._storage, data)
    torch.Tensor.data.__set__(tensor, made)  # type: ignore[attr-defined]  # torch's own metadata
    adopt(tensor, made)
    return tensor


def _poison_tail(whole: torch.Tensor, start: int, dtype: torch.dtype) -> None:
    tail = whole[start:]
    if tail.numel() % dtype.itemsize == 0 and start % dtype.itemsize == 0:
        tail.view(dtype).fill_(poison_value(dtype))
    else:
        tail.fill_(0xFF)
