"""slot-cycle: kernels that hold their SMs until all peers run them, launched in opposite orders on two ranks.

Such a kernel (`sms`, `holds_until_peers`) ends only when every member of its group and index runs. If rank a launches
N before L and rank b L before N, and both do not fit on a device at once, then a holds N's SMs and lacks L's, and b the
other way round. Judged from the order of launches, so a run in which it happened to go well is reported, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "slot-cycle"
SENTENCE = "two ranks launch kernels that hold their SMs until the peers come in opposite orders, and both do not fit"
UNIT = "kernels that hold SMs"
READS = kinds.KERNELS
NEEDS = ()

DEFAULT_SMS = 132
"""SMs of a device where the trace's meta does not say (`sms`)."""


class _Kernel(NamedTuple):
    """One rank's launch of kernel (group, index)."""

    key: tuple[str, int]
    sms: int
    record: Record


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Each pair of kernels that every two ranks share."""
    found = Findings(ID)
    limit = int(trace.meta.get("sms", DEFAULT_SMS))
    launched: dict[int, list[_Kernel]] = {}
    for record in sorted(trace.records, key=_order):
        if "sms" not in record.attrs:
            continue
        found.checked += 1
        if record.attrs["sms"] > limit:
            found.violate(
                f"{record.name} of rank {record.rank} wants {record.attrs['sms']} SMs, a device has {limit}", record
            )
        if record.attrs.get("holds_until_peers"):
            key = (str(need(record, "group")), int(need(record, "index")))
            launched.setdefault(record.rank, []).append(_Kernel(key, int(record.attrs["sms"]), record))
    for a, b in combinations(sorted(launched), 2):
        for (n, other_n), (m, other_m) in _opposite(launched[a], launched[b]):
            if n.sms + m.sms > limit and other_n.sms + other_m.sms > limit:
                found.violate(_sentence(n, m, other_n, other_m, limit), other_m.record, n.record.id, m.record.id)
    return found


def _order(record: Record) -> int:
    """Order of issue; a kernel that never started is known by its `blocked` record, which names its launch."""
    return int(record.attrs.get("launch", record.id))


def _opposite(
    mine: list[_Kernel], theirs: list[_Kernel]
) -> Iterator[tuple[tuple[_Kernel, _Kernel], tuple[_Kernel, _Kernel]]]:
    """((first, its twin), (second, its twin)) for pairs that the other rank launches the other way round."""
    place = {kernel.key: at for at, kernel in enumerate(theirs)}
    shared = [kernel for kernel in mine if kernel.key in place]
    if all(place[a.key] < place[b.key] for a, b in pairwise(shared)):
        return  # the usual case, without a look at every pair
    for first, second in combinations(shared, 2):
        if place[second.key] < place[first.key]:
            yield (first, theirs[place[first.key]]), (second, theirs[place[second.key]])


def _sentence(n: _Kernel, m: _Kernel, other_n: _Kernel, other_m: _Kernel, limit: int) -> str:
    return (
        f"resource cycle over {limit} SMs: rank {n.record.rank} launches {n.record.name} ({n.sms} SMs) before "
        f"{m.record.name} ({m.sms}), rank {other_m.record.rank} launches {other_m.record.name} ({other_m.sms}) before "
        f"{other_n.record.name} ({other_n.sms}); each holds what the other lacks until its peer runs"
    )
