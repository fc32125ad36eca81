"""unequal-yields: a ubatch handed the baton on another number of times than its schedule declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dbo.check.happens import HappensBefore
from dbo.check.stuck_yields import yields_due
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "unequal-yields"
SENTENCE = "a ubatch yields another number of times than its schedule declares"
UNIT = "ubatches of a step"
READS = (kinds.BLOCKED, kinds.UBATCH_ENTER, kinds.UBATCH_EXIT, kinds.YIELD)
NEEDS = (kinds.UBATCH_EXIT,)

_Key = tuple[int, int, int]


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Compares counts at exit; a ubatch that never exits is compared by the yields it has made so far."""
    found = Findings(ID)
    counts: Counter[tuple[int, int, int]] = Counter()
    enters: dict[tuple[int, int, int], Record] = {}
    exits: dict[tuple[int, int, int], Record] = {}
    for record in trace.of_kind(kinds.UBATCH_ENTER, kinds.YIELD, kinds.UBATCH_EXIT):
        key = (record.rank, record.step, record.ubatch)
        if record.kind == kinds.YIELD:
            counts[key] += 1
        elif record.kind == kinds.UBATCH_ENTER:
            enters[key] = record
        else:
            exits[key] = record
    for key, record in exits.items():
        if record.attrs.get("error"):
            # Cut short: what the player has passed still tells who yielded behind its back, or did not.
            played = record.attrs.get("played_yields")
            if played is not None:
                found.checked += 1
                done = need(record, "yields")
                if not played <= done <= played + 1:
                    words = f"yielded {done} times where the schedule had passed {played} yields"
                    declared = need(record, "declared_yields")
                    found.violate(_sentence(key, words, declared, _plain(key, counts, exits)), record)
            continue
        found.checked += 1
        done, declared = need(record, "yields"), need(record, "declared_yields")
        if done != declared:
            found.violate(_sentence(key, f"yielded {done} times", declared, _plain(key, counts, exits)), record)
    if not trace.meta.get("complete", True):
        _judge_stuck(trace, counts, enters, exits, found)
    return found


def _judge_stuck(
    trace: Trace, counts: Counter[_Key], enters: dict[_Key, Record], exits: dict[_Key, Record], found: Findings
) -> None:
    """Ubatches that never left their step."""
    blocked = {(r.rank, r.step, r.ubatch): r for r in trace.of_kind(kinds.BLOCKED) if r.line == f"u{r.ubatch}"}
    for key in sorted(enters.keys() - exits.keys()):
        record = enters[key]
        peers = [r.attrs["declared_yields"] for k, r in exits.items() if k[:2] == key[:2] and not r.attrs.get("error")]
        declared = record.attrs.get("declared_yields", max(peers, default=None))
        # A yield after the last peer has left leaves no record, so there the place says nothing.
        due = yields_due(blocked[key], trace) if key in blocked and not peers else None
        found.checked += due is not None or declared is not None
        if due is not None and counts[key] not in due.by_now:
            place = f"{blocked[key].point or 'the end'} of layer {blocked[key].layer}"
            words = f"is stuck at {place} after {counts[key]} yields instead of {due.by_now.start}"
            found.violate(_sentence(key, words, due.declared, _plain(key, counts, exits)), record)
        elif declared is not None and counts[key] > declared:
            words = f"has yielded {counts[key]} times and waits"
            found.violate(_sentence(key, words, declared, _plain(key, counts, exits)), record)


def plain_ring_ends(yields: Sequence[int]) -> bool:
    """The law of a plain ring: every thread finishes iff y_0 >= y_1 >= … >= y_{U-1} >= y_0 - 1."""
    falling = all(a >= b for a, b in zip(yields, yields[1:], strict=False))
    return not yields or (falling and yields[-1] >= yields[0] - 1)


def _plain(
    key: tuple[int, int, int], counts: Counter[tuple[int, int, int]], exits: dict[tuple[int, int, int], Record]
) -> str:
    members = sorted(k for k in counts.keys() | exits.keys() if k[:2] == key[:2])
    yields = [exits[k].attrs.get("yields", counts[k]) if k in exits else counts[k] for k in members]
    shown = ", ".join(f"y{k[2]}={y}" for k, y in zip(members, yields, strict=True))
    return f"a plain ring {'would end' if plain_ring_ends(yields) else 'would hang'} ({shown})"


def _sentence(key: tuple[int, int, int], did: str, declared: int, ring: str) -> str:
    rank, step, ubatch = key
    return f"ubatch {ubatch} of rank {rank} {did} in step {step}, its schedule declares {declared}; {ring}"
