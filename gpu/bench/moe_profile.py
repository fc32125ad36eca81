"""Needs torch. One pass under the profiler: when bytes were under way between ranks, and when kernels ran beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dbo.bench.moe_figures import Span, beside
from dbo.export.profile import moves_bytes


def beside_compute(world: Any, call: Callable[[], Any], layers: int) -> float | None:
    """The share of the exchanges' time in steady layers that kernels of the layers ran beside, on this rank.

    None: the profiler saw no exchange there, or there is no device.
    """
    if not world.asynchronous:
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        world.compute.drain()
    moving: list[Span] = []
    computing: list[Span] = []
    for event in profiler.events():
        name = event.name
        if event.device_type != DeviceType.CUDA:
            continue
        span = float(event.time_range.start), float(event.time_range.end)
        if moves_bytes(name):
            moving.append(span)
        elif not name.startswith(("Memcpy", "Memset")):
            computing.append(span)
    return beside(moving, computing, layers)
