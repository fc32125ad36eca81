"""Coordination over many steps, without the simulator."""

import dataclasses
import itertools

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import fuzz.machines
from dbo.batch.coordinate import decide
from fuzz import profiles
from fuzz.machines import CoordinationMachine

AMOUNT = profiles.amount()
SETTINGS = settings(max_examples=AMOUNT.machine, stateful_step_count=AMOUNT.machine_steps)
# That something fails is all that the planted policies are asked for, not the smallest example.
UNSHRUNK = settings(SETTINGS, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)


def test_ranks_decide_alike_over_many_steps():
    steps = []
    original = CoordinationMachine._check

    class Counting(CoordinationMachine):
        def _check(self, decision, *rest):
            steps.append(decision)
            original(self, decision, *rest)

    run_state_machine_as_test(Counting, settings=SETTINGS)
    for what in ("split", "all_idle"):
        assert any(getattr(d, what) for d in steps) and not all(getattr(d, what) for d in steps)
    assert {d.cudagraph_mode for d in steps} == {"NONE", "FULL"}


def splits_on_one_yes(table, common):
    """A policy of other engines: OR the votes."""
    table = table.copy()
    table[3, :] = table[3, :].max() * (table[1, :] > 0)
    return decide(table, common)


def never_looks_at_empty_ubatches(table, common):
    table = table.copy()
    table[1, :] = table[1, :].max()
    table[2, :] = table[1, :].max()
    table[3, :] = table[3, :].max()
    return decide(table, common)


@pytest.mark.parametrize("policy", [splits_on_one_yes, never_looks_at_empty_ubatches])
def test_the_machine_sees_another_policy(policy, monkeypatch):
    monkeypatch.setattr(fuzz.machines, "decide", policy)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CoordinationMachine, settings=UNSHRUNK)


def test_the_machine_sees_a_rank_with_a_mind_of_its_own(monkeypatch):
    calls = itertools.count()

    def moody(table, common):
        decision = decide(table, common)
        return dataclasses.replace(decision, split=False) if next(calls) % 2 else decision

    monkeypatch.setattr(fuzz.machines, "decide", moody)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CoordinationMachine, settings=UNSHRUNK)
