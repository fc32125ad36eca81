"""Ranges on the host that name what a line launches, for profilers (needs torch): `rank/ubatch/point step=S layer=L`.

Where a `torch.profiler` is on, `record_function`; with DBO_NVTX=1 also NVTX, for tools that attach from outside.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd import profiler


class Ranges:
    """Opens ranges in the calling thread, one at a time.

    Args:
        nvtx: the device's tools can see them; they do where DBO_NVTX=1.
    """

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx and os.environ.get("DBO_NVTX", "0") == "1"

    @property
    def wanted(self) -> bool:
        """Somebody looks on."""
        return self._nvtx or profiler._is_profiler_enabled

    def open(self, name: str) -> Any:
        """Begin a range; what is returned ends it."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        function = profiler.record_function(name) if profiler._is_profiler_enabled else None
        if function is not None:
            function.__enter__()
        return function, self._nvtx

    def close(self, opened: Any) -> None:
        """End the range that `open` began."""
        function, nvtx = opened
        if function is not None:
            function.__exit__(None, None, None)
        if nvtx:
            torch.cuda.nvtx.range_pop()
