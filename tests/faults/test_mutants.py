"""Thin classes, filled with mutants: one yield, one wait, one hook, one exchange, one field of one slice.

Every fault of the catalogue is planted where a clean run says that it can come into effect, at its first and its last
site, and must be found. A run without it is proved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from dbo.batch.plan import BatchPlan, DCPLayout
from dbo.batch.slicing import UBatchSlice, slice_plan
from dbo.check import judge
from dbo.config.facts import DCP_COMM_BACKENDS
from dbo.job.rank import RankJob
from dbo.trace import Trace
from sim.faults import CATALOGUE
from sim.faults.clean_run import CleanRun
from sim.faults.fault import Fault, Site
from tests.faults.test_metadata import CONTINUED, FIVE, cut
from tests.meta.source_tree import ROOT
from tests.sim.job_harness import BACKENDS, ordering_job, run, verdict_of
from tests.unit.plan_builder import build

# Prompts that make steps of every kind: split and whole, mixed, padded, with a request over the split point, and idle.
LENGTHS = ((9, 3), (7, 8))


TAKES_TWO = frozenset({"config", "dp-disagreement", "collective-mismatch"})
"""Of two ranks that differ, the trace does not say which one is right."""


def job_of(backend: str, exchange: str = "") -> RankJob:
    group = {"decode_context_parallel_size": 2, "dcp_comm_backend": exchange} if exchange else {}
    return ordering_job(LENGTHS, backend=backend, max_num_batched_tokens=12, max_num_seqs=8, **group)


@cache
def clean(backend: str, exchange: str = "") -> Trace:
    return run(job_of(backend, exchange)).trace


def planted() -> Iterator[Any]:
    """(fault, backend, exchange, site): the first and the last site that the clean run offers."""
    for fault in CATALOGUE:
        for backend, exchange in product(fault.backends or BACKENDS, fault.exchanges or ("",)):
            if backend in BACKENDS:
                sites = list(fault.sites(CleanRun(clean(backend, exchange))))
                for site in dict.fromkeys(sites[:1] + sites[-1:]):
                    where = "-".join(filter(None, (fault.inject(site), backend, exchange)))
                    yield pytest.param(fault, backend, exchange, site, id=where)


@pytest.mark.parametrize("exchange", ["", *DCP_COMM_BACKENDS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_run_without_a_fault_is_proved(backend: str, exchange: str) -> None:
    assert judge(clean(backend, exchange)).verdict.text == "proved"


@pytest.mark.parametrize(("fault", "backend", "exchange", "site"), list(planted()))
def test_a_planted_fault_is_named(fault: Fault, backend: str, exchange: str, site: Site) -> None:
    job = job_of(backend, exchange)
    where = fault.inject(site).partition(":")[2]
    launched = run(replace(job, program_of=fault.programs(job.config, where), max_steps=20))
    report = verdict_of(launched)
    assert report.verdict.id in (fault.id, *fault.also), [(v.id, v.sentence) for v in report.violations[:3]]
    if not fault.everywhere and fault.id not in TAKES_TWO:
        named = [v for v in report.violations if v.id == fault.id]
        # It may show where another rank reads or waits for what should have come: then a record or the sentence says whose.
        ranks = {record.id: record.rank for record in launched.trace.records}
        concerned = [{v.rank, *(ranks[id] for id in v.records)} for v in named]
        assert any(site.rank in c for c in concerned) or any(f"rank {site.rank}" in v.sentence for v in named), named


def test_the_clean_run_offers_a_site_for_every_fault() -> None:
    offered = {param.values[0].name for param in planted()}
    wanted = {fault.name for fault in CATALOGUE if set(fault.backends or BACKENDS) & set(BACKENDS)}
    # Symbols are never freed, and have no weights: these need numbers.
    assert wanted - offered == {fault.name for fault in CATALOGUE if fault.numeric} >= {"unrecorded-stream"}


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


def test_the_page_lists_every_fault_of_a_dcp_group() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(dcp-[a-z-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    listed = [(name, re.findall("`([a-z-]+)`", ids), exchanges, sentence) for name, ids, exchanges, sentence in rows]
    wanted = [fault for fault in CATALOGUE if fault.exchanges]
    assert [(name, ids) for name, ids, *_ in listed] == [(fault.name, [fault.id, *fault.also]) for fault in wanted]
    for fault, (*_, exchanges, sentence) in zip(wanted, listed, strict=True):
        assert exchanges == ("all" if len(fault.exchanges) == 3 else ", ".join(fault.exchanges))
        assert fault.sentence.replace(" of a DCP group", "") == sentence
