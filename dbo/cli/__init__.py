"""The command line `dbo`: one file a command, listed in `dbo.cli.dispatch.COMMANDS`; the ways in are `main` and `script`."""

from dbo.cli.dispatch import main
from dbo.cli.script import script

__all__ = ["main", "script"]
