"""graph-stale: a replay uses an address or a value that was right at capture and is not any more.

Three witnesses: a captured buffer that was freed (`unbake`), a workspace slot that was allocated anew after a graph
borrowed its memory (`bake`, then `reserve` with another generation), and values that a replay bakes in beside what they
should be now (`replay` with `baked` and `live`).
"""

from __future__ import annotations

from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "graph-stale"
SENTENCE = "a replayed graph uses an address or a value that it captured and that is no longer right"
UNIT = "replays, buffers and slots that graphs captured"
READS = (kinds.BAKE, kinds.REPLAY, kinds.RESERVE, kinds.UNBAKE)
NEEDS = (kinds.REPLAY,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Follows each rank in order of issue: what a graph captured has to be in place at every replay."""
    found = Findings(ID)
    freed: dict[tuple[int, str], Record] = {}
    borrowed: dict[tuple[int, str], dict[str, Record]] = {}
    present: dict[tuple[int, str], Record] = {}
    for record in sorted(trace.records, key=lambda r: r.id):
        if record.kind == kinds.UNBAKE:
            found.checked += 1
            for graph in need(record, "graphs"):
                freed.setdefault((record.rank, graph), record)
        elif record.kind == kinds.BAKE:
            found.checked += 1
            slots = borrowed.setdefault((record.rank, need(record, "graph")), {})
            slots[str(need(record, "slot"))] = record
        elif record.kind == kinds.RESERVE and "generation" in record.attrs:
            present[record.rank, str(need(record, "slot"))] = record
        elif record.kind == kinds.REPLAY:
            found.checked += 1
            key = (record.rank, need(record, "graph"))
            _judge(record, freed.get(key), borrowed.get(key, {}), present, trace, found)
    return found


def _judge(
    replay: Record,
    freed: Record | None,
    borrowed: dict[str, Record],
    present: dict[tuple[int, str], Record],
    trace: Trace,
    found: Findings,
) -> None:
    graph = replay.attrs["graph"]
    who = f"replay of {graph} on rank {replay.rank} in step {replay.step}"
    if freed is not None:
        info = trace.buffers.get(need(freed, "buffer"))
        name = info.name if info is not None and info.name else f"buffer {freed.attrs['buffer']}"
        found.violate(f"{who} uses {name}, which was captured and then freed (#{freed.id})", replay, freed.id)
    for slot, bake in borrowed.items():
        now = present.get((replay.rank, slot))
        if now is not None and now.attrs["generation"] != need(bake, "generation"):
            found.violate(
                f"{who} uses slot {slot} as of generation {bake.attrs['generation']}; it was allocated anew "
                f"(generation {now.attrs['generation']}, #{now.id}), and the old memory belongs to somebody else",
                replay,
                now.id,
                bake.id,
            )
    live: dict[str, Any] = replay.attrs.get("live", {})
    for name, value in replay.attrs.get("baked", {}).items():
        if name in live and live[name] != value:
            found.violate(f"{who} has captured {name}={value}, now it has to be {live[name]}", replay)
