"""Thin classes, filled with mutants: one yield, one wait, one hook, one exchange, one field of one slice.

Every fault of the catalogue is planted where a clean run says that it can come into effect, at its first and its last
site, and must be found. A run without it is proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from dbo.batch_plan import BatchPlan, DCPLayout
from dbo.check import judge
from dbo.rank import RankJob
from dbo.slicing import UBatchSlice, slice_plan
from dbo.trace import Trace
from sim.faults import CATALOGUE
from sim.faults.clean_run import CleanRun
from sim.faults.fault import Fault, Site
from tests.faults.test_metadata import CONTINUED, FIVE, cut
from tests.sim.job_harness import BACKENDS, ordering_job, run, verdict_of
from tests.unit.plan_builder import build

# Prompts that make steps of every kind: split and whole, mixed, padded, with a request over the split point, and idle.
LENGTHS = ((9, 3), (7, 8))


TAKES_TWO = frozenset({"config", "dp-disagreement", "collective-mismatch"})
"""Of two ranks that differ, the trace does not say which one is right."""


def job_of(backend: str) -> RankJob:
    return ordering_job(LENGTHS, backend=backend, max_num_batched_tokens=12, max_num_seqs=8)


@cache
def clean(backend: str) -> Trace:
    return run(job_of(backend)).trace


def planted() -> Iterator[Any]:
    """(fault, backend, site): the first and the last site that the clean run offers."""
    for fault in CATALOGUE:
        for backend in fault.backends or BACKENDS:
            if backend in BACKENDS:
                sites = list(fault.sites(CleanRun(clean(backend))))
                for site in dict.fromkeys(sites[:1] + sites[-1:]):
                    yield pytest.param(fault, backend, site, id=f"{fault.inject(site)}-{backend}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_run_without_a_fault_is_proved(backend: str) -> None:
    assert judge(clean(backend)).verdict.text == "proved"


@pytest.mark.parametrize(("fault", "backend", "site"), list(planted()))
def test_a_planted_fault_is_named(fault: Fault, backend: str, site: Site) -> None:
    job = job_of(backend)
    where = fault.inject(site).partition(":")[2]
    report = verdict_of(run(replace(job, program_of=fault.programs(job.config, where), max_steps=20)))
    assert report.verdict.text == f"violated({fault.id})", [(v.id, v.sentence) for v in report.violations[:3]]
    if not fault.everywhere and fault.id not in TAKES_TWO:
        assert site.rank in {v.rank for v in report.violations if v.id == fault.id}


def test_the_clean_run_offers_a_site_for_every_fault() -> None:
    offered = {param.values[0].name for param in planted()}
    wanted = {fault.name for fault in CATALOGUE if set(fault.backends or BACKENDS) & set(BACKENDS)}
    assert wanted - offered == {"unrecorded-stream"}  # symbols are never freed: that one needs numbers


# -- one field of one slice -------------------------------------------------------------------------------------------


def changed(value: Any) -> Any:
    """Another value of the same kind; None where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, np.ndarray) and value.size:
        other = value.copy()
        other.flat[-1] = not other.flat[-1] if value.dtype == bool else other.flat[-1] + 1
        return other
    if isinstance(value, DCPLayout):
        return replace(value, rank=(value.rank + 1) % value.size)
    return None


def with_one_field_changed(name: str, ubatch: int) -> Trace:
    seen: list[BatchPlan] = []

    def how(plan: BatchPlan, piece: UBatchSlice) -> BatchPlan:
        part = slice_plan(plan, piece)
        seen.append(part)
        return replace(part, **{name: changed(getattr(part, name))}) if len(seen) - 1 == ubatch else part

    layout = DCPLayout(size=2, rank=0)
    return cut(FIVE, 16, how, parent=build(FIVE, dcp=layout))


@pytest.mark.parametrize("ubatch", [0, 1])
@pytest.mark.parametrize("name", [field.name for field in fields(BatchPlan)])
def test_any_field_of_any_slice_is_compared(name: str, ubatch: int) -> None:
    report = judge(with_one_field_changed(name, ubatch))
    assert report.verdict.text == "violated(metadata-slice)"
    named = any(f"{name} of ubatch {ubatch}" in v.sentence for v in report.violations)
    # Without a decision in the trace the bounds follow from the rows of the first slice, so its fields look short.
    assert named or (name, ubatch) == ("num_tokens_padded", 0), report.violations[0].sentence


def test_nothing_changed_is_proved() -> None:
    assert judge(cut(FIVE, 16, parent=build(FIVE, dcp=DCPLayout(size=2, rank=0)))).verdict.text == "proved"
    assert judge(cut(CONTINUED, 4)).verdict.text == "proved"
