"""A fault that is asked for by name is planted, however small the budget."""

from __future__ import annotations

from fuzz.command import many_cases


def test_a_named_fault_runs_within_the_smallest_budget():
    result = many_cases(cases=1, seconds=None, seed=0, mode="ordering", faults=["raise"], told=lambda text: None)
    assert result.data["by_fault"] == {"raise": 1}
