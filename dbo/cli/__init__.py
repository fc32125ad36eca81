"""The command line `dbo`: one file a command, listed in `dbo.cli.frame.COMMANDS`; `main` is the only way in."""

from dbo.cli.frame import main

__all__ = ["main"]
