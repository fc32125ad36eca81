"""What `dbo fuzz` runs: one case by its token, or a campaign; an answer as text and as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dbo.check import Verdict
from dbo.check.verdict import fuzzed, inconclusive, violated
from dbo.errors import UsageError
from fuzz.case import Case, parse_token
from fuzz.targets import fault_of, run_case, surprise
from sim.faults import CATALOGUE, Fault


@dataclass(frozen=True, kw_only=True)
class FuzzResult:
    """Of a campaign or of one case.

    Attributes:
        verdict: of everything that was run.
        good: nothing surprised, and something was run.
        interrupted: it was cut short by the user.
        lines: the answer in text, without the verdict.
        data: the answer as an object.
    """

    verdict: Verdict
    good: bool
    interrupted: bool = False
    lines: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def one_case(token: str) -> FuzzResult:
    """Run one case and compare what it gives with what it should give.

    Raises:
        UsageError: the token does not parse, or the case names something that cannot work.
    """
    case = parse_token(token)
    fault = fault_of(case)
    report = run_case(case)
    what = surprise(case, report)
    lines = [f"case {case.token}", f"    {case.spelling}", f"    {_words(case)}"]
    if fault is not None:
        lines.append(f"    planted: {case.fault} ({fault.sentence}); it needs {fault.needs}")
    for violation in report.violations:
        lines += [f"violation {violation.id} (rank {violation.rank}, ubatch {violation.ubatch}, step {violation.step})"]
        lines += [f"    {line}" for line in violation.sentence.splitlines()]
    lines.append(f"surprise: {what}" if what else "as it should be")
    data = {
        "case": case.token,
        "spelling": case.spelling,
        "command": case.command,
        "surprise": what,
        "exit": int(bool(what)),
        **report.to_dict(),
    }
    return FuzzResult(verdict=report.verdict, good=not what, lines=lines, data=data)


def _words(case: Case) -> str:
    """What kind of run it is."""
    group = f", DCP groups of {case.dcp_size} by {case.dcp_backend}" if case.dcp_backend else ""
    graphs = ", graphs" if case.graphs else ""
    return f"{case.ranks} ranks{group}, {case.backend}, shared experts: {case.shared_experts}{graphs}, {case.mode} mode"


def chosen_faults(names: Sequence[str]) -> list[Fault]:
    """Faults by name; ["all"] for the whole catalogue, ["none"] for no fault.

    Raises:
        UsageError: a name that the catalogue lacks.
    """
    if list(names) == ["all"]:
        return list(CATALOGUE)
    if list(names) == ["none"]:
        return []
    by_name = {fault.name: fault for fault in CATALOGUE}
    for name in names:
        if name not in by_name:
            known = ", ".join(["all", "none", *by_name])
            raise UsageError.of("--faults names faults of the catalogue", fix=f"choose from {known}", fault=name)
    return [by_name[name] for name in names]


def many_cases(
    *,
    cases: int | None,
    seconds: float | None,
    seed: int,
    mode: str,
    faults: Sequence[str],
    told: Callable[[str], None],
) -> FuzzResult:
    """Run a campaign; Ctrl-C ends it and gives what it has so far.

    Raises:
        UsageError: no such fault.
        ModuleNotFoundError: hypothesis is missing, or torch in numeric mode.
    """
    planted = chosen_faults(faults)
    from fuzz.campaign import Budget, Tally, campaign

    if mode == "numeric":
        import torch  # noqa: F401 (missing: said once, here, and not as a finding of every case)

    tally, interrupted = Tally(), False
    try:
        budget = Budget(cases=cases, seconds=seconds)
        named = list(faults) not in (["all"], ["none"])
        campaign(tally, budget, faults=planted, first_seed=seed, mode=mode, faults_first=named, told=told)
    except KeyboardInterrupt:
        interrupted = True
    finding = tally.finding
    if finding is not None:
        fault = fault_of(finding.case)
        verdict = violated(fault.id) if fault is not None else inconclusive("a clean case is flagged")
    else:
        verdict = fuzzed(tally.total) if tally.total else inconclusive("nothing was run")
    lines = [f"seed {seed}, {mode} mode, {tally.total} cases:"]
    lines += [f"    {count:5d} {name}" for name, count in sorted(tally.runs.items())]
    lines += [f"known: {what} ({token})" for token, what in tally.known.items()]
    if finding is not None:
        lines += [f"surprise: {finding.what}", f"case: {finding.case.spelling}", f"replay: {finding.case.command}"]
    if interrupted:
        lines.append("interrupted")
    data = {
        "verdict": verdict.name,
        "verdict_text": verdict.text,
        "seed": seed,
        "mode": mode,
        "cases": tally.total,
        "by_fault": dict(sorted(tally.runs.items())),
        "known": dict(tally.known),
        "surprise": finding.what if finding else "",
        "case": finding.case.token if finding else "",
        "spelling": finding.case.spelling if finding else "",
        "replay": finding.case.command if finding else "",
        "interrupted": interrupted,
    }
    return FuzzResult(verdict=verdict, good=verdict.good, interrupted=interrupted, lines=lines, data=data)
