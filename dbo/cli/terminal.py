"""Colour, where the output is a terminal and nobody asked for none."""

from __future__ import annotations

import os
from typing import TextIO

_CODES = {"green": "32", "red": "31", "yellow": "33", "bold": "1"}


def colours(stream: TextIO | None) -> bool:
    """Whether `stream` may show colour: an open one, a terminal, and neither NO_COLOR nor TERM=dumb is set."""
    if stream is None:
        return False
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, *, on: bool) -> str:
    """`text` in a colour, or as it is."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if on else text
