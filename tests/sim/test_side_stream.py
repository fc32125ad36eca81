"""Shared experts on the side stream, in ordering mode: where they run, and what a missing wait is reported as. No torch."""

from __future__ import annotations

from typing import Any

import pytest

from dbo.engine.components import Components
from dbo.moe.modular_kernel import FusedMoEModularKernel
from tests.sim.backend_harness import ALL_BACKENDS
from tests.sim.job_harness import ordering_job, run, verdict_of

REQUESTS = ((8,), (8,))


class Unjoined(FusedMoEModularKernel):
    """Sums the parts of a layer without waiting for the side stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.side is not None:
            self.side.join = lambda result, done: result  # type: ignore[method-assign]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_they_run_aside_and_in_order(backend: str) -> None:
    launched = run(ordering_job(REQUESTS, backend=backend, new_tokens=1, shared_experts="stream"))
    assert str(verdict_of(launched).verdict) == "proved"
    lines = {r.line for r in launched.trace.of_kind("op") if r.name == "shared_experts"}
    assert lines == {"side"}


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_layer_that_does_not_wait_for_them_races(backend: str) -> None:
    job = ordering_job(
        REQUESTS,
        backend=backend,
        new_tokens=1,
        shared_experts="stream",
        programs=lambda rank: Components(kernel=Unjoined),
    )
    assert verdict_of(run(job)).verdict.id == "stream-race"
