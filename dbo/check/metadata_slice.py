"""metadata-slice: a field of a ubatch is not what its parent batch implies.

The slicing rules once more, request by request and without a line shared with `dbo.batch.slicing`: a slice keeps the requests
that overlap its tokens; of each it sees a query that starts at its first token here, what was computed before that, and
nothing of what comes later.
"""

from __future__ import annotations

from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.errors import UsageError
from dbo.trace import Record, Trace, kinds

ID = "metadata-slice"
SENTENCE = "a field of a ubatch's metadata is not what the parent batch implies"
UNIT = "fields of ubatches"
READS = (kinds.DECIDE, kinds.SLICES)
NEEDS = (kinds.SLICES,)

_Plan = dict[str, Any]


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Recomputes every field of every ubatch; also the parent's own `seq_len - query_len == num_computed`."""
    found = Findings(ID)
    points = {
        (record.rank, record.step): record.attrs["decision"].get("split_points", ())
        for record in trace.of_kind(kinds.DECIDE)
        if "decision" in record.attrs
    }
    for record in trace.of_kind(kinds.SLICES):
        ubatches = need(record, "ubatches")
        if len(ubatches) > 1:
            _judge(record, need(record, "parent"), ubatches, points.get((record.rank, record.step), ()), found)
    return found


def expected(parent: _Plan, start: int, stop: int, *, rows: int, requests_stop: int | None = None) -> _Plan:
    """What the ubatch of tokens [start, stop) should hold.

    Args:
        rows: its token rows, padding included.
        requests_stop: end of its request rows when padded requests are included; None: real ones only.
    """
    loc = parent["query_start_loc"]
    real_stop = min(stop, parent["num_actual_tokens"])
    mine = [i for i in range(parent["num_reqs"]) if loc[i] < real_stop and loc[i + 1] > start]
    if requests_stop is not None:
        mine += range(mine[-1] + 1 if mine else requests_stop, requests_stop)
    queries, seq_lens, computed = [], [], []
    for i in mine:
        first, last = max(loc[i], start), min(loc[i + 1], real_stop)
        queries.append(max(0, last - first))
        seq_lens.append(parent["seq_lens"][i] - max(0, loc[i + 1] - real_stop))
        computed.append(parent["num_computed_tokens"][i] + max(0, start - loc[i]) * (loc[i + 1] > loc[i]))
    offsets = [0]
    for query in queries:
        offsets.append(offsets[-1] + query)
    layout = parent.get("dcp_layout")
    return {
        "query_start_loc": offsets,
        "seq_lens": seq_lens,
        "num_computed_tokens": computed,
        "num_reqs": len(mine),
        "num_actual_tokens": max(0, real_stop - start),
        "num_tokens_padded": rows,
        "max_query_len": max(queries, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "block_table": [parent["block_table"][i] for i in mine],
        "slot_mapping": parent["slot_mapping"][start : start + rows],
        "positions": parent["positions"][start : start + rows],
        "causal": parent["causal"],
        "is_prefilling": [parent["is_prefilling"][i] for i in mine],
        "dcp_local_seq_lens": None if layout is None else [_local(n, layout) for n in seq_lens],
        "dcp_layout": layout,
    }


def _local(seq_len: int, layout: dict[str, int]) -> int:
    """Keys of positions [0, seq_len) that live on this peer, counted one by one in whole rounds and a rest."""
    size, rank, run = layout["size"], layout["rank"], layout.get("interleave", 1)
    rounds, rest = divmod(seq_len, size * run)
    return rounds * run + sum(1 for position in range(rest) if position // run == rank)


def _judge(record: Record, parent: _Plan, ubatches: list[_Plan], points: Any, found: Findings) -> None:
    _judge_lengths(record, parent, found)
    bounds = _bounds(parent, ubatches, points)
    for index, ubatch in enumerate(ubatches):
        start, stop = bounds[index], bounds[index + 1]
        is_last = index == len(ubatches) - 1
        rows, requests_stop = stop - start, None
        if is_last:
            unpadded = max(0, parent["num_actual_tokens"] - start)
            rows = unpadded if ubatch.get("num_tokens_padded") == unpadded else rows
            requests_stop = parent["num_reqs"] if ubatch.get("num_reqs") != _real_requests(parent, start) else None
        want = expected(parent, start, stop, rows=rows, requests_stop=requests_stop)
        unknown = (parent.keys() | ubatch.keys()) - want.keys()
        if unknown:
            raise UsageError.of(
                "every metadata field has a rule here",
                fix="add it to dbo.check.metadata_slice",
                unknown=sorted(unknown),
            )
        for name, value in want.items():
            found.checked += 1
            if name not in ubatch and (value is None or name not in parent):
                continue
            if ubatch.get(name, "(missing)") != value:
                found.violate(
                    f"{name} of ubatch {index} (rank {record.rank}, step {record.step}, tokens {start} to {stop}) is "
                    f"{ubatch.get(name, '(missing)')}, its parent implies {value}",
                    record,
                    ubatch=index,
                )


def _judge_lengths(record: Record, batch: _Plan, found: Findings) -> None:
    """Fields with a value a token have one for every row that runs, before anything is cut."""
    for name in ("slot_mapping", "positions"):
        found.checked += 1
        if len(batch[name]) != batch["num_tokens_padded"]:
            found.violate(
                f"{name} of the batch (rank {record.rank}, step {record.step}) has {len(batch[name])} entries for "
                f"{batch['num_tokens_padded']} token rows: its slices are short or empty",
                record,
            )


def _bounds(parent: _Plan, ubatches: list[_Plan], points: Any) -> list[int]:
    """Token bounds of the slices: the decided split points, or where the slices' own rows put them."""
    total = parent["num_tokens_padded"]
    if len(points) == len(ubatches) - 1:
        return [0, *points, total]
    bounds = [0]
    for ubatch in ubatches[:-1]:
        bounds.append(bounds[-1] + ubatch["num_tokens_padded"])
    return [*bounds, total]


def _real_requests(parent: _Plan, start: int) -> int:
    loc, real = parent["query_start_loc"], parent["num_actual_tokens"]
    return sum(1 for i in range(parent["num_reqs"]) if loc[i] < real and loc[i + 1] > start)
