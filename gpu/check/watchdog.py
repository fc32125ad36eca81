"""Part `watchdog`: runs that a planted fault hangs or kills are ended in time, and the report names where. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbo.contract.patience import Patience
from dbo.engine.components import Components
from dbo.job.rank import RankMain
from gpu.check import planted_faults
from gpu.check.setup import Found, Setup
from gpu.watch.flight_recorder import MARKS, is_alive

WITHIN_S = 10.0
"""A hang is reported in this time after it began."""

STALL_S, SLOW_S = 2.0, 60.0
"""Lines that wait for each other are told soon; for one that computes or sets up there may be kernels to compile."""

STRUCK_RANK = 1


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A planted fault, and what its report has to name besides the rank: reason, ubatch (-1: any), point ("": any)."""

    planted: Callable[[], Components]
    reason: str
    ubatch: int = -1
    point: str = ""


HANGS = (
    Hang(planted=planted_faults.skip_a_dispatch, reason="differing", ubatch=1, point="D.send"),
    Hang(planted=planted_faults.drop_a_yield, reason="unequal-yields", ubatch=0),
    Hang(planted=planted_faults.keep_the_baton, reason="stalled"),
    Hang(planted=planted_faults.die_in_an_exchange, reason="died", ubatch=0, point="D.send"),
    Hang(planted=planted_faults.die_computing, reason="died", ubatch=1, point="MLP"),
)


def check_watchdog(setup: Setup, backend: str) -> Found:
    """Every hang in turn, each in a run of its own."""
    found = [_hang(setup, backend, hang) for hang in HANGS]
    slowest = max((after_s for _, after_s, _ in found if after_s is not None), default=0.0)
    first = f"{len(found)} faults, reported {slowest:.1f} s after they happened at the most"
    return all(good for good, _, _ in found), "\n".join([first, *(words for _, _, words in found)])


def _hang(setup: Setup, backend: str, hang: Hang) -> tuple[bool, float | None, str]:
    """(passed, seconds from the fault to the report, what there is to say)."""
    name = hang.planted.__name__
    start = time.monotonic()
    job = setup.job(backend, program_of=planted_faults.OnRank(STRUCK_RANK, hang.planted))
    launched = setup.run(RankMain(job), patience=Patience(stall_s=STALL_S, slow_s=SLOW_S))
    took_s = time.monotonic() - start
    report = launched.report
    if report is None:
        errors = "; ".join(str(error).partition("\n")[0] for error in launched.errors)
        return False, None, f"{name}: no report after {took_s:.1f} s: {errors}"
    problems = [*_misnamed(report, hang), *_left_over(launched)]
    planted_s = launched.marks[STRUCK_RANK].get("planted")
    after_s = None if planted_s is None else launched.reported_s - planted_s
    if after_s is None or after_s > WITHIN_S:
        problems.append(f"not reported within {WITHIN_S:.0f} s of the fault")
    times = [
        f"{words} {launched.marks[STRUCK_RANK][words]:.1f}" for words in MARKS if words in launched.marks[STRUCK_RANK]
    ]
    after = "never struck" if after_s is None else f"{after_s:.2f} s after the fault"
    late = "" if launched.reported_s <= WITHIN_S else f" (over {WITHIN_S:.0f} s)"
    lines = [
        f"{name}: reported {after}, {launched.reported_s:.1f} s after the start{late}",
        f"  {', '.join(times)}, moved last {report['moved_s'] - report['reported_s'] + launched.reported_s:.1f}, "
        f"reported {launched.reported_s:.1f}, over {took_s:.1f} s",
        f"  {report['reason']}: {report['text'].splitlines()[0]}",
        *(f"  WRONG: {problem}" for problem in problems),
    ]
    return not problems, after_s, "\n".join(lines)


def _misnamed(report: dict[str, Any], hang: Hang) -> list[str]:
    expected = {"rank": STRUCK_RANK, "reason": hang.reason}
    expected |= {"ubatch": hang.ubatch} if hang.ubatch >= 0 else {}
    expected |= {"point": hang.point} if hang.point else {}
    problems = [f"{name} is {report[name]}, not {value}" for name, value in expected.items() if report[name] != value]
    problems += [f"no {name} is named" for name, nothing in (("ubatch", -1), ("point", "")) if report[name] == nothing]
    return problems


def _left_over(launched: Any) -> list[str]:
    alive = [pid for pid in launched.processes if is_alive(pid)]
    problems = [f"processes {alive} are still running"] if alive else []
    if 0 in launched.exit_codes:
        problems.append(f"a rank ended as if nothing had been: exit codes {launched.exit_codes}")
    return problems
