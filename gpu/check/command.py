"""`python -m gpu.check`: everything that can be checked on this machine's devices, and a short table (needs torch).

    python -m gpu.check --share-device       two ranks on one device: DeepEP V1, both modes, eager and graphs
    python -m gpu.check                      a device a rank
    python -m gpu.check --device cpu         CPU tensors over gloo
    torchrun --standalone --nproc-per-node=2 -m gpu.check

Exit code 0 when every line passed, 1 when one did not, 3 when there are too few devices.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dbo.config import facts
from dbo.errors import NotAvailable
from gpu import probe
from gpu.bench import handoff
from gpu.check.leftovers import check_leftovers
from gpu.check.runs import check_conformance, check_job, check_replays, check_soak
from gpu.check.setup import Found, Setup
from gpu.check.trace import check_trace
from gpu.check.watchdog import check_watchdog
from gpu.world import launch, start_server

PARTS = ("conformance", "job", "graph", "trace", "leftovers", "watchdog", "handoff", "soak")


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One line of the table."""

    name: str
    passed: bool
    what: str
    took_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for and return the exit code."""
    options = _parser().parse_args(argv)
    speaks = os.environ.get("RANK", "0") == "0"
    if "RANK" not in os.environ:
        start_server()  # it loads what ranks need while this process asks for devices
    try:
        machine = probe.machine(device=options.device, ranks=options.ranks, share_device=options.share_device)
    except NotAvailable as error:
        sys.stderr.write(f"{error}\n")
        return 3
    backends = tuple(options.backend or machine.backends)
    if not backends:
        sys.stderr.write("no all-to-all backend can run here: `dbo doctor` says what to install\n")
        return 3
    rows = []
    for row in _rows(options, machine, backends):
        rows.append(row)
        if speaks:
            _say(row)
    failed = [row for row in rows if not row.passed]
    if speaks:
        shared = "; ranks share a device: nothing here says anything about speed" if options.share_device else ""
        total = sum(row.took_s for row in rows)
        sys.stdout.write(f"{len(rows)} checks, {len(failed)} failed, {total:.0f} s{shared}\n")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu.check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--share-device", action="store_true", help="all ranks on the first device")
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument(
        "--backend",
        action="append",
        choices=sorted(facts.BACKENDS),
        help="all-to-all backends (default: those that run here)",
    )
    parser.add_argument("--vehicle", choices=("auto", "thread", "greenlet"), default="thread", help="what ubatches are")
    parser.add_argument("--model", type=Path, help="a DeepSeek-V2 folder (default: a generated one)")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS", help="steps of the long run (default: none)")
    parser.add_argument("--only", action="append", choices=PARTS, help="parts of the check (default: all)")
    return parser


def _rows(options: argparse.Namespace, machine: probe.Machine, backends: tuple[str, ...]) -> Iterator[CheckRow]:
    setup = Setup(
        run=partial(launch, ranks=options.ranks, timeout_s=240.0, vehicle=options.vehicle, **machine.options),
        ranks=options.ranks,
        device="cpu" if machine.options["device"] == "cpu" else "cuda",
        asked_device=options.device,
        share_device=options.share_device,
        backends=backends,
        model=options.model,
        in_place="RANK" in os.environ,
        soak_steps=options.soak,
    )
    wanted = options.only or PARTS
    if "conformance" in wanted:
        yield _timed("conformance", partial(check_conformance, setup))
    for backend in backends:
        if "job" in wanted:
            yield _timed(f"job {backend}", partial(check_job, setup, backend, "NONE"))
        if "graph" in wanted and setup.on_device:
            yield _timed(f"job {backend}, graph", partial(check_job, setup, backend, "FULL"))
            yield _timed(f"graph = eager {backend}", partial(check_replays, setup, backend))
        if "trace" in wanted:
            yield _timed(f"trace {backend}", partial(check_trace, setup, backend))
        if "leftovers" in wanted:
            yield _timed(f"leftovers {backend}", partial(check_leftovers, setup, backend))
        if "watchdog" in wanted and not setup.in_place:
            yield _timed(f"watchdog {backend}", partial(check_watchdog, setup, backend))
        if "soak" in wanted and options.soak:
            yield _timed(f"soak {backend}", partial(check_soak, setup, backend))
    if "handoff" in wanted:
        yield _timed("hand-over", _handoff)


def _timed(name: str, check: Callable[[], Found]) -> CheckRow:
    start = time.monotonic()
    try:
        passed, what = check()
    except Exception as error:
        passed, what = False, "".join(traceback.format_exception(error))
    return CheckRow(name=name, passed=passed, what=what, took_s=time.monotonic() - start)


def _say(row: CheckRow) -> None:
    first, *rest = row.what.splitlines() or [""]
    sys.stdout.write(f"{'ok  ' if row.passed else 'FAIL'} {row.took_s:6.1f} s  {row.name:<36} {first}\n")
    for line in rest[-40:]:
        sys.stdout.write(f"{'':<16}{line}\n")
    sys.stdout.flush()


def _handoff() -> Found:
    costs = handoff.measure()
    base, best = costs[0], min(costs[1:], key=lambda cost: cost.median_us)
    words = "; ".join(f"{cost.name} {cost.median_us:.0f} us" for cost in costs)
    return best.median_us <= 0.5 * base.median_us, f"{words} a step of 108 hand-overs"


def leave_torchrun(code: int) -> None:
    """End a process that torchrun started. Gloo's threads may outlive the interpreter and abort it, so do not wait for that."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
