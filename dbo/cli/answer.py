"""What a command hands back to the frame: the same answer as text and as one JSON object, and the exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """Exit codes of every command.

    GOOD: nothing speaks against the run. VIOLATION: something does, or the run decided nothing. USAGE: bad input.
    NOT_AVAILABLE: this machine or build lacks something. INTERNAL: a defect of dbo itself. UNPRINTED: standard output did
    not take the answer, which says nothing of the run. INTERRUPTED: by Ctrl-C.
    """

    GOOD = 0
    VIOLATION = 1
    USAGE = 2
    NOT_AVAILABLE = 3
    INTERNAL = 70
    UNPRINTED = 74
    INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Printed by the frame: `data` with `--json`, else `text`."""

    text: str
    data: dict[str, Any] = field(default_factory=dict)
    exit: int = Exit.GOOD
