"""Known failures stay failures, fixed ones stay fixed."""

import importlib.util

import pytest

from dbo.check.verdict import violated
from dbo.errors import UsageError
from fuzz.case import parse_token
from fuzz.ledger import KNOWN, KnownFailure, LedgerError, check, fixed, is_known
from fuzz.targets import run_case, surprise
from tests.fuzz.test_case import TOKEN

HAS_TORCH = importlib.util.find_spec("torch") is not None


def test_known_failures_still_fail_as_they_say():
    for known in KNOWN:
        check(known)
    assert all(known.why and known.since for known in KNOWN)


@pytest.mark.parametrize("case", list(fixed()), ids=lambda case: case.token)
def test_a_fixed_finding_stays_fixed(case):
    if case.mode == "numeric" and not HAS_TORCH:
        pytest.skip(reason="torch is not installed, and this finding needs numbers")
    assert surprise(case, run_case(case)) == ""


def entry(verdict):
    return KnownFailure(token=TOKEN, verdict=verdict, why="planted", since="2026-01-01")


def flagged(case):
    """A judge that finds something in a good run."""
    import dataclasses

    return dataclasses.replace(run_case(case), verdict=violated("deadlock"))


def test_an_unexpected_pass_fails():
    with pytest.raises(LedgerError, match=r"a known failure fails: verdict=proved.*fixed\.tokens"):
        check(entry("violated(deadlock)"))


def test_a_failure_of_another_kind_fails():
    check(entry("violated(deadlock)"), flagged)
    with pytest.raises(LedgerError, match="as the ledger says"):
        check(entry("violated(stream-race)"), flagged)


def test_only_the_very_failure_counts_as_known():
    case = parse_token(TOKEN)
    report = flagged(case)
    assert is_known(case, report, (entry("violated(deadlock)"),))
    assert not is_known(case, report, (entry("violated(stream-race)"),))
    assert not is_known(case, report, ())


def test_a_bad_line_of_the_corpus_is_named(tmp_path):
    path = tmp_path / "fixed.tokens"
    path.write_text(f"# a comment\n\n{TOKEN}  # another\nnonsense\n", encoding="utf-8")
    with pytest.raises(UsageError, match="fixed.tokens:4"):
        list(fixed(path))
    path.write_text(f"{TOKEN}\n", encoding="utf-8")
    assert [case.token for case in fixed(path)] == [TOKEN]
