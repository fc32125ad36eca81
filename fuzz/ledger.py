"""Failures that are known and not fixed yet. Each must still fail, in the way it says; one that passes is taken out.

A fixed failure moves to `corpus/fixed.tokens`, where it must pass for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dbo.check import Report
from dbo.errors import DBOError, UsageError
from fuzz.case import Case, parse_token
from fuzz.targets import run_case, surprise

FIXED = Path(__file__).parent / "corpus" / "fixed.tokens"


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """A case that gives another verdict than it should.

    Attributes:
        token: the case, by its token or spelt out.
        verdict: what it gives: the verdict's text, for example "violated(deadlock)".
        why: what is wrong, in a sentence.
        since: when it was entered, year-month-day.
    """

    token: str
    verdict: str
    why: str
    since: str


KNOWN: tuple[KnownFailure, ...] = ()


class LedgerError(DBOError):
    """An entry of the ledger that is no longer true."""


def check(entry: KnownFailure, run: Callable[[Case], Report] = run_case) -> None:
    """Run a known failure again.

    Raises:
        LedgerError: it passes now, or it fails in another way.
    """
    case = parse_token(entry.token)
    report = run(case)
    if not surprise(case, report):
        rule = "a known failure fails"
        fix = "take it out of fuzz/ledger.py and put its token into fuzz/corpus/fixed.tokens"
        raise LedgerError.of(rule, fix=fix, verdict=report.verdict, case=case.token)
    if str(report.verdict) != entry.verdict:
        rule, fix = "a known failure fails as the ledger says", "look at it again and correct the entry"
        raise LedgerError.of(rule, fix=fix, verdict=report.verdict, known=entry.verdict, case=case.token)


def is_known(case: Case, report: Report, known: tuple[KnownFailure, ...] | None = None) -> bool:
    """Whether this very surprise is in the ledger."""
    entries = KNOWN if known is None else known
    return any(parse_token(entry.token) == case and entry.verdict == str(report.verdict) for entry in entries)


def fixed(path: Path = FIXED) -> Iterator[Case]:
    """The cases of the corpus: findings that were fixed. A line is a token or a spelling; `#` starts a comment.

    Raises:
        UsageError: a line that is no token, with its number.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        token = line.partition("#")[0].strip()
        if not token:
            continue
        try:
            yield parse_token(token)
        except UsageError as error:
            raise UsageError(f"{path.name}:{number}: {error}") from error
