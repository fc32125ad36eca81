"""The frame of every command: parse, run, print once, and turn whatever happened into an exit code.

With `--json` stdout gets exactly one object, in every case: refusals, missing parts, interrupts and defects included.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from dbo import __version__
from dbo.cli.answer import Answer, Exit
from dbo.cli.parser import Parser
from dbo.cli.progress import Reached
from dbo.errors import DBOError, NotAvailable, UsageError, refusal

# Name -> module. A module has HELP (a line), add_arguments(parser) and run(args, reached) -> Answer.
COMMANDS = {
    "bench": "dbo.cli.bench",
    "check": "dbo.cli.check",
    "conform": "dbo.cli.conform",
    "doctor": "dbo.cli.doctor",
    "fuzz": "dbo.cli.fuzz",
    "show": "dbo.cli.show",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code, one of `Exit`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    reached = Reached()
    # Nothing but the answer may reach stdout when a program reads it.
    quiet = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    try:
        # argparse prints help itself and raises SystemExit.
        args = _parser().parse_all(arguments)
        with quiet:
            answer = args.run(args, reached)
    except KeyboardInterrupt:
        answer = _interrupted(reached)
    except SystemExit as end:
        if why := _write(""):
            raise SystemExit(_unprinted(Answer(text=""), why)) from None
        raise end
    except Exception as error:
        answer = _failed(error)
    reached.clear()
    return _print(answer, as_json=as_json)


def _parser() -> Parser:
    parser = Parser(prog="dbo", description="Check code that overlaps communication with computation in MoE inference.")
    parser.add_argument("--version", action="version", version=f"dbo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        command.set_defaults(run=module.run, subparser=command)
    return parser


def _failed(error: Exception) -> Answer:
    match error:
        case UsageError():
            code = Exit.USAGE
        case NotAvailable():
            code = Exit.NOT_AVAILABLE
        case DBOError():
            code = Exit.VIOLATION
        case _:
            _tell(traceback.format_exc().rstrip())
            code = Exit.INTERNAL
    message = str(error) if code != Exit.INTERNAL else f"a defect of dbo itself: {type(error).__name__}: {error}"
    return Answer(text="", data={"error": message, "exit": int(code)}, exit=code)


def _interrupted(reached: Reached) -> Answer:
    stage = reached.stages[-1] if reached.stages else "starting"
    data: dict[str, Any] = {"error": f"interrupted while {stage}", "exit": int(Exit.INTERRUPTED)}
    if not reached.judges:
        return Answer(text="", data=data | {"reached": {"stages": reached.stages}}, exit=Exit.INTERRUPTED)
    data |= {
        "error": f"{data['error']}, after {len(reached.steps)} finished steps",
        "verdict": "inconclusive",
        "reached": {"stages": reached.stages, "steps": [report.step for report in reached.steps]},
    }
    lines = [
        f"step {r.step} {r.phase}: {'split' if r.split else 'not split'}, tokens {r.tokens}" for r in reached.steps
    ]
    text = "\n".join([*lines, "verdict: inconclusive(interrupted)"])
    return Answer(text=text, data=data, exit=Exit.INTERRUPTED)


def _print(answer: Answer, *, as_json: bool) -> int:
    error = answer.data.get("error")
    if error is not None:
        _tell(f"dbo: {error}")
    text = json.dumps(answer.data, allow_nan=False) if as_json else answer.text
    if text and (why := _write(f"{text}\n")):
        return _unprinted(answer, why)
    return int(answer.exit)


def _write(text: str) -> str:
    """Write to stdout and flush it; why it could not be, or "" when all is well, or nobody reads any more."""
    if sys.stdout is None:
        return "it is closed"
    try:
        _tolerant(sys.stdout)
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)  # the reader has gone (`dbo check | head`): keep the verdict
    except OSError as error:
        _silence(sys.stdout)
        return error.strerror or str(error)
    return ""


def _unprinted(answer: Answer, why: str) -> int:
    """Tell on stderr what stdout did not take, as far as a line can."""
    rule = "an answer needs a standard output that takes it"
    found = {"verdict": answer.data["verdict_text"]} if "verdict_text" in answer.data else {}
    _tell(f"dbo: {refusal(rule, 'point it at a file with room', stdout=why, **found, exit=int(answer.exit))}")
    return int(Exit.UNPRINTED)


def _tell(line: str) -> None:
    """A line on stderr, if it can be had: the exit code speaks without it too."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Keep the interpreter from flushing once more, at its end, what could not be written."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tolerant(stream: TextIO) -> None:
    """Let a terminal without the needed letters show a question mark instead of ending in a traceback."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
