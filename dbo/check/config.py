"""config: ranks run with different effective configurations, ignore what one asks, or die of one that they accepted."""

from __future__ import annotations

from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "config"
SENTENCE = "ranks are configured differently, or accept a configuration and then ignore it or die of it in set-up"
UNIT = "configurations compared"
READS = (kinds.CONFIG, kinds.ERROR, kinds.STEP_BEGIN)
NEEDS = (kinds.CONFIG,)

_ACCEPTED = "enable_dbo=True is accepted and can do nothing"
_REFUSALS = frozenset(("ConfigError", "NotAvailable", "UsageError", "PeerFailed"))


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Compares every rank's effective configuration with the lowest rank's, field by field."""
    found = Findings(ID)
    records = sorted(trace.of_kind(kinds.CONFIG), key=lambda r: (r.rank, r.id))
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
    if first is not None:
        _judge_promise(first, found)
    _judge_setup(trace, found)
    return found


def _judge_promise(record: Record, found: Findings) -> None:
    """DBO that has no exchange to hide is asked for in vain; it is refused, not ignored."""
    config = need(record, "config")
    if not config.get("enable_dbo"):
        return
    ranks = config.get("data_parallel_size", 2) * config.get("decode_context_parallel_size", 1)
    if not config.get("enable_expert_parallel", True):
        found.violate(f"{_ACCEPTED}, enable_expert_parallel=False: there are no experts to exchange with", record)
    elif ranks < 2:
        found.violate(
            f"{_ACCEPTED}, data_parallel_size={config['data_parallel_size']}: there is nobody to exchange with", record
        )


def _judge_setup(trace: Trace, found: Findings) -> None:
    """What cannot work is refused by name before it is accepted; it does not die of something else on the way."""
    accepted = {record.rank: record for record in trace.of_kind(kinds.CONFIG)}
    started = {record.rank for record in trace.of_kind(kinds.STEP_BEGIN)}
    for record in sorted(trace.of_kind(kinds.ERROR), key=lambda r: (r.rank, r.id)):
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
