"""Needs torch. The work of a queued operation, run below autograd whatever the running thread is in the middle of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dbo.trace import Access
from sim.tensors.poison import is_poison
from sim.tensors.protocol import TensorDevice
from sim.tensors.source import issued_at

_Key = torch._C.DispatchKey
_BELOW_AUTOGRAD = torch._C.DispatchKeySet(_Key.Python)
for _key in (
    _Key.PythonTLSSnapshot,  # dispatch modes of the running thread
    _Key.AutocastCPU,  # casts were inserted at issue
    _Key.AutogradFunctionality,
    _Key.AutogradCPU,
    _Key.AutogradOther,
    _Key.AutogradMeta,
    _Key.ADInplaceOrView,  # no version counters: inference tensors have none
):
    _BELOW_AUTOGRAD = _BELOW_AUTOGRAD | torch._C.DispatchKeySet(_key)


def below_autograd() -> torch._C._ExcludeDispatchKeyGuard:
    """A guard inside which plain tensors meet their kernels and nothing else: no autograd, autocast or modes."""
    return torch._C._ExcludeDispatchKeyGuard(_BELOW_AUTOGRAD)


class Launch:
    """`work`, to be called later and perhaps again, under the grad and inference mode of the time it was issued."""

    __slots__ = ("name", "src", "work", "inputs", "grad", "inference")

    def __init__(self, name: str, src: str, work: Callable[[], None], inputs: Any) -> None:
        self.name = name
        self.src = src
        self.work = work
        self.inputs = inputs
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()

    def __call__(self) -> None:
        grad = torch.is_grad_enabled()
        try:
            if self.inference == torch.is_inference_mode_enabled():
                torch._C._set_grad_enabled(self.grad)
                with torch._C.DisableTorchFunction(), below_autograd():
                    self.work()
            else:
                with torch._C._InferenceMode(self.inference):  # sets the grad mode too, hence the order
                    torch._C._set_grad_enabled(self.grad)
                    with torch._C.DisableTorchFunction(), below_autograd():
                        self.work()
        except Exception as error:
            error.add_note(f"in the operation {self.name} on sim, issued at {self.src or 'an unknown place'}")
            if _holds_poison(self.inputs):
                error.add_note("an operand still holds poison: the stream did not wait for the one that writes it")
            raise
        finally:
            torch._C._set_grad_enabled(grad)


def _holds_poison(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(is_poison(value).any())
    return isinstance(value, (list, tuple)) and any(_holds_poison(v) for v in value)


def submit(
    device: TensorDevice,
    name: str,
    reads: tuple[Access, ...],
    writes: tuple[Access, ...],
    work: Callable[[], None],
    inputs: Any = (),
) -> None:
    """Queue `work` on the calling task's current stream of `device`.

    Args:
        inputs: CPU twins of the operands, in any nest of lists; looked at only to explain an error.
    """
    src = issued_at()
    device.submit(name, reads=reads, writes=writes, run=Launch(name, src, work, inputs), src=src)
