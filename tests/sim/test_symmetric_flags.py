"""Signals of backend `symm_copy` may be flags: each is lowered by its receiver before the sender raises it again.

The simulator counts calls. Devices have one flag a source and channel, so two raises with no wait between them would be one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from dbo.check.happens import HappensBefore
from dbo.trace import Trace
from tests.sim.backend_harness import DECLARED
from tests.sim.job_harness import ordering_job, run

PRESETS = [preset for preset, backend in DECLARED if backend == "symm_copy"]


def raised_too_early(trace: Trace) -> tuple[list[str], int]:
    """Signals that no wait for their predecessor comes before, and how many pairs there were."""
    happens = HappensBefore(trace)
    raised: dict[str, dict[int, int]] = defaultdict(dict)
    waited: dict[str, dict[int, int]] = defaultdict(dict)
    for record in trace.records:
        if str(record.attrs.get("event", "")).startswith("symm."):
            (raised if record.kind == "record" else waited)[record.attrs["event"]][record.rank] = record.id
    early, pairs = [], 0
    for event, waits in waited.items():
        channel, _, call = event.rpartition("#")
        for source, signal in raised.get(f"{channel}#{int(call) + 1}", {}).items():
            for rank, wait in waits.items():
                if rank != source:
                    pairs += 1
                    if not happens.ordered(wait, signal):
                        early.append(f"{channel}#{int(call) + 1} of rank {source}, for rank {rank}")
    return early, pairs


@pytest.mark.parametrize("graphs", ["NONE", "FULL"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_flag_is_down_before_it_is_raised_again(preset: str, graphs: str) -> None:
    """Split, unsplit and idle steps, eager and from graphs."""
    launched = run(
        ordering_job(
            ((12, 3), (5,)),
            backend="symm_copy",
            schedule=preset,
            cudagraph_mode=graphs,
            new_tokens=4,
            model={"num_hidden_layers": 4},
            max_num_batched_tokens=24,
        )
    )
    early, pairs = raised_too_early(launched.trace)
    assert early == [] and pairs > 50


def test_a_region_for_both_ubatches_would_lose_signals() -> None:
    """The check can fail: with one channel for two ubatches the second one's signal comes before the first one's wait."""
    job = ordering_job(
        ((12,), (12,)),
        backend="symm_copy",
        schedule="ascend_d0d1c0c1",
        model={"num_hidden_layers": 4},
        max_num_batched_tokens=24,
        new_tokens=1,
    )
    from tests.sim.backend_harness import FAULTS

    launched = run(replace(job, program_of=FAULTS["one-region"].programs(job.config, "")))
    early, _ = raised_too_early(launched.trace)
    assert early


def test_ubatches_that_run_one_after_another_keep_to_their_own_regions() -> None:
    """Their sizes may differ, and the first one's rows are still read when a faster peer sends the second one's."""
    job = ordering_job(
        ((12,), (12,)),
        backend="symm_copy",
        schedule="ascend_d0d1c0c1",
        model={"num_hidden_layers": 4},
        max_num_batched_tokens=24,
        new_tokens=1,
    )
    launched = run(replace(job, serial=True))
    events = {str(r.attrs.get("event", "")).partition("#")[0] for r in launched.trace.records}
    assert {"symm.u0.dispatch", "symm.u1.dispatch", "symm.u0.combine", "symm.u1.combine"} <= events
