"""The two-thread ring under the tool `frontrun`, for a comparison in the same run: prints schedules a second.

Started by that tool's own launcher, which patches `threading`; see `sim.bench.suite`.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from dbo.bench.ring import TwoThreadRing


def _ring() -> TwoThreadRing:
    return TwoThreadRing(threading.Barrier(2), [threading.Event(), threading.Event()])


def schedules_per_second(attempts: int) -> float:
    """Random schedules of the ring; the tool's exhaustive strategy times out on the barrier."""
    import frontrun  # type: ignore[import-not-found, unused-ignore]

    workers: list[Any] = [lambda ring: ring.work(0), lambda ring: ring.work(1)]
    start = time.perf_counter()
    result = frontrun.explore(
        setup=_ring, workers=workers, invariant=lambda ring: ring.fair, strategy="random", max_attempts=attempts
    )
    if not result.property_holds:
        raise RuntimeError(f"frontrun does not confirm the ring: {result}")
    return float(result.num_explored / (time.perf_counter() - start))


if __name__ == "__main__":
    sys.stdout.write(f"{schedules_per_second(int(sys.argv[1]))}\n")
