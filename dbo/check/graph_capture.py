"""graph-capture: a capture does what captures forbid, or a step looks its graph up under another key or program.

A key stands for a program: what is stored under it and what is looked for under it must be the same one. Where the
records also carry `program` (what is launched, whatever the key says of it), that is compared, too.
"""

from __future__ import annotations

import json
from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "graph-capture"
SENTENCE = "a capture does what a capture forbids, or a graph is looked up under a key that does not name its program"
UNIT = "captures, graphs stored and looked up, host waits and collectives"
READS = (
    kinds.CAPTURE_BEGIN,
    kinds.CAPTURE_END,
    kinds.COLLECTIVE,
    kinds.ERROR,
    kinds.GRAPH_GET,
    kinds.GRAPH_PUT,
    kinds.HOST_WAIT,
)
NEEDS = (kinds.CAPTURE_BEGIN,)

_FORBIDDEN = frozenset((kinds.HOST_WAIT, kinds.COLLECTIVE))


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Judges each rank's captures in order of issue, then each lookup against what was stored before it."""
    found = Findings(ID)
    records = sorted(trace.records, key=lambda r: r.id)
    _judge_keys(records, found)
    _judge_captures(records, found)
    return found


def _judge_captures(records: list[Record], found: Findings) -> None:
    opened: dict[int, Record] = {}
    for record in records:
        begun = opened.get(record.rank)
        if record.kind == kinds.CAPTURE_BEGIN:
            found.checked += 1
            opened[record.rank] = record
        elif record.kind == kinds.CAPTURE_END:
            opened.pop(record.rank, None)
        elif record.kind in _FORBIDDEN and not record.on_device:
            found.checked += 1
            if begun is not None:
                what = record.attrs.get("why") or record.name
                found.violate(
                    f"rank {record.rank} does a {record.kind} ({what}) while it captures {begun.name}", record, begun.id
                )
        elif record.kind == kinds.ERROR and record.attrs.get("type") == "CaptureError":
            opened.pop(record.rank, None)
            where = f"while it captures {begun.name}" if begun is not None else "outside a capture"
            found.violate(f"rank {record.rank} fails {where}: {record.attrs.get('message', '')}", record)
    for begun in opened.values():
        found.violate(f"rank {begun.rank} never ends the capture of {begun.name}", begun)


def _judge_keys(records: list[Record], found: Findings) -> None:
    stored: dict[int, dict[str, Record]] = {}
    for record in records:
        if record.kind == kinds.GRAPH_PUT:
            found.checked += 1
            stored.setdefault(record.rank, {})[_text(need(record, "key"))] = record
        elif record.kind == kinds.GRAPH_GET:
            found.checked += 1
            _judge_lookup(record, stored.get(record.rank, {}), found)


def _judge_lookup(record: Record, stored: dict[str, Record], found: Findings) -> None:
    key, program = _text(need(record, "key")), record.attrs.get("program")
    put = stored.get(key)
    if put is None:
        same = [k for k, p in stored.items() if program is not None and _text(p.attrs.get("program")) == _text(program)]
        hint = f"the graph of this program was stored under {same[0]}" if same else f"{len(stored)} graphs are stored"
        found.violate(f"rank {record.rank} finds no graph under {key} in step {record.step}: {hint}", record)
    elif program is not None and _text(put.attrs.get("program")) != _text(program):
        found.violate(
            f"rank {record.rank} replays the graph of {_text(put.attrs.get('program'))} for {_text(program)} in step "
            f"{record.step}: both have the key {key}",
            record,
            put.id,
        )


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
