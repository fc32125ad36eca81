"""A campaign: cases are drawn, run and judged until the budget is spent or one surprises. Needs hypothesis.

Batches take turns: clean cases, then each fault. A surprise is shrunk before it is reported.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.case import Case
from fuzz.ledger import is_known
from fuzz.strategies import clean_cases, planted_cases
from fuzz.targets import run_case, surprise
from sim.faults import Fault

BATCH = 5
SHRINK_S = 30.0
CLEAN = "clean"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a campaign ends: after so many cases, or after so many seconds; None: not limited by it."""

    cases: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A case that gave another verdict than it should, and what it gave."""

    case: Case
    what: str


@dataclass(kw_only=True)
class Tally:
    """What a campaign has done so far; whole at any moment, so that an interrupt can report it.

    Attributes:
        runs: cases run, by "clean" or the fault's name.
        finding: the smallest case of the surprise that ended the campaign.
        known: surprises that the ledger has, by token.
    """

    runs: Counter[str] = field(default_factory=Counter)
    finding: Finding | None = None
    known: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.runs.values())


class _Surprised(Exception):
    """Tells Hypothesis that a case failed."""


class _Spent(BaseException):
    """Leaves Hypothesis from inside a test: an Exception would count as a failure to shrink."""


def campaign(
    tally: Tally,
    budget: Budget,
    *,
    faults: Sequence[Fault],
    first_seed: int = 0,
    mode: str = "ordering",
    clean: bool = True,
    faults_first: bool = False,
    told: Callable[[str], None] = lambda text: None,
) -> None:
    """Draw and run cases; what happens goes into `tally`.

    Args:
        faults: to plant, in turn.
        first_seed: of the first batch; the n-th has `first_seed` + n.
        clean: also run cases without a fault.
        faults_first: clean cases come behind the faults, for faults that were asked for by name.
        told: hears after each batch how far it came.
    """
    turns: list[tuple[str, st.SearchStrategy[Case]]] = []
    if clean:
        turns.append((CLEAN, clean_cases(small=mode == "numeric").map(lambda case: replace(case, mode=mode))))
    turns += [(fault.name, planted_cases([fault], mode)) for fault in faults]
    if faults_first and clean:
        turns = [*turns[1:], turns[0]]
    ends = time.monotonic() + budget.seconds if budget.seconds is not None else None

    def spent() -> bool:
        return (budget.cases is not None and tally.total >= budget.cases) or (
            ends is not None and time.monotonic() >= ends
        )

    for number, (name, cases) in enumerate(itertools.cycle(turns)):
        if spent() or tally.finding is not None:
            return
        _batch(cases, first_seed + number, _Test(tally, name, spent))
        told(f"{tally.total} cases, last {name}")


@dataclass
class _Test:
    """The body of one batch's test: run, judge, keep the smallest surprise."""

    tally: Tally
    name: str
    spent: Callable[[], bool]
    found_at: float | None = None

    def __call__(self, case: Case) -> None:
        if self.found_at is None and self.spent():
            raise _Spent
        if self.found_at is not None and time.monotonic() > self.found_at + SHRINK_S:
            raise _Spent
        what = self._surprise(case)
        self.tally.runs[self.name] += 1
        if not what:
            return
        best = self.tally.finding
        if best is None or len(case.spelling) <= len(best.case.spelling):
            self.tally.finding = Finding(case=case, what=what)
        self.found_at = self.found_at or time.monotonic()
        raise _Surprised(what)

    def _surprise(self, case: Case) -> str:
        try:
            report = run_case(case)
        except Exception as error:  # whatever a drawn case raises is a finding, a refusal too: it was drawn to be valid
            return f"{type(error).__name__}: {error}"
        what = surprise(case, report)
        if what and is_known(case, report):
            self.tally.known[case.token] = what
            return ""
        return what


def _batch(cases: st.SearchStrategy[Case], batch_seed: int, test: _Test) -> None:
    @seed(batch_seed)
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def batch(case: Case) -> None:
        test(case)

    try:
        batch()
    except (_Surprised, _Spent):
        return
