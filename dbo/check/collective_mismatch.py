"""collective-mismatch: members of a communicator meet in different operations, shapes, types or tags."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "collective-mismatch"
SENTENCE = "members of one communicator issue different operations under the same sequence number"
UNIT = "collectives"
READS = (kinds.COLLECTIVE, kinds.ERROR)
NEEDS = (kinds.COLLECTIVE,)

_FIELDS = ("op", "shape", "dtype", "tag")
_Key = tuple[int, str, int]


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """The first sequence number of each group (and epoch) at which its members differ, or one is missing.

    After a failed step communicators restart at 0: a rank whose count does not grow has begun a new epoch.
    """
    found = Findings(ID)
    members: dict[_Key, dict[int, Record]] = {}
    epochs: dict[int, int] = {}
    counts: dict[int, dict[str, int]] = {}
    for record in sorted(trace.of_kind(kinds.COLLECTIVE), key=lambda r: r.id):
        group, index = str(need(record, "group")), int(need(record, "index"))
        seen = counts.setdefault(record.rank, {})
        if index <= seen.get(group, -1):
            epochs[record.rank] = epochs.get(record.rank, 0) + 1
            seen.clear()
        seen[group] = index
        epoch = record.attrs.get("epoch", epochs.get(record.rank, 0))
        members.setdefault((epoch, group, index), {})[record.rank] = record
    failed = {record.rank for record in trace.of_kind(kinds.ERROR)}
    judged: set[tuple[int, str]] = set()
    for key in sorted(members):
        found.checked += 1
        if key[:2] not in judged and _judge(key, members[key], trace, bool(failed), found):
            judged.add(key[:2])
    return found


def _judge(key: _Key, joined: dict[int, Record], trace: Trace, failed: bool, found: Findings) -> bool:
    """Add the violation of one collective, if there is one."""
    ranks = sorted(joined)
    first = joined[ranks[0]]
    spot = f"group {key[1]} #{key[2]}"
    for rank in ranks[1:]:
        other = joined[rank]
        for name in _FIELDS:
            a, b = _plain(need(first, name)), _plain(need(other, name))
            if a != b:
                found.violate(
                    f"{spot} differs in {name}: rank {first.rank} has {name}={a} ({first.attrs['op']}), rank {rank} "
                    f"has {name}={b} ({other.attrs['op']})",
                    _odd_one(name, joined),
                    first.id,
                    other.id,
                )
                return True
    if _judge_counts(spot, joined, found):
        return True
    missing = sorted(_expected(first, joined) - joined.keys())
    if missing and trace.meta.get("complete", True) and not failed:
        names = ", ".join(f"rank {rank}" for rank in missing)
        what = f"{spot} ({first.attrs['op']}, tag={first.attrs['tag']})"
        found.violate(f"{what} never sees {names}", first, rank=missing[0])
        return True
    return False


def _judge_counts(spot: str, joined: dict[int, Record], found: Findings) -> bool:
    """Rows that one member sends another are the rows that the other one expects from it."""
    for a, mine in joined.items():
        for b, other in joined.items():
            if "sends" not in mine.attrs or "receives" not in other.attrs:
                continue
            sent, expected = mine.attrs["sends"][b], other.attrs["receives"][a]
            if sent != expected:
                found.violate(
                    f"{spot} differs in size: rank {a} sends rank {b} {sent} rows, rank {b} expects {expected}",
                    mine if a >= b else other,
                    other.id if a >= b else mine.id,
                )
                return True
    return False


def _odd_one(name: str, joined: dict[int, Record]) -> Record:
    """The first member whose value fewest share: the likely culprit; with two members the later rank."""
    values = {rank: repr(_plain(record.attrs[name])) for rank, record in joined.items()}
    counts = list(values.values())
    rank = min(values, key=lambda r: (counts.count(values[r]), -r if len(values) == 2 else r))
    return joined[rank]


def _expected(record: Record, joined: Collection[int]) -> set[int]:
    """Ranks that should join: listed in `ranks`, or all of them when that is their number."""
    ranks: Any = need(record, "ranks")
    return set(range(ranks)) if isinstance(ranks, int) else set(ranks)


def _plain(value: Any) -> Any:
    return [_plain(x) for x in value] if isinstance(value, (list, tuple)) else value
