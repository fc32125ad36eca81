"""padding-leak: padding rows are dispatched, write KV outside the null block, change real rows, or are not needed."""

from __future__ import annotations

from typing import Any

from dbo.batch.coordinate import NUM_ROWS, ROW_PADDED
from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds

ID = "padding-leak"
SENTENCE = "padding rows take part where only real rows may"
UNIT = "dispatches, (u)batches, decisions, comparisons that vary the padding"
READS = (kinds.DECIDE, kinds.NUMERIC, kinds.SEND, kinds.SLICES)
NEEDS = (kinds.SLICES,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Dispatches send real rows only; slots of padding rows lie in the reserved block.

    What padding holds changes no real row (a `numeric` record with varied="padding"); a step that is neither split nor
    a graph pads no rank beyond its own count.
    """
    found = Findings(ID)
    for record in trace.records:
        if record.kind == kinds.SEND and need(record, "op") == "dispatch":
            _judge_rows(record, need(record, "rows"), need(record, "real"), found)
        elif record.kind != kinds.SEND and record.point == "D.send" and {"rows", "real"} <= record.attrs.keys():
            _judge_rows(record, record.attrs["rows"], record.attrs["real"], found)
        elif record.kind == kinds.DECIDE:
            _judge_need(record, found)
        elif record.kind == kinds.NUMERIC and record.attrs.get("varied") == "padding":
            _judge_influence(record, found)
        elif record.kind == kinds.SLICES:
            block_size = _block_size(record, trace)
            _judge_slots(record, -1, need(record, "parent"), block_size, found)
            for index, ubatch in enumerate(need(record, "ubatches")):
                _judge_slots(record, index, ubatch, block_size, found)
    return found


def _judge_rows(record: Record, rows: int, real: int, found: Findings) -> None:
    found.checked += 1
    if rows > real:
        found.violate(
            f"ubatch {record.ubatch} of rank {record.rank} dispatches {rows} rows in layer {record.layer} (step "
            f"{record.step}) of which {real} are real: padding carries expert id -1 and stays",
            record,
        )


def _judge_need(record: Record, found: Findings) -> None:
    table, decision = record.attrs.get("table", ()), record.attrs.get("decision", {})
    if len(table) != NUM_ROWS or decision["split"] or decision["all_idle"] or decision["cudagraph_mode"] == "FULL":
        return
    found.checked += 1
    for rank, rows in enumerate(decision["num_tokens_padded"]):
        own = max(table[ROW_PADDED][rank], 1)
        if rows > own:
            found.violate(
                f"rank {rank} runs {rows} rows in step {record.step} where its own count is {own}: a step that is "
                f"neither split nor a graph needs no padding to a common size",
                record,
                rank=rank,
            )
            return


def _judge_influence(record: Record, found: Findings) -> None:
    found.checked += 1
    error, limit = float(need(record, "error")), float(need(record, "limit"))
    if not error <= limit:
        found.violate(
            f"{record.name} of rank {record.rank} changes by {error:.3g} when only padding rows change "
            f"({need(record, 'reference')}): padding is selected away, not multiplied by 0",
            record,
        )


def _judge_slots(record: Record, index: int, batch: dict[str, Any], block_size: int, found: Findings) -> None:
    found.checked += 1
    real, slots = batch["num_actual_tokens"], batch["slot_mapping"]
    for row, slot in enumerate(slots[real:], start=real):
        if slot >= block_size:
            who = f"ubatch {index} of rank {record.rank}" if index >= 0 else f"the batch of rank {record.rank}"
            found.violate(
                f"padding row {row} of {who} writes KV slot {slot} (block {slot // block_size}) in step {record.step}: "
                f"slot_mapping of rows {real} to {len(slots) - 1} belongs in the null block",
                record,
                ubatch=index,
            )
            return


def _block_size(record: Record, trace: Trace) -> int:
    """Slots of the null block; only its first one is certain where nothing says how large a block is."""
    config = trace.meta.get("config") or {}
    return int(record.attrs.get("block_size") or config.get("block_size") or trace.meta.get("block_size") or 1)
