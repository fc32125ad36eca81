"""config: ranks run with different effective configurations."""

from __future__ import annotations

from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Trace

ID = "config"
SENTENCE = "ranks are configured differently, so nothing that they decide or exchange can be trusted to agree"
UNIT = "configurations compared"


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Compares every rank's effective configuration with the lowest rank's, field by field."""
    found = Findings(ID)
    records = sorted(trace.of_kind("config"), key=lambda r: (r.rank, r.id))
    first = records[0] if records else None
    for record in records:
        found.checked += 1
        if first is None or record.rank == first.rank:
            continue
        for name, mine, theirs in _differences(need(first, "config"), need(record, "config")):
            found.violate(
                f"configurations differ: rank {first.rank} has {name}={mine}, rank {record.rank} has {name}={theirs}; "
                f"start all ranks with the same {name}",
                record,
                first.id,
            )
    return found


def _differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) wherever two nested dicts differ."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [(path, a, b)] if a != b else []
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(a.keys() | b.keys()):
        there = f"{path}.{name}" if path else str(name)
        found += _differences(a.get(name, "(absent)"), b.get(name, "(absent)"), there)
    return found
