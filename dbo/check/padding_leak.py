"""padding-leak: padding rows travel to experts, or write their KV outside the null block."""

from __future__ import annotations

from typing import Any

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace

ID = "padding-leak"
SENTENCE = "padding rows take part where only real rows may"
UNIT = "dispatches and (u)batches"


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Dispatches send real rows only; slots of padding rows lie in the reserved block."""
    found = Findings(ID)
    for record in trace.records:
        if record.kind == "send" and need(record, "op") == "dispatch":
            _judge_rows(record, need(record, "rows"), need(record, "real"), found)
        elif record.kind != "send" and record.point == "D.send" and {"rows", "real"} <= record.attrs.keys():
            _judge_rows(record, record.attrs["rows"], record.attrs["real"], found)
        elif record.kind == "slices":
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
