"""dp-disagreement: ranks decide differently about one step, against the rules, or do something else than they decided.

The rules are worked out here once more, from the table and the configuration, so that a mistake in
`dbo.batch.coordinate` that all ranks share is one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbo.batch.coordinate import NUM_ROWS, ROW_PADDED, ROW_QUERY_LEN, ROW_READS_NEW_KV, ROW_REAL, ROW_VOTE
from dbo.check.happens import HappensBefore
from dbo.check.hooks import failed_steps
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "dp-disagreement"
SENTENCE = "ranks decide differently, or a rank acts against the common decision"
UNIT = "decisions compared with each other and with what was done"
READS = (kinds.DECIDE, kinds.GRAPH_GET, kinds.SLICES, kinds.STEP_END, kinds.UBATCH_ENTER)
NEEDS = (kinds.DECIDE,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Per step: equal tables and decisions on all ranks, as the rules want them; then what was decided is what was done."""
    found = Findings(ID)
    steps: dict[int, dict[int, Record]] = {}
    for record in trace.of_kind(kinds.DECIDE):
        steps.setdefault(record.step, {})[record.rank] = record
    ranks = {rank for decided in steps.values() for rank in decided}
    done = _Done(trace)
    for step in sorted(steps):
        decided = steps[step]
        first = decided[min(decided)]
        for rank in sorted(ranks):
            found.checked += 1
            if rank not in decided:
                if trace.meta.get("complete", True) and not done.failed:
                    found.violate(f"rank {rank} made no decision in step {step}, others did", first, rank=rank)
                continue
            record = decided[rank]
            if record is not first:
                _compare(first, record, found)
            _compare_with_deeds(record, done, found)
        _judge_by_the_rules(first, trace.meta.get("config") or {}, found)
    _compare_graphs(trace, found)
    return found


class _Done:
    """What every rank did in every step."""

    def __init__(self, trace: Trace) -> None:
        self.failed = failed_steps(trace)
        self.ended = {(r.rank, r.step) for r in trace.of_kind(kinds.STEP_END)}
        self.ubatches: dict[tuple[int, int], set[int]] = {}
        for record in trace.of_kind(kinds.UBATCH_ENTER):
            self.ubatches.setdefault((record.rank, record.step), set()).add(record.ubatch)
        self.slices = {(r.rank, r.step): r for r in trace.of_kind(kinds.SLICES)}


def _judge_by_the_rules(record: Record, config: Mapping[str, Any], found: Findings) -> None:
    """Votes by the thresholds; a split iff all vote for it, no batch has to stay whole and no last ubatch is empty."""
    table, decision = need(record, "table"), need(record, "decision")
    if not {"enable_dbo", "num_ubatches"} <= config.keys() or len(table) != NUM_ROWS or decision["all_idle"]:
        return
    real, whole = table[ROW_REAL], any(table[ROW_READS_NEW_KV])
    for rank, tokens in enumerate(real):
        kind = "decode" if table[ROW_QUERY_LEN][rank] else "prefill"
        threshold = config[f"dbo_{kind}_token_threshold"]
        wants = config["enable_dbo"] and 0 < tokens >= threshold and not table[ROW_READS_NEW_KV][rank]
        if bool(table[ROW_VOTE][rank]) != wants:
            found.violate(
                f"rank {rank} votes {'no' if wants else 'yes'} in step {record.step} with {tokens} tokens of {kind}: "
                f"the threshold is {threshold}",
                record,
                rank=rank,
            )
            return
    full, ubatches = decision["cudagraph_mode"] == "FULL", config["num_ubatches"]
    if config.get("split_points") and full:
        return  # points that cut inside a query are for eager steps only
    rows = decision["num_tokens_padded"][0] if full else max(table[ROW_PADDED])
    points = config.get("split_points") or [rows // ubatches * i for i in range(1, ubatches)]
    possible = bool(points) and points[0] >= 1 and min(real) > points[-1]
    agreed = all(table[ROW_VOTE]) and not whole
    if decision["split"] and not agreed and possible:  # a last ubatch without tokens is `empty-ubatch`
        found.violate(
            f"step {record.step} is split, though not every rank votes for it, or a batch has to stay whole", record
        )
    elif agreed and possible and not decision["split"]:
        why = "every rank votes for it and has tokens for every ubatch"
        found.violate(f"step {record.step} is not split, though {why}: {decision['reason']}", record)


def _compare(first: Record, record: Record, found: Findings) -> None:
    for part in ("table", "decision"):
        mine, theirs = need(first, part), need(record, part)
        if mine != theirs:
            found.violate(
                f"step {record.step}: rank {first.rank} and rank {record.rank} {_verb(part)} "
                f"{_difference(mine, theirs)}",
                record,
                first.id,
            )
            return


def _verb(part: str) -> str:
    return "saw different tables:" if part == "table" else "decided differently:"


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = [name for name in sorted({*a, *b}, key=lambda n: (n == "reason", n)) if a.get(name) != b.get(name)]
        return "; ".join(f"{name}={a.get(name)} and {name}={b.get(name)}" for name in names)
    return f"{a} and {b}"


def _compare_graphs(trace: Trace, found: Findings) -> None:
    """In every step all ranks look up the same graph."""
    first: dict[tuple[int, int], Record] = {}
    seen: dict[tuple[int, int], int] = {}
    for record in sorted(trace.of_kind(kinds.GRAPH_GET), key=lambda r: (r.rank, r.id)):
        at = seen[record.rank, record.step] = seen.get((record.rank, record.step), -1) + 1
        other = first.setdefault((record.step, at), record)
        found.checked += 1
        mine, theirs = need(other, "key"), need(record, "key")
        if mine != theirs:
            found.violate(
                f"step {record.step}: rank {other.rank} and rank {record.rank} look up different graphs: "
                f"{_difference(mine, theirs)}",
                record,
                other.id,
            )


def _compare_with_deeds(record: Record, done: _Done, found: Findings) -> None:
    decision = need(record, "decision")
    key = (record.rank, record.step)
    if key in done.failed:
        return
    split, wanted = decision["split"], decision["num_ubatches"] if decision["split"] else 0
    ran = len(done.ubatches.get(key, ()))
    replayed = decision.get("cudagraph_mode") == "FULL" and ran == 0
    if not replayed and (ran > wanted or (ran < wanted and key in done.ended)):
        found.violate(
            f"rank {record.rank} ran {ran} ubatches in step {record.step} after deciding for {wanted or 'none'}", record
        )
    slices = done.slices.get(key)
    if slices is None:
        return
    padded = decision["num_tokens_padded"][record.rank]
    parent, cut = need(slices, "parent"), need(slices, "ubatches")
    if parent["num_tokens_padded"] != padded:
        found.violate(
            f"rank {record.rank} ran {parent['num_tokens_padded']} token rows in step {record.step} after deciding for "
            f"{padded}",
            slices,
            record.id,
        )
    if len(cut) != wanted and not (not split and len(cut) <= 1):
        found.violate(
            f"rank {record.rank} cut step {record.step} in {len(cut)} slices after deciding for {wanted or 'none'}",
            slices,
            record.id,
        )
