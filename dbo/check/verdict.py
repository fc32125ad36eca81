"""The one place that makes verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dbo.check.causes import most_fitting
from dbo.check.violation import Violation
from dbo.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How far the answer "nothing is wrong" reaches, or what is wrong.

    Attributes:
        name: "proved" | "exhausted" | "bounded" | "sampled" | "inconclusive" | "violated".
        text: the verdict with its figures, as it is printed.
        good: False for inconclusive and violated.
        id: the fault class of a violated verdict, else "".
    """

    name: str
    text: str
    good: bool
    id: str = ""

    def __str__(self) -> str:
        return self.text


def proved(*, synchronisation_only: bool = False) -> Verdict:
    """One complete run, no race, no choice: every schedule of this input gives this outcome."""
    return Verdict(name="proved", text="proved (synchronisation only)" if synchronisation_only else "proved", good=True)


def exhausted(runs: int) -> Verdict:
    """Every class of schedules was run."""
    return Verdict(name="exhausted", text=f"exhausted({_positive('runs', runs)})", good=True)


def bounded(deviations: int) -> Verdict:
    """Every schedule with at most this many deviations from the canonical one was run."""
    return Verdict(name="bounded", text=f"bounded({deviations})", good=True)


def sampled(runs: int, about: float) -> Verdict:
    """Some schedules of about so many were run."""
    return Verdict(name="sampled", text=f"sampled({_positive('runs', runs)} of about {_short(about)})", good=True)


def fuzzed(cases: int) -> Verdict:
    """So many drawn programs gave what they should, each by its own verdict."""
    return Verdict(name="sampled", text=f"sampled({_positive('cases', cases)} cases)", good=True)


def inconclusive(why: str) -> Verdict:
    """No violation, and no reason to believe in its absence either."""
    return Verdict(name="inconclusive", text=f"inconclusive({why})", good=False)


def violated(id: str) -> Verdict:
    """Something is wrong; `id` names its most fitting class."""
    return Verdict(name="violated", text=f"violated({id})", good=False, id=id)


def of_run(
    *, violations: Sequence[Violation], checked: int, complete: bool, choices: int, why_cut: str = ""
) -> Verdict:
    """The verdict on one run.

    Args:
        violations: of all detectors.
        checked: things that all detectors together looked at.
        complete: the run came to its end.
        choices: observed choice points, see `dbo.check.choices`.
        why_cut: what stopped a run that is not complete.
    """
    if violations:
        return violated(most_fitting(violations).id)
    if checked == 0:
        return inconclusive("nothing was checked")
    if not complete:
        return inconclusive(f"the run was cut short{': ' + why_cut if why_cut else ''}")
    if choices:
        return sampled(1, 2.0 ** min(choices, 1000))
    return proved()


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise UsageError.of("a verdict rests on at least one run", fix="run something first", **{name: value})
    return value


def _short(about: float) -> str:
    return f"{about:.0f}" if about < 1e6 else f"{about:.0e}".replace("e+0", "e").replace("e+", "e")
