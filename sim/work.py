"""What device work is, as one value: a stream queues it, the engine makes a node of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbo.trace import Access

if TYPE_CHECKING:
    from sim.engine import Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One piece of device work, whichever rank and line it goes to.

    Attributes:
        kind, name, src, attrs: as in its trace record. A replayed graph gives each replay its own `attrs`.
        duration_us: from its start to its end, without what contention adds.
        reads, writes: what it touches.
        run: acts at its start. finish: acts at its end.
        after: other work that it waits for.
        takes_sms: free SMs of its device that it waits for before it starts. frees_sms: what it gives back at its end.
        reserves: False: it waits for no SMs and keeps them from none, and only slows what computes beside it.
        copies: it is a copy engine's work, which slows compute too.
    """

    kind: str
    name: str
    duration_us: float = 0.0
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    run: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    after: tuple[Node, ...] = ()
    src: str = ""
    attrs: dict[str, Any] | None = None
    takes_sms: int = 0
    frees_sms: int = 0
    reserves: bool = True
    copies: bool = False
