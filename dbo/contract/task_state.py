"""What a host task inherits from the one that starts its work, without torch: its context variables."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any


class ContextState:
    """The calling task's context variables; see `dbo.contract.world.TaskState`."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work(*args)` in a copy of them, so that several tasks may do so at the same time."""
        return self._context.copy().run(work, *args)
