"""Parts `conformance`, `job`, `graph`, `soak`: the contract, and whole runs compared with others (needs torch)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dbo.conformance.suite import RunCases, run_suite
from dbo.contract.patience import Patience
from dbo.export.chrome import read_trace
from dbo.job.compare import compare
from dbo.job.rank import RankMain
from dbo.job.run import run as run_main_job
from dbo.job.types import CheckRequest
from gpu.check import soak
from gpu.check.dcp_model import model_folder
from gpu.check.linearity import linearity
from gpu.check.setup import Found, Quiet, Setup, temporary

LONGEST_STEP_S = 0.2
"""A step of a long run that takes more than this on average is stopped: something else is wrong."""


def check_conformance(setup: Setup) -> Found:
    """The suite that every world has to pass."""
    if setup.in_place:
        launched = setup.run(RunCases(True, setup.backends))
        problems = [f"{name}: {p}" for value in launched.values for name, p in value or [("launch", "lost")] if p]
        return not problems, "\n".join(problems) or f"{len(launched.values[0])} cases"
    results = run_suite(partial(setup.run, patience=Patience(stall_s=5.0)), ranks=setup.ranks, backends=setup.backends)
    problems = [f"{r.name}: {r.problem}" for r in results if not r.passed]
    return not problems, "\n".join([f"{len(results)} cases, {len(problems)} failed", *problems])


def check_job(setup: Setup, backend: str, graphs: str) -> Found:
    """The main job, judged as `dbo check` does, and its trace's order. `graphs`: "NONE" or "FULL"."""
    flags = setup.flags(backend) | ({"cudagraph_mode": "FULL"} if graphs == "FULL" else {})
    request = CheckRequest(
        flags=flags,
        model=setup.model,
        steps=8,
        device=setup.asked_device,
        share_device=setup.share_device,
        trace=temporary(f"{backend}-{graphs}"),
    )
    result = run_main_job(request, Quiet())
    reference, words = result.reference, [result.verdict.text]
    words.append(f"tokens {'equal' if reference.tokens_equal else 'DIFFER'}, {reference.ties} ties")
    words.append(f"logits {reference.max_rel_err:.1e}" if reference.max_rel_err is not None else "no logits")
    words.append(f"serial bits {'equal' if reference.serial_equal else 'DIFFER'}")
    words.append(f"order {'as' if reference.order_as_simulated else 'NOT as'} simulated")
    lines = [", ".join(words)]
    lines += [f"{v.id}: {v.sentence}" for v in result.violations[:5]]
    assert result.trace is not None
    linear = linearity(read_trace(result.trace))
    lines += map(str, linear.problems)
    lines[0] += f", {linear.checked} edges"
    good = result.verdict.good and bool(reference.serial_equal) and linear.checked > 0 and not linear.problems
    return good, "\n".join(lines)


def check_replays(setup: Setup, backend: str) -> Found:
    """The same requests eager and from graphs: the replayed steps, each of another batch, say the same."""
    eager = setup.job(backend)
    graphs = replace(eager, config=eager.config.replace(cudagraph_mode="FULL"))
    one, other = (setup.run(RankMain(job), trace=False) for job in (eager, graphs))
    if any(one.errors) or any(other.errors):
        return False, f"{one.errors} {other.errors}"
    steps = [o for o in other.values[0] if o.decision is not None and o.decision.cudagraph_mode == "FULL"]
    split = sum(o.decision.split for o in steps)
    said = compare(_by_request(one.values), _by_request(other.values), dtype=eager.config.dtype)
    what = f"{len(steps)} replays ({split} split), {said.compared} tokens, {said.ties} ties"
    good = said.compared > 0 and said.tokens_equal and said.logits_close and split >= 3
    return good, what if said.max_rel_err is None else f"{what}, logits {said.max_rel_err:.1e}"


def _by_request(values: Sequence[Any]) -> dict[str, tuple[list[int], list[Any]]]:
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for outcomes in values:
        for outcome in outcomes or []:
            for id, token in outcome.tokens.items():
                tokens, rows = found.setdefault(id, ([], []))
                tokens.append(token)
                rows.append(outcome.logits[id])
    return found


def check_soak(setup: Setup, backend: str) -> Found:
    """The same requests with and without DBO, eager and, on a device, with graphs.

    Without a model of the caller's, backends that carry 16 bits get one whose tokens go to every expert: where experts are
    chosen, rounding sends a token in some hundreds elsewhere, which is no tie and no fault either.
    """
    if setup.model is not None or setup.flags(backend)["dtype"] == "float32":
        return _soak(setup, backend)
    with tempfile.TemporaryDirectory(prefix="dbo-soak-") as scratch:
        return _soak(replace(setup, model=model_folder(Path(scratch) / "model")), backend)


def _soak(setup: Setup, backend: str) -> Found:
    steps = setup.soak_steps
    flags = {"cudagraph_mode": "FULL"} if setup.on_device else {}
    job = setup.job(backend, flags=flags, requests=max(20, steps), max_steps=steps, keep_logits=False)
    plain = replace(job, config=job.config.without_dbo(), keep_logits=True)
    within_s = 120.0 + LONGEST_STEP_S * steps
    one, other = (setup.run(soak.Soak(j), trace=False, timeout_s=within_s) for j in (job, plain))
    if any(one.errors) or any(other.errors):
        return False, f"{one.errors} {other.errors}"
    problems = soak.problems(one.values, other.values)
    pairs = zip(one.values, other.values, strict=True)
    same, ties, others = map(sum, zip(*(soak.differing(a, b, dtype=job.config.dtype) for a, b in pairs), strict=True))
    first, twin = one.values[0], other.values[0]
    kinds = {
        "split": first.split,
        "of them graphs": first.split_graphs,
        "whole": first.steps - first.split,
        "of these graphs": first.graphs - first.split_graphs,
        "without a token": first.idle,
    }
    what = f"{first.steps} steps ({', '.join(f'{count} {name}' for name, count in kinds.items())}), "
    what += f"{same} requests the same, {ties} ties, {others} others"
    lines = [what, *(f"  WRONG: {problem}" for problem in problems)]
    for name, run in (("with DBO", first), ("without", twin)):
        lines.append(
            f"  {name}: {run.set_up_s:.1f} s to the first step, then {1e3 * run.steps_s / run.steps:.1f} ms a step"
        )
    middle, end = first.samples[len(first.samples) // 2], first.samples[-1]
    held = (f"{name} {getattr(middle, name)} and {getattr(end, name)}" for name in soak.LIMITS)
    lines.append(f"  held at steps {middle.step} and {end.step}: {', '.join(held)}; {first.wakes} wakes in replays")
    return not problems and not others and same > ties, "\n".join(lines)
