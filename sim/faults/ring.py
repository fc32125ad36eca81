"""Faults of the ring: raises, yields, receive hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dbo.check.hooks import hooks_of
from dbo.engine.components import Components
from dbo.errors import DBOError
from dbo.trace import kinds
from dbo.trace.accesses import any_overlap
from dbo.ubatching.ring import UBatchContext
from sim.faults.clean_run import CleanRun, every_hook, every_yield
from sim.faults.fault import Fault, Site


class Broken(DBOError):
    """What a planted raise raises."""


class _Once:
    """True at the `at`-th question of a run, and never again."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self) -> bool:
        self._left -= 1
        return self._left == -1


def raise_at(program: Components, site: Site) -> Components:
    now = _Once(site.at)

    class Raising(UBatchContext):
        def yield_(self) -> None:
            if self.index == site.ubatch and now():
                raise Broken(f"planted at yield {site.at}")
            super().yield_()

    return replace(program, context=Raising)


def drop_yield(program: Components, site: Site) -> Components:
    now = _Once(site.at)

    class Dropping(UBatchContext):
        def yield_(self) -> None:
            if not (self.index == site.ubatch and now()):
                super().yield_()

    return replace(program, context=Dropping)


def add_yield(program: Components, site: Site) -> Components:
    now = _Once(site.at)

    class Adding(UBatchContext):
        def yield_(self) -> None:
            if self.index == site.ubatch and now():
                super().yield_()
            super().yield_()

    return replace(program, context=Adding)


def drop_hook(program: Components, site: Site) -> Components:
    now = _Once(site.at)

    class Dropping(UBatchContext):
        def run_recv_hook(self) -> None:
            if self.recv_hook is not None and self.index == site.ubatch and now():
                self.recv_hook = None
            super().run_recv_hook()

    return replace(program, context=Dropping)


def double_hook(program: Components, site: Site) -> Components:
    now = _Once(site.at)

    class Doubling(UBatchContext):
        def run_recv_hook(self) -> None:
            entry = self.recv_hook
            super().run_recv_hook()
            if entry is not None and self.index == site.ubatch and now():
                self._run(entry)

    return replace(program, context=Doubling)


def late_hook(program: Components, site: Site) -> Components:
    """The holder keeps the hook over its next hand-over: the owner computes with what has not arrived."""
    now = _Once(site.at)

    class Late(UBatchContext):
        _kept: tuple[int, int, Callable[[], None], Any] | None = None

        def run_recv_hook(self) -> None:
            if self.recv_hook is not None and self.index == site.ubatch and now():
                self._kept, self.recv_hook = self.recv_hook, None
            super().run_recv_hook()

        def yield_(self) -> None:
            super().yield_()
            if self._kept is not None:
                kept, self._kept = self._kept, None
                self._run(kept)

    return replace(program, context=Late)


def hooks_that_can_be_late(run: CleanRun) -> Iterator[Site]:
    """Hooks whose owner reads what they complete while their holder is away at its next yield."""
    receives = {hook.runs[0].id: hook.receives for hook in hooks_of(run.trace) if hook.runs}
    for rank, holder in run.ubatches():
        for at, hook in enumerate(run.carried_hooks(rank, holder)):
            if hook.step < 0:
                continue
            mine = [r for r in run.lines[rank, hook.step, holder] if r.id > hook.id and r.line == f"u{holder}"]
            away = next((r.id for r in mine if r.kind == kinds.YIELD), None)
            back = next((r.id for r in mine if r.kind == kinds.RESUME), None)
            if away is None or back is None:
                continue
            completed = [access for receive in receives[hook.id] for access in receive.writes]
            owned = run.lines[rank, hook.step, int(hook.attrs["owner"])]
            readers = (r for r in owned if away < r.id < back and r.on_device and r.kind != kinds.RECV)
            if any(any_overlap(reader.reads, tuple(completed)) for reader in readers):
                yield Site(rank=rank, ubatch=holder, at=at)


_A_YIELD = "a split step with that yield"
_A_HOOK = "a split step in which the ubatch runs that hook for another one"

FAULTS = (
    Fault(
        name="raise",
        sentence="a ubatch raises at a yield",
        id="swallowed-error",
        plant=raise_at,
        needs=_A_YIELD,
        sites=every_yield,
    ),
    Fault(
        name="drop-yield",
        sentence="a ubatch leaves one yield out",
        id="unequal-yields",
        plant=drop_yield,
        needs=_A_YIELD,
        sites=every_yield,
    ),
    Fault(
        name="add-yield",
        sentence="a ubatch yields once more than declared",
        id="unequal-yields",
        plant=add_yield,
        needs=_A_YIELD,
        sites=every_yield,
    ),
    Fault(
        name="drop-hook",
        sentence="a peer's receive hook is thrown away",
        id="hook-lost",
        plant=drop_hook,
        needs=_A_HOOK,
        sites=every_hook,
        backends=("deepep_low_latency",),
    ),
    Fault(
        name="double-hook",
        sentence="a receive hook runs twice",
        id="hook-twice",
        plant=double_hook,
        needs=_A_HOOK,
        sites=every_hook,
        backends=("deepep_low_latency",),
    ),
    Fault(
        name="late-hook",
        sentence="a receive hook runs after its owner has read the data",
        id="hook-late",
        plant=late_hook,
        needs="a hook whose owner reads what it completes before its holder has the baton back",
        sites=hooks_that_can_be_late,
        backends=("deepep_low_latency",),
    ),
)
