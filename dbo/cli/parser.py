"""argparse whose refusals are `UsageError`s, so that the frame alone decides how they are shown."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dbo.errors import UsageError, refusal


class Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting; spells flags out; names the nearest flag for an unknown one."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` lists what is known")

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, with the nearest flag in the refusal of an unknown one."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            raise UsageError(self._unknown(parsed, unknown[0]))
        return parsed

    def _unknown(self, parsed: argparse.Namespace, argument: str) -> str:
        command = getattr(parsed, "subparser", self)
        if not argument.startswith("-"):
            return refusal("this command takes no further argument", f"see `{command.prog} --help`", argument=argument)
        flag = argument.partition("=")[0]
        near = difflib.get_close_matches(flag, command._option_string_actions, n=1)
        fix = f"did you mean {near[0]}?" if near else f"`{command.prog} --help` lists the flags"
        return refusal("a flag must be known", fix, flag=flag)


def integer(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"needs an integer, not {text!r}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"needs an integer >= {minimum}, not {value}")
        return value

    return convert
