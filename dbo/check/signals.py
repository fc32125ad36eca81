"""Flags between ranks (`signal.set`, `signal.wait`, `signal.clear`), a part of buffer-reuse.

A cell is one overwritable word. A set carries the round that it announces; a wait says which round it waits for and
which it found. Cells are atomic, so the order of set and clear is no race of bytes; it is a lost signal.
"""

from __future__ import annotations

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace


def judge_signals(trace: Trace, happens: HappensBefore, found: Findings) -> None:
    """A clear is ordered before a set, or after the wait that took it; a wait is satisfied by its own round."""
    sets: dict[str, list[Record]] = {}
    waits: dict[str, list[Record]] = {}
    for record in trace.of_kind("signal.set", "signal.wait"):
        by_cell = sets if record.kind == "signal.set" else waits
        by_cell.setdefault(str(need(record, "cell")), []).append(record)
    for records in waits.values():
        for wait in records:
            found.checked += 1
            if need(wait, "found") != need(wait, "round"):
                found.violate(
                    f"{_who(wait)} waits for round {wait.attrs['round']} in cell {wait.attrs['cell']} and is satisfied "
                    f"by the signal of round {wait.attrs['found']}",
                    wait,
                )
    for clear in trace.of_kind("signal.clear"):
        cell = str(need(clear, "cell"))
        for signal in sets.get(cell, []):
            found.checked += 1
            taken = any(
                wait.attrs["found"] == signal.attrs["round"] and happens.ordered(wait.id, clear.id)
                for wait in waits.get(cell, [])
            )
            if not (taken or happens.ordered(clear.id, signal.id)):
                found.violate(
                    f"{_who(clear)} clears cell {cell}, and nothing puts that before {_who(signal)} sets it (round "
                    f"{need(signal, 'round')}): the signal can be wiped, and whoever waits for it waits for ever",
                    clear,
                    signal.id,
                )


def _who(record: Record) -> str:
    ubatch = f" u{record.ubatch}" if record.ubatch >= 0 else ""
    return f"rank {record.rank}{ubatch} (#{record.id})"
