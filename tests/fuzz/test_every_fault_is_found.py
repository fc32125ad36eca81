"""The property of the whole harness: every planted fault is found under its own id, and no clean run is flagged.

Cases are drawn from a printed seed. Each planted case has a clean twin, which must be proved; the fault sits at a site
where the twin shows that it has something to break (`Fault.needs`), so a run in which it is not found is a miss.
"""

import dataclasses
import importlib.util

import pytest
from hypothesis import given, seed, settings

from dbo.check import DETECTORS, judge
from dbo.config.facts import DCP_COMM_BACKENDS, SHARED_EXPERTS
from fuzz import profiles
from fuzz.strategies import clean_cases, planted_cases
from fuzz.targets import bites, clean_run, clean_twin, run, run_case, wrong_tokens
from sim.faults import CATALOGUE

AT_LEAST = 10
AMOUNT = profiles.amount()
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed, and runs with numbers need it")

# Ids whose faults are not in the catalogue: unit tests and tests/faults plant those.
ELSEWHERE = {"two-awake", "capacity", "graph-capture", "graph-stale", "slot-cycle"}

ordering = [f for f in CATALOGUE if not f.numeric]
numeric_only = [f for f in CATALOGUE if f.numeric]


def draw(strategy, count, fuzz_seed):
    """About `count` different cases."""
    found = {}

    @seed(fuzz_seed)
    @settings(max_examples=count, database=None, derandomize=False)
    @given(strategy)
    def collect(case):
        found[case.token] = case

    collect()
    return list(found.values())


def check_found(case, fault):
    __tracebackhide__ = True
    assert bites(case), f"the site offers nothing to break: {case.command}"
    report = run_case(case)
    seen = [violation.id for violation in report.violations]
    assert report.verdict.id in (fault.id, *fault.also), f"{report.verdict} and not {fault.id} {seen}: {case.command}"


def check_clean(case):
    __tracebackhide__ = True
    clean, report = clean_twin(case)
    why = [violation.sentence for violation in report.violations[:1]]
    assert str(report.verdict) == "proved", f"{report.verdict} {why}: {dataclasses.replace(case, fault='').command}"
    return clean


def test_no_clean_run_is_flagged(fuzz_seed):
    cases = draw(clean_cases(), AMOUNT.clean, fuzz_seed)
    runs = [check_clean(case) for case in cases]
    assert sum(bool(run.split_slices) for run in runs) >= len(runs) // 4
    assert any(not run.split_slices for run in runs)
    assert {case.ranks for case in cases} == {2, 3, 4}
    assert {case.shared_experts for case in cases} == set(SHARED_EXPERTS)
    assert len({case.dcp_backend for case in cases}) > 1
    assert any(case.capture_sizes for case in cases)
    assert sum(bool(run.replayed) for run in runs) >= len(runs) // 20
    assert any(run.captures_ubatches for run in runs)


@pytest.mark.parametrize("exchange", DCP_COMM_BACKENDS)
def test_no_clean_run_of_a_dcp_group_is_flagged(exchange, fuzz_seed):
    cases = draw(clean_cases(exchanges=(exchange,)), AMOUNT.clean // 4, fuzz_seed)
    for case in cases:
        check_clean(case)
    assert {case.dcp_backend for case in cases} == {exchange} and len(cases) >= AT_LEAST
    assert any(case.graphs for case in cases) and any(case.interleave > 1 for case in cases)


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(fault, id=fault.name) for fault in ordering),
        *(pytest.param(fault, id=fault.name, marks=needs_torch) for fault in numeric_only),
    ],
)
def test_it_is_found(fault, fuzz_seed):
    """In ordering mode; with numbers where only they have it."""
    count = AMOUNT.planted_numeric if fault.numeric else AMOUNT.planted
    cases = draw(planted_cases([fault]), count, fuzz_seed)
    assert len(cases) >= AT_LEAST, f"seed {fuzz_seed} gives {len(cases)} cases of {fault.name}"
    for case in cases:
        check_clean(case)
        check_found(case, fault)


@needs_torch
def test_they_are_found_with_numbers_too_and_clean_runs_give_the_right_tokens(fuzz_seed):
    found = 0
    for turn in range(AMOUNT.numeric):
        fault = ordering[turn % len(ordering)]
        drawn = draw(planted_cases([fault], small=True), 4, fuzz_seed + turn)
        numeric = (dataclasses.replace(case, mode="numeric") for case in reversed(drawn))
        # Which rows go where, and so what needs an order, depends on the numbers.
        case = next(filter(bites, numeric), None)
        assert case is not None, f"seed {fuzz_seed + turn} gives no case of {fault.name} that bites with numbers"
        check_found(case, fault)
        found += 1
        check_clean(case)
        assert wrong_tokens(case, clean_run(case)) == [], dataclasses.replace(case, fault="").command
    assert found >= 20


def test_every_detector_has_a_fault_or_is_tested_elsewhere():
    ids = {fault.id for fault in CATALOGUE}
    assert {detector.ID for detector in DETECTORS} == ids | ELSEWHERE
    assert not ids & ELSEWHERE


@pytest.mark.parametrize("id", sorted({fault.id for fault in ordering}))
def test_without_its_detector_the_property_fails(id, fuzz_seed):
    fault = next(fault for fault in ordering if fault.id == id)
    trace = run(draw(planted_cases([fault]), 2, fuzz_seed)[-1]).trace
    others = [detector for detector in DETECTORS if detector.ID != id]
    assert judge(trace).verdict.id == id
    assert judge(trace, detectors=others).verdict.id != id
