"""The command line `dbo`: one file a command, listed in `dbo.cli.dispatch.COMMANDS`; the ways in are `main` and `script`.

__main__  the command line where the `dbo` script is not on the path
answer    what a command hands back to the frame: the same answer as text and as one JSON object
bench     time what is promised, and say which targets are reached
check     run the main job: a model folder and prompts on simulated ranks
conform   run the conformance suite: does a world keep the contract? The same cases for every world
dispatch  the frame of every command: parse, run, print once, and turn whatever happened into an exit code
doctor    say what this machine has and lacks, backend by backend, and what to install
fuzz      draw whole runs, clean and with a fault, and judge each
parser    argparse whose refusals are `UsageError`s, so that the frame alone decides how they are shown
progress  what a long command reached: shown while it runs
prompts   `--prompts FILE`: one prompt a line, or JSON lines with token ids
render    A `CheckResult` as text and as one JSON object: the same facts, the same order
rows      rows of spans drawn under each other in text
show      show a trace: which ubatch computes while which communicates
terminal  colour, where the output is a terminal and nobody asked for none
"""

from dbo.cli.dispatch import main
from dbo.cli.script import script

__all__ = ["main", "script"]
