"""Timestamps inside graphs (needs torch and triton): a captured kernel writes the device's clock into a slot.

A profiler attaches no host ranges to the work of a replayed graph, and CUDA events cannot be timed from inside one.
Slots are overwritten by each replay, so they are read before the next one.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dbo.errors import CaptureError

CAPACITY = 1 << 16


# Not specialised on the slot: a variant that is compiled during a capture would break it.
@triton.jit(do_not_specialize=["at"])
def _write_clock(slots, at):  # type: ignore[no-untyped-def]
    tl.store(slots + at, globaltimer())


class StampSlot(int):
    """The place of one timestamp."""


class Stamps:
    """The slots of one device, and how its clock relates to the host's."""

    def __init__(self, device: torch.device) -> None:
        self.slots = torch.zeros(CAPACITY, dtype=torch.int64, device=device)
        self._used = 0
        self._zero_us = self._calibrate()

    def mark(self, stream: Any) -> StampSlot:
        """Have `stream` write the time into a new slot when it gets there.

        Raises:
            CaptureError: all slots are taken.
        """
        if self._used == CAPACITY:
            rule = "a trace has room for so many timestamps in graphs"
            raise CaptureError.of(rule, fix="capture fewer sizes, or run without a trace", capacity=CAPACITY)
        slot = StampSlot(self._used)
        self._used += 1
        with torch.cuda.stream(stream.cuda):
            _write_clock[(1,)](self.slots, int(slot))
        return slot

    def read_us(self) -> list[float]:
        """All slots in microseconds of the host's clock; the device must have come to the end of the replay."""
        return [self._zero_us + ns / 1000 for ns in self.slots[: self._used].cpu().tolist()]

    def _calibrate(self) -> float:
        """Host microseconds at device time 0, from the tightest of a few attempts. Compiles the kernel, too."""
        best_us, zero_us = float("inf"), 0.0
        for _ in range(8):
            torch.cuda.synchronize(self.slots.device)
            start = time.perf_counter_ns()
            _write_clock[(1,)](self.slots, 0)
            torch.cuda.synchronize(self.slots.device)
            stop = time.perf_counter_ns()
            if (stop - start) / 1000 < best_us:
                best_us = (stop - start) / 1000
                zero_us = (start + stop) / 2000 - int(self.slots[0]) / 1000
        return zero_us
