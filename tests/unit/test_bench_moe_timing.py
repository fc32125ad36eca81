"""How `dbo bench moe` takes its samples: in turns, each behind the same work, as often on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the timer allocates an array")

from gpu.bench.moe_timing import OWN_LOAD_MS, WARM_UP, Turns  # noqa: E402

REPEAT = 4


def doubled(told: Any) -> Any:
    """What a rank twice as slow says."""
    return [doubled(each) for each in told] if isinstance(told, list) else 2.0 * told


class Stopped(Turns):
    """A timer without devices: a work says itself how long it takes."""

    def __init__(self, *, asynchronous: bool) -> None:
        control = SimpleNamespace(all_gather_object=lambda mine: [mine, doubled(mine)])
        world = SimpleNamespace(asynchronous=asynchronous, control=control, device="cpu")
        super().__init__(world, REPEAT)
        self.log: list[str] = []

    def meet(self) -> None:
        self.log.append("meet")

    def _once(self, work: Any) -> float:
        self.log.append("timed")
        return float(work())

    def taken(self) -> dict[str, tuple[float, ...]]:
        return self.samples({"long": lambda: self._ran("long", 10.0), "short": lambda: self._ran("short", 2.0)})

    def _ran(self, name: str, ms: float) -> float:
        self.log.append(name)
        return ms


def test_samples_on_devices_come_behind_the_same_work() -> None:
    timer = Stopped(asynchronous=True)
    taken = timer.taken()
    # The slower rank's time counts, for the samples and for how often.
    assert taken == {"long": (20.0,) * REPEAT, "short": (4.0,) * REPEAT}
    often = {"long": int(OWN_LOAD_MS // 20) + 1, "short": int(OWN_LOAD_MS // 4) + 1}
    turn = [w for name in ("long", "short") for w in ["meet", *[name] * often[name], "timed", name]]
    first = [w for name in ("long", "short") for w in ["meet", "timed", name]]
    assert timer.log == first * WARM_UP + turn * REPEAT


def test_samples_without_devices_do_not() -> None:
    timer = Stopped(asynchronous=False)
    timer.taken()
    assert timer.log == [w for name in ("long", "short") for w in ["meet", "timed", name]] * (WARM_UP + REPEAT)
