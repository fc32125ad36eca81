"""Run the main job: a model folder and prompts on simulated ranks, explained step by step and judged."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dbo import config, registry
from dbo.cli import render
from dbo.cli.answer import Answer
from dbo.cli.parser import Parser, integer
from dbo.cli.progress import Reached
from dbo.cli.prompts import read_prompts
from dbo.cli.terminal import colours
from dbo.config.flags import refuse_not_now
from dbo.errors import NotAvailable
from dbo.export.chrome import refuse_unwritable
from dbo.job.defaults import SOURCES, flags_of
from dbo.job.types import CheckRequest

_CONFIG = "config."
_NOT_NOW = "not_now."

HELP = "run the main job and judge it"


def add_arguments(parser: Parser) -> None:
    """Declare the flags: the configuration's (from `dbo.config.FLAGS`) and the job's own."""
    job = parser.add_argument_group("job")
    job.add_argument("--model", type=Path, metavar="FOLDER", help="a DeepSeek-V2 folder (default: a generated one)")
    job.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line, or JSON lines with token ids")
    job.add_argument("--steps", type=integer(1), default=8, metavar="N", help="decode steps (default 8)")
    job.add_argument(
        "--mode",
        choices=("numeric", "ordering"),
        default="numeric",
        help="with numbers, or order only (default numeric)",
    )
    job.add_argument("--inject", metavar="FAULT", help="plant a fault; `list` prints those that there are")
    job.add_argument("--trace", type=Path, metavar="FILE", help="write the trace here (Chrome JSON, opens in Perfetto)")
    job.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="world gpu: cuda, or cpu tensors over gloo (default: cuda, refused with fewer devices than ranks)",
    )
    job.add_argument(
        "--share-device",
        action="store_true",
        help="world gpu: all ranks on the first device, for correctness only; DeepEP allows it, NCCL does not",
    )
    group = parser.add_argument_group("configuration")
    unflagged = config.DBOConfig(**flags_of(CheckRequest()))
    for flag in config.FLAGS:
        told = flag.help(getattr(unflagged, flag.field), SOURCES.get(flag.field))
        group.add_argument(flag.flag, dest=_CONFIG + flag.field, default=argparse.SUPPRESS, help=told, **_kind(flag))
    for refused in config.NOT_NOW:
        # Known only to be refused by name, with what to do instead.
        parser.add_argument(
            refused.flag,
            dest=_NOT_NOW + refused.flag,
            nargs="?",
            const=True,
            default=argparse.SUPPRESS,
            type=_scalar,
            help=argparse.SUPPRESS,
        )


def run(args: argparse.Namespace, reached: Reached) -> Answer:
    """Run the job and render what it found."""
    reached.judges = True
    refuse_not_now(_prefixed(args, _NOT_NOW))
    if args.inject == "list":
        faults = registry.faults(getattr(args, _CONFIG + "world", "sim"))
        return Answer(text=render.fault_list(faults), data={"faults": render.faults_json(faults)})
    request = _request(args)
    try:
        # Both the import and the run: what needs torch loads it as late as it can.
        from dbo.job import run as main_job

        result = main_job.run(request, reached)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        rule = "a run with numbers needs torch"
        fix = "install the extra, pip install 'dual-batch-overlap[torch]', or take --mode ordering"
        raise NotAvailable.of(rule, fix=fix, mode=request.mode) from error
    return Answer(
        text=render.text(result, colour=colours(sys.stdout)), data=render.to_json(result), exit=result.exit_code
    )


def _request(args: argparse.Namespace) -> CheckRequest:
    if args.trace is not None:
        refuse_unwritable(args.trace, "trace")
    return CheckRequest(
        flags=_prefixed(args, _CONFIG),
        model=args.model,
        prompts=read_prompts(args.prompts) if args.prompts is not None else None,
        steps=args.steps,
        mode=args.mode,
        inject=args.inject,
        trace=args.trace,
        device=args.device,
        share_device=args.share_device,
    )


def _prefixed(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """What the user set among the arguments whose names begin with `prefix`."""
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def _kind(flag: config.Flag) -> dict[str, Any]:
    """argparse options of one declared flag; a switch can also be turned off, `--no-enable-dbo`."""
    if flag.type is None:
        return {"action": argparse.BooleanOptionalAction}
    metavar = None if flag.choices else flag.metavar
    return {"type": flag.type, "choices": flag.choices, "metavar": metavar}


def _scalar(text: str) -> Any:
    """A value as a configuration file would hold it, so that `--tensor-parallel-size 1` asks for nothing."""
    return int(text) if text.lstrip("-").isdigit() else text
