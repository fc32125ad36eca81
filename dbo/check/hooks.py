"""What became of every receive hook: shared by hook-lost, hook-late and hook-twice."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from dbo.check.violation import need
from dbo.trace import Record, Trace, kinds

READS = (
    kinds.ERROR,
    kinds.HOOK_DROP,
    kinds.HOOK_REGISTER,
    kinds.HOOK_RUN,
    kinds.RECV,
    kinds.RESUME,
    kinds.UBATCH_ENTER,
    kinds.UBATCH_EXIT,
    kinds.YIELD,
)
"""Kinds of records that this module looks at, for the detectors that use it."""

_AFTER_A_HOOK = frozenset(
    (
        kinds.YIELD,
        kinds.RESUME,
        kinds.HOOK_REGISTER,
        kinds.HOOK_RUN,
        kinds.HOOK_DROP,
        kinds.UBATCH_EXIT,
        kinds.UBATCH_ENTER,
    )
)


@dataclass
class HookHistory:
    """One registered hook.

    Attributes:
        number: the hook's own number; unique in a step of a rank.
        registered: the record of its registration; its ubatch is the owner.
        runs, drops: records of each time it ran or was dropped.
        receives: receive operations that it launched, in issue order.
    """

    number: int
    registered: Record
    runs: list[Record] = field(default_factory=list)
    drops: list[Record] = field(default_factory=list)
    receives: list[Record] = field(default_factory=list)

    @property
    def owner(self) -> int:
        return int(need(self.registered, "owner"))

    @property
    def holder(self) -> int:
        return int(need(self.registered, "holder"))


def hooks_of(trace: Trace) -> list[HookHistory]:
    """Every registered hook of a trace, in order, with what happened to it."""
    hooks: dict[tuple[int, int, int], HookHistory] = {}
    for record in trace.of_kind(kinds.HOOK_REGISTER):
        number = need(record, "hook")
        hooks[record.rank, record.step, number] = HookHistory(number, record)
    for record in trace.of_kind(kinds.HOOK_RUN, kinds.HOOK_DROP):
        hook = hooks.get((record.rank, record.step, need(record, "hook")))
        if hook is not None:
            (hook.runs if record.kind == kinds.HOOK_RUN else hook.drops).append(record)
    _attach_receives(trace, list(hooks.values()))
    return list(hooks.values())


def failed_steps(trace: Trace) -> set[tuple[int, int]]:
    """(rank, step) of every step in which something raised: its hooks may be dropped, its counts may be off."""
    return {(record.rank, record.step) for record in trace.of_kind(kinds.ERROR)}


def unwound_steps(trace: Trace) -> set[tuple[int, int]]:
    """(rank, step) of every step in which a ubatch raised: the ring drops its hooks.

    A step may also fail after its ubatches have ended, for example on the numbers that a lost hook left.
    """
    return {(r.rank, r.step) for r in trace.of_kind(kinds.ERROR) if r.line.startswith("u")}


def _attach_receives(trace: Trace, hooks: list[HookHistory]) -> None:
    """A hook launches the receives that its owner's records carry between its run and the runner's next turn."""
    ends: dict[tuple[int, str], list[int]] = {}
    for record in trace.records:
        if record.kind in _AFTER_A_HOOK:
            ends.setdefault((record.rank, record.line), []).append(record.id)
    receives: dict[tuple[int, int], list[Record]] = {}
    for record in trace.of_kind(kinds.RECV):
        receives.setdefault((record.rank, record.ubatch), []).append(record)
    for records in receives.values():
        records.sort(key=lambda r: r.id)
    for hook in hooks:
        for run in hook.runs[:1]:
            turns = ends[run.rank, run.line]
            following = bisect_right(turns, run.id)
            stop = turns[following] if following < len(turns) else None
            mine = receives.get((run.rank, hook.owner), [])
            for receive in mine[bisect_right(mine, run.id, key=lambda r: r.id) :]:
                if stop is not None and receive.id > stop:
                    break
                hook.receives.append(receive)
