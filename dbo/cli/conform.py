"""Run the conformance suite: does a world keep the contract? The same cases for every world."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from dbo import registry
from dbo.cli.answer import Answer, Exit
from dbo.cli.parser import Parser, integer
from dbo.cli.progress import Reached
from dbo.conformance.suite import CaseResult, run_suite
from dbo.contract.patience import Patience

HELP = "check a world against the contract"

STALL_S = 5.0
"""How long a rank may be stuck on purpose before the device world's watchdog says so."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--world", choices=sorted(registry.WORLDS), default="sim", help="which world (default sim)")
    parser.add_argument("--ranks", type=integer(2), default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument(
        "--mode", choices=("numeric", "ordering"), default="numeric", help="with numbers or without (default numeric)"
    )
    parser.add_argument(
        "--all2all-backend",
        action="append",
        metavar="NAME",
        help="exchanges to try (default: those built)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="world gpu only")
    parser.add_argument("--share-device", action="store_true", help="world gpu: all ranks on the first device")


def run(args: argparse.Namespace, reached: Reached) -> Answer:
    """Run the suite and list its cases; exit 1 when one fails."""
    reached.stage(f"checking world {args.world}")
    launch, backends = launcher(
        args.world, ranks=args.ranks, mode=args.mode, device=args.device, share_device=args.share_device
    )
    chosen = tuple(args.all2all_backend or backends)
    results = run_suite(launch, ranks=args.ranks, numbers=args.mode == "numeric", backends=chosen)
    failed = [result for result in results if not result.passed]
    return Answer(
        text=table(results, f"world {args.world}, {args.ranks} ranks, {args.mode}, {', '.join(chosen)}"),
        data={"world": args.world, "ranks": args.ranks, "cases": [asdict(r) for r in results], "failed": len(failed)},
        exit=Exit.VIOLATION if failed else Exit.GOOD,
    )


def launcher(
    world: str, *, ranks: int, mode: str, device: str = "auto", share_device: bool = False
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """How to launch a program in `world`, and the backends to try there.

    Raises:
        UsageError, NotAvailable: the world does not take this device, or this machine has too few.
    """
    entry = registry.load(world)
    machine = registry.machine(world, device=device, ranks=ranks, share_device=share_device)
    if machine is None:
        return partial(entry.launch, ranks=ranks, mode=mode), ("nccl", "deepep_low_latency")
    launch = partial(entry.launch, ranks=ranks, patience=Patience(stall_s=STALL_S), mode=mode, **machine.options)
    return launch, tuple(machine.backends)


def table(results: list[CaseResult], title: str) -> str:
    """One line a case, the problem under it."""
    lines = [f"conformance: {title}"]
    for result in results:
        lines.append(f"  {'ok    ' if result.passed else 'FAILED'} {result.name}")
        lines += [f"         {line}" for line in result.problem.splitlines()]
    failed = sum(not result.passed for result in results)
    lines.append(f"{len(results)} cases, {failed} failed")
    return "\n".join(lines)
