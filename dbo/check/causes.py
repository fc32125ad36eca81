"""Which of several violations to name: one root often shows as many symptoms, so causes come before effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dbo.check.violation import Violation

CAUSES: tuple[tuple[str, str], ...] = (
    ("config", "ranks that are configured differently do everything else differently"),
    ("dp-disagreement", "ranks that decide differently meet in different collectives, or in none"),
    ("empty-ubatch", "a ubatch without tokens skips yields and exchanges"),
    ("metadata-slice", "a wrong slice moves rows and padding"),
    ("capacity", "a size beyond what was reserved corrupts or moves buffers"),
    ("graph-capture", "a wrong key or capture replays another program"),
    ("graph-stale", "a replay on recycled addresses shows as foreign data"),
    ("padding-leak", "padding that travels shows as wrong rows"),
    ("unequal-yields", "one yield too many or too few misplaces hooks and the baton"),
    ("two-awake", "two ubatches that run at once reorder everything they issue"),
    ("hook-lost", "a receive that never completes leaves its reader racing or its peers waiting"),
    ("hook-twice", "a receive that completes twice takes the next one's slot"),
    ("hook-late", "a receive that completes after its reader shows as a race on its buffer"),
    ("slot-cycle", "kernels that hold each other's SMs show as a deadlock"),
    ("swallowed-error", "an error unwinds its step and leaves its peers waiting"),
    ("collective-mismatch", "members that met in different operations wait for ever, or read foreign data"),
    ("buffer-reuse", "bytes that change hands too early show as a race or as wrong numbers"),
    ("stream-race", "a read before its write gives wrong numbers"),
    ("deadlock", "what is left when nobody above explains why nothing can go on"),
    ("numeric", "wrong numbers without any fault of order"),
    ("no-overlap", "right, but nothing hidden"),
)
"""Fault ids, causes first, each with the reason for its place. A violated verdict names the first one present."""

_RANK = {id: at for at, (id, _) in enumerate(CAUSES)}


def most_fitting(violations: Sequence[Violation]) -> Violation:
    """The violation that best explains the others."""
    return in_causal_order(violations)[0]


def in_causal_order(violations: Iterable[Violation]) -> list[Violation]:
    """Causes first; within one class the earliest step, then as found. Handled ones explain others last."""
    return sorted(violations, key=lambda v: (v.handled, _RANK.get(v.id, len(_RANK)), v.step))
