"""config: ranks run with different effective configurations, or die of one that they accepted."""

from __future__ import annotations

from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Trace

ID = "config"
SENTENCE = "ranks are configured differently, or a rank dies in set-up of a configuration that it accepted"
UNIT = "configurations compared"

_REFUSALS = frozenset(("ConfigError", "NotAvailable", "UsageError", "PeerFailed"))


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
    _judge_setup(trace, found)
    return found


def _judge_setup(trace: Trace, found: Findings) -> None:
    """What cannot work is refused by name before it is accepted; it does not die of something else on the way."""
    accepted = {record.rank: record for record in trace.of_kind("config")}
    started = {record.rank for record in trace.of_kind("step.begin")}
    for record in trace.of_kind("error"):
        config = accepted.get(record.rank)
        if config is None or record.rank in started or record.line != "main" or record.attrs.get("type") in _REFUSALS:
            continue
        found.violate(
            f"rank {record.rank} accepted its configuration and died in set-up with {need(record, 'type')}: "
            f"{record.attrs.get('message', '')}; refuse it by name before it is accepted",
            record,
            config.id,
        )
        return


def _differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) wherever two nested dicts differ."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [(path, a, b)] if a != b else []
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(a.keys() | b.keys()):
        there = f"{path}.{name}" if path else str(name)
        found += _differences(a.get(name, "(absent)"), b.get(name, "(absent)"), there)
    return found
