"""How often a ubatch that is stuck inside its step should have yielded by now: its place in the schedule says so."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from dbo.schedule import Item, Point, Yield, parse_schedule
from dbo.trace import Record, Trace


class Due(NamedTuple):
    """Yields of a stuck ubatch: the numbers that fit the place where it is, and those that its schedule declares."""

    by_now: range
    declared: int


def yields_due(blocked: Record, trace: Trace) -> Due | None:
    """What a ubatch that is blocked should have yielded; None where the trace does not tell.

    A ubatch that waits for the baton has made the yield after its last point; one that waits for anything else has not.
    """
    text = str(trace.meta.get("schedule") or "")
    moe_layers = sorted({record.layer for record in trace.records if record.point == "D.send"})
    if not text or not moe_layers or blocked.line != f"u{blocked.ubatch}" or blocked.layer < 0:
        return None
    schedule = parse_schedule(text)
    items = schedule.program(str(trace.meta["backend"])).folded
    passed = sum(layer < blocked.layer for layer in moe_layers) * schedule.yields_per_layer
    following: tuple[Item, ...] = ()
    if blocked.layer in moe_layers:
        names = [item.name if isinstance(item, Point) else "" for item in items]
        at = names.index(blocked.point) if blocked.point in names and blocked.point else len(items)
        passed += sum(isinstance(item, Yield) for item in items[:at])
        following = tuple(itertools.takewhile(lambda item: not isinstance(item, Point), items[at + 1 :]))
    yields = sum(isinstance(item, Yield) for item in following)
    sleeps = str(blocked.attrs["waits_for"].get("what", "")).startswith("baton")

    def made(passed: int) -> int:
        own = {"ubatch": blocked.ubatch, "num_ubatches": int(trace.meta["ubatches"])}
        skipped = (schedule.skips(index, num_moe_layers=len(moe_layers), **own) for index in range(passed))
        return passed - sum(skipped)

    by_now = range(made(passed + sleeps), made(passed + yields * sleeps) + 1)
    return Due(by_now, made(len(moe_layers) * schedule.yields_per_layer))
