"""Time what is promised, and say which targets are reached. Figures depend on the machine: compare within one run."""

from __future__ import annotations

import argparse

from dbo import registry
from dbo.bench import dcp
from dbo.bench.table import table, to_json
from dbo.bench.timing import chosen, measure
from dbo.cli.answer import Answer, Exit
from dbo.cli.parser import Parser, integer
from dbo.cli.progress import Reached

HELP = "time a world against its targets"


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.add_argument("world", choices=[*sorted(registry.BENCHMARKS), dcp.NAME], help="whose benchmarks")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="those whose name begins so; may be given again"
    )
    parser.add_argument("--repeat", type=integer(1), default=5, metavar="N", help="samples of each (default 5)")
    dcp.add_arguments(parser, integer)


def run(args: argparse.Namespace, reached: Reached) -> Answer:
    """Measure one benchmark after another. Missed targets are told, and are no error: the machine decides."""
    if args.world == dcp.NAME:
        text, data, right = dcp.run(args, reached.stage)
        return Answer(text=text, data=data, exit=Exit.GOOD if right else Exit.VIOLATION)
    results = []
    for benchmark in chosen(registry.benchmarks(args.world), args.only):
        reached.stage(f"timing {benchmark.name}")
        results.append(measure(benchmark, args.repeat))
    data = {"world": args.world, "repeat": args.repeat, "benchmarks": to_json(results)}
    return Answer(text=table(results), data=data)
