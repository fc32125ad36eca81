"""Time what is promised, and say which targets are reached. Figures depend on the machine: compare within one run."""

from __future__ import annotations

import argparse

from dbo import registry
from dbo.bench import dcp, moe
from dbo.bench.table import table, to_json
from dbo.bench.timing import BenchResult, chosen, measure
from dbo.cli.answer import Answer, Exit
from dbo.cli.parser import Parser, integer
from dbo.cli.progress import Reached

HELP = "time a world against its targets"

# Benchmarks of real processes: each says itself what it measured.
PROCESSES = {dcp.NAME: dcp, moe.NAME: moe}


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.add_argument("world", choices=[*sorted(registry.BENCHMARKS), *PROCESSES], help="whose benchmarks")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="those whose name begins so; may be given again"
    )
    parser.add_argument("--repeat", type=integer(1), default=5, metavar="N", help="samples of each (default 5)")
    both = parser.add_argument_group("dcp and moe")
    both.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (default: auto)")
    both.add_argument("--ranks", type=integer(2), default=2, help="ranks of the group (default 2)")
    both.add_argument("--seed", type=integer(0), default=0)
    for module in PROCESSES.values():
        module.add_arguments(parser, integer)


def run(args: argparse.Namespace, reached: Reached) -> Answer:
    """Measure one benchmark after another; Ctrl-C ends it and gives those that are done.

    Missed targets are told, and are no error: the machine decides.
    """
    if args.world in PROCESSES:
        text, data, right = PROCESSES[args.world].run(args, reached.stage)
        return Answer(text=text, data=data, exit=Exit.GOOD if right else Exit.VIOLATION)
    results: list[BenchResult] = []
    benchmarks = chosen(registry.benchmarks(args.world), args.only)
    interrupted = False
    try:
        for benchmark in benchmarks:
            reached.stage(f"timing {benchmark.name}")
            results.append(measure(benchmark, args.repeat))
    except KeyboardInterrupt:
        interrupted = True
    data = {"world": args.world, "repeat": args.repeat, "benchmarks": to_json(results), "interrupted": interrupted}
    if not interrupted:
        return Answer(text=table(results), data=data)
    error = f"interrupted while {reached.stages[-1]}, with {len(results)} of {len(benchmarks)} benchmarks timed"
    data |= {"error": error, "exit": int(Exit.INTERRUPTED)}
    return Answer(text=table(results) if results else "", data=data, exit=Exit.INTERRUPTED)
