"""Draw whole runs, clean and with a fault, and judge each: every fault is to be found, no clean run to be flagged."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dbo import registry
from dbo.cli.answer import Answer, Exit
from dbo.cli.parser import Parser, integer
from dbo.cli.progress import Reached
from dbo.cli.terminal import colours, paint
from dbo.errors import NotAvailable

HELP = "draw configurations, schedules, requests and faults, and judge the runs"
MODES = ("ordering", "numeric")


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--budget", type=_budget, default=(100, None), metavar="N|SECONDSs", help="so many cases, or 60s (default 100)"
    )
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N", help="of what is drawn (default 0)")
    parser.add_argument("--mode", choices=MODES, default="ordering", help="without or with numbers (default ordering)")
    parser.add_argument("--faults", default="all", metavar="NAMES", help="faults to plant, by comma; all, or none")
    parser.add_argument("--case", metavar="TOKEN", help="run this case only, as a failure printed it")


def run(args: argparse.Namespace, reached: Reached) -> Answer:
    """Run one case or a campaign."""
    fuzzer = registry.fuzzer()
    try:
        if args.case is not None:
            result = fuzzer.one_case(args.case)
        else:
            cases, seconds = args.budget
            result = fuzzer.many_cases(
                cases=cases,
                seconds=seconds,
                seed=args.seed,
                mode=args.mode,
                faults=args.faults.split(","),
                told=reached.stage,
            )
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "hypothesis"):
            raise
        rule = "drawing cases needs hypothesis, and numbers need torch"
        extra = "test" if error.name == "hypothesis" else "torch"
        fix = f"install the extra, pip install 'dual-batch-overlap[{extra}]'"
        raise NotAvailable.of(rule, fix=fix, missing=error.name) from error
    colour = "green" if result.good else "red"
    verdict = paint(result.verdict.text, colour, on=colours(sys.stdout))
    return Answer(text="\n".join([*result.lines, f"verdict: {verdict}"]), data=dict(result.data), exit=_exit(result))


def _exit(result: Any) -> int:
    if result.interrupted and result.data["surprise"] == "":
        return Exit.INTERRUPTED
    return Exit.GOOD if result.good else Exit.VIOLATION


def _budget(text: str) -> tuple[int | None, float | None]:
    """ "200" cases, or "60s"."""
    number = text.removesuffix("s")
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError("a number of cases, as 200, or of seconds, as 60s")
    return (None, float(number)) if text.endswith("s") else (int(number), None)
