"""How long a watched run may stand still before its watchdog ends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """What a watchdog allows.

    Attributes:
        stall_s: lines wait for each other, and nothing has moved for so long.
        slow_s: the same where one of those waited for computes, or a library is at work for all of them; None: the
            watchdog's own multiple of `stall_s`.
    """

    stall_s: float = 60.0
    slow_s: float | None = None
