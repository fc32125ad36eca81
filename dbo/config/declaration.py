"""How an option of `DBOConfig` is declared: once, beside its field. Parser, help, bounds and docs read it from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field's declaration says beside its name, type and default.

    Attributes:
        flag: its spelling on a command line.
        help: one line, without the default: that depends on the command.
        default: where the default comes from, in words; "" where the value says it all.
        choices: makes the values that are taken; None: any.
        least, most: bounds of an integer, both included; None where there is none.
        why: the reason for `most`, in a few words.
        unit: what its value counts, where the flag's last word does not say it.
    """

    flag: str
    help: str
    default: str = ""
    choices: Callable[[], tuple[str, ...]] | None = None
    least: int | None = None
    most: int | None = None
    why: str = ""
    unit: str = ""


def option(value: Any, /, **declared: Any) -> Any:
    """A dataclass field with the default `value` and an `Option`."""
    return dataclasses.field(default=value, metadata={_KEY: Option(**declared)})


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """The declaration of a field; None for one that no user sets."""
    return field.metadata.get(_KEY)


def comma_separated_ints(text: str) -> tuple[int, ...]:
    """Parse "16,64,128".

    Raises:
        ValueError: anything but integers between commas.
    """
    return tuple(int(part) for part in text.split(","))
