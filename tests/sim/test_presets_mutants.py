"""Each preset with a fault in ONE ubatch only, in ordering mode: violated, or equivalent for a reason that is written here.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from sim.faults import Site
from sim.faults.clean_run import CleanRun
from sim.world import SimRun
from tests.sim.backend_harness import DECLARED, FAULTS, PRESETS, STREAM_BACKENDS, Case, starts
from tests.sim.job_harness import run, verdict_of

DEEPEP = ("deepep_high_throughput", "deepep_v2")
HOST_WAITS = (*DEEPEP, "symm_copy")
YIELDS = ("drop-yield", "add-yield")
WAITS = (
    "drop-wait",
    "unawaited-input",
    "unawaited-result",
    "early-event",
    "early-read",
    "early-receive",
    "skip-signal",
)
MOVED = ("late-event", "late-capture")
HOOKS = ("drop-hook", "double-hook", "late-hook")
BUFFERS = ("late-epilogue",)

# What a fault may be found as, besides its own id. Where hosts wait for counts, ranks that take different turns block each
# other before the yields can be counted. Rows pushed too early overwrite unread ones.
ALSO = {
    "drop-yield": {"collective-mismatch", "deadlock"},
    "add-yield": {"collective-mismatch", "deadlock"},
    "unawaited-input": {"buffer-reuse"},
}


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """Mutants that change nothing that matters, and why."""

    fault: str
    presets: tuple[str, ...]
    backends: tuple[str, ...]
    reason: str
    ubatches: tuple[int, ...] = (0, 1)


FOUR = ("ascend_d0d1c0c1", "lightllm_decode", "mlp_shared_overlap", "sglang_prefill")
OFFSET = ("deepseek_five_stage", "sglang_decode")

EQUIVALENT = (
    Equivalent(
        fault="drop-wait",
        presets=FOUR,
        backends=HOST_WAITS,
        ubatches=(0,),
        reason="ubatch 1's host waits for counts behind ubatch 0's dispatch on comm, before ubatch 0's experts are launched",
    ),
    Equivalent(
        fault="unawaited-result",
        presets=OFFSET,
        backends=DEEPEP,
        ubatches=(0,),
        reason="ubatch 1's host waits for counts behind ubatch 0's combine on comm, before ubatch 0 goes on",
    ),
    Equivalent(
        fault="unawaited-result",
        presets=(*FOUR, *OFFSET),
        backends=("symm_copy",),
        reason="the peers' signals order what has travelled, and own results were made on compute, where they are summed",
    ),
    Equivalent(
        fault="late-event",
        presets=("sglang_decode",),
        backends=DEEPEP,
        reason="over that yield the peer takes its combine's result, which is a wait alone: no foreign work is covered",
    ),
    Equivalent(
        fault="late-capture",
        presets=("ascend_d0d1c0c1", "deepseek_five_stage", "mlp_shared_overlap", "sglang_prefill"),
        backends=DEEPEP,
        reason="no yield between a producer and its send: the capture covers own work only",
    ),
    Equivalent(
        fault="late-capture",
        presets=("lightllm_decode",),
        backends=DEEPEP,
        reason="no yield between a producer and its send; what it covers too is the own shared expert",
    ),
    Equivalent(
        fault="late-capture",
        presets=("sglang_decode",),
        backends=DEEPEP,
        reason="over the yield before its send the peer takes its combine's result, which is a wait alone",
    ),
    Equivalent(
        fault="late-epilogue",
        presets=(*OFFSET, "vllm_high_throughput"),
        backends=("deepep_v2",),
        reason="no exchange of the peer lies between a dispatch and its receive",
    ),
)


def reason_of(fault: str, case: Case, ubatch: int) -> str:
    for entry in EQUIVALENT:
        if fault == entry.fault and case.preset in entry.presets and case.backend in entry.backends:
            if ubatch in entry.ubatches:
                return entry.reason
    return ""


@cache
def clean(case: Case) -> tuple[CleanRun, SimRun]:
    launched = run(case.job())
    assert str(verdict_of(launched).verdict) == "proved"
    return CleanRun(launched.trace), launched


def cases(*faults: str) -> list[tuple[Case, str]]:
    return [
        (Case(preset, backend), fault)
        for preset, backend in DECLARED
        for fault in faults
        if not FAULTS[fault].backends or backend in FAULTS[fault].backends
    ]


def check_violated(case: Case, fault: str, site: Site) -> None:
    found = case.judged(fault, site).verdict
    wanted = {FAULTS[fault].id} | ALSO.get(fault, set())
    assert found.id in wanted, f"{fault} at {site} on {case}: {found}"


def middle_layer(case: Case, ubatch: int) -> tuple[int, ...]:
    """The first and the last yield of the middle one of three layers."""
    total = clean(case)[0].yields(1, ubatch)
    each = -(-total // 3)
    return each, 2 * each - 1


@pytest.mark.parametrize(("case", "fault"), cases(*YIELDS), ids=str)
def test_a_yield_dropped_or_added_in_one_ubatch(case: Case, fault: str) -> None:
    for ubatch in (0, 1):
        for at in middle_layer(case, ubatch):
            check_violated(case, fault, Site(rank=1, ubatch=ubatch, at=at))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault"), cases(*YIELDS), ids=str)
def test_any_yield_dropped_or_added_in_one_ubatch(case: Case, fault: str) -> None:
    for site in FAULTS[fault].sites(clean(case)[0]):
        check_violated(case, fault, site)


@pytest.mark.parametrize(("case", "fault"), cases(*HOOKS), ids=str)
def test_a_hook_lost_doubled_or_late_in_one_ubatch(case: Case, fault: str) -> None:
    sites = [site for site in FAULTS[fault].sites(clean(case)[0]) if site.rank == 1]
    assert sites
    for site in (sites[0], sites[len(sites) // 2], sites[-1]):
        check_violated(case, fault, site)


@pytest.mark.parametrize(("case", "fault"), cases(*WAITS, *MOVED, *BUFFERS), ids=str)
def test_a_wait_dropped_or_a_record_moved_in_one_ubatch(case: Case, fault: str) -> None:
    for ubatch in (0, 1):
        site = Site(rank=1, ubatch=ubatch)
        if reason_of(fault, case, ubatch):
            check_equivalent(case, fault, site)
        else:
            check_violated(case, fault, site)


def check_equivalent(case: Case, fault: str, site: Site) -> None:
    """Nothing is violated; an event moved there delays nothing, unless the reason says what."""
    launched = case.mutant(fault, site)
    assert str(verdict_of(launched).verdict) == "proved"
    if fault in MOVED and "shared expert" not in reason_of(fault, case, site.ubatch):
        same = starts(launched) == starts(clean(case)[1])
        assert same


@pytest.mark.parametrize(
    ("case", "fault"), cases("drop-wait", "unawaited-input", "unawaited-result", "late-epilogue"), ids=str
)
def test_where_a_fault_says_it_has_an_effect(case: Case, fault: str) -> None:
    """The catalogue's own sites, which look at the clean run only, are those without a reason here."""
    sites = {(site.rank, site.ubatch) for site in FAULTS[fault].sites(clean(case)[0])}
    assert sites == {(rank, u) for rank in (0, 1) for u in (0, 1) if not reason_of(fault, case, u)}


def test_every_equivalent_mutant_is_one_that_is_run() -> None:
    def named() -> Iterator[tuple[str, str, str]]:
        for entry in EQUIVALENT:
            yield from ((entry.fault, preset, backend) for preset in entry.presets for backend in entry.backends)

    made = {(fault, case.preset, case.backend) for case, fault in cases(*WAITS, *MOVED, *BUFFERS)}
    listed = list(named())
    assert set(listed) <= made
    assert len(listed) == len(set(listed))
    assert {preset for _, preset, _ in listed} <= set(PRESETS)
    assert {backend for *_, backend in listed} <= set(STREAM_BACKENDS)
