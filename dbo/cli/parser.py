"""argparse whose refusals are `UsageError`s, so that the frame alone decides how they are shown."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dbo.config.declaration import comma_separated_ints
from dbo.errors import UsageError, refusal

_TAKEN = {int: "an integer", float: "a number", comma_separated_ints: "integers between commas, as 16,64"}
"""What a type that raises ValueError takes, in words."""


class Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting; spells flags out; names the nearest flag or command for an unknown one.

    argparse's own sentences name neither the rule nor the fix, so the hooks that make them are overridden. A type says
    what it takes by an `ArgumentTypeError`: "an integer >= 1".
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Whatever no hook below has refused: argparse's sentence, as far as it is known taken apart."""
        see = f"see `{self.prog} --help`"
        if missing := re.fullmatch(r"the following arguments are required: (.+)", message):
            raise UsageError.of("what has no default must be given", fix=see, missing=missing[1])
        if switch := re.fullmatch(r"argument (.+): ignored explicit argument (.+)", message):
            raise UsageError.of("a switch takes no value", fix="drop the value", flag=switch[1], value=switch[2])
        if both := re.fullmatch(r"argument (.+): not allowed with argument (.+)", message):
            raise UsageError.of("these flags exclude each other", fix="drop one", flags=f"{both[1]}, {both[2]}")
        raise UsageError(f"{message}; {see}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        convert = self._registry_get("type", action.type, action.type)
        try:
            return convert(arg_string)
        except argparse.ArgumentTypeError as error:
            taken = str(error)
        except (TypeError, ValueError):
            taken = _TAKEN.get(convert, "another value")
        raise UsageError.of(f"{_called(action)} takes {taken}", fix="pass such a value", **_given(action, arg_string))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        fix = f"choose one of {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            near = difflib.get_close_matches(value, choices, n=1)
            raise UsageError.of("a command must be known", fix=_did_you_mean(near, fix), command=value)
        raise UsageError.of(f"{_called(action)} takes one of its choices", fix=fix, **_given(action, value))

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            fix = f"choose one of {', '.join(map(str, action.choices))}" if action.choices else _example(action)
            raise UsageError.of("this flag takes a value", fix=fix, flag=_called(action)) from None

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
        fix = _did_you_mean(near, f"`{command.prog} --help` lists the flags")
        return refusal("a flag must be known", fix, flag=flag)


def _called(action: argparse.Action) -> str:
    """The flag as it is spelled; an argument by the name that the help gives it."""
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def _given(action: argparse.Action, value: object) -> dict[str, str]:
    return {_called(action).lstrip("-").replace("-", "_"): repr(value)}


def _example(action: argparse.Action) -> str:
    return f"write {_called(action)} {action.metavar or action.dest.rpartition('.')[2].upper()}"


def _did_you_mean(near: Sequence[str], otherwise: str) -> str:
    return f"did you mean {near[0]}?" if near else otherwise


def integer(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"an integer >= {minimum}")
        return value

    return convert
