"""What a host task inherits from the one that starts its work where torch keeps state per thread. Needs torch."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class TorchTaskState:
    """Context variables, grad and inference mode, autocast, dispatch and function modes; see `dbo.contract.world.TaskState`.

    A default device is a function mode.

    Args:
        device_type: whose autocast state counts, for example "cuda".
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device_type = device_type
        self._autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        self._modes = [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work(*args)` under this state; several tasks may do so at the same time."""

        def body() -> Any:
            enabled, dtype = self._autocast
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(self._inference))
                stack.enter_context(torch.set_grad_enabled(self._grad))
                stack.enter_context(torch.autocast(self._device_type, dtype=dtype, enabled=enabled))
                for mode in self._modes:  # outermost first
                    stack.enter_context(mode)
                return work(*args)

        return self._context.copy().run(body)
