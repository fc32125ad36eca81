"""One trace file for two readers: Chrome's trace viewer or Perfetto, and this project.

The file is a JSON object. `traceEvents` is what a viewer draws: a process a rank, a thread a line, a slice a record, an
arrow where one line waits for another (batons, events, collectives). `dbo` is `Trace.to_json()`, which no viewer minds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dbo.config.paths import MIB, read_bounded
from dbo.errors import UsageError
from dbo.trace import Record, Trace

_HOST_US = 0.1
"""How wide a host record without a duration is drawn."""

_ARROWS = {
    "resume": "baton",
    "ubatch.enter": "baton",
    "wait": "event",
    "exchange": "collective",
    "recv": "collective",
    "collective": "collective",
    "host.wait": "host wait",
}

_LINE_ORDER = {"main": 0, "compute": 100, "comm": 101, "net": 102}

_Event = dict[str, Any]


def write_trace(trace: Trace, path: str | Path) -> Path:
    """Write `trace` for both readers; the bytes depend on nothing but the trace. Returns the path.

    Raises:
        OSError: the file cannot be written. `refuse_unwritable` tells most of that before there is a trace.
    """
    path = Path(path)
    data = {"traceEvents": list(trace_events(trace)), "displayTimeUnit": "ns", "dbo": trace.to_json()}
    path.write_text(json.dumps(data, sort_keys=True, separators=(",", ":")), encoding="utf-8")
    return path


def refuse_unwritable(path: Path, flag: str) -> None:
    """Refuse what `--flag` names, where it is known before the run that no file can be written there.

    Raises:
        UsageError: a folder, a file in none, or one that this process may not make or change.
    """
    named = {flag: path}
    if os.path.isdir(path):
        raise UsageError.of(f"--{flag} names a file, not a folder", fix="name a file", **named)
    if not os.path.isdir(path.absolute().parent):
        raise UsageError.of(f"--{flag} names a file in a folder that exists", fix="create the folder", **named)
    there = os.path.lexists(path)
    if there and not os.path.isfile(path):
        return  # a device or a pipe: opening it to ask would already be heard at its other end
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
        if not there:
            path.unlink()
    except OSError as error:
        rule = f"--{flag} names a file that can be written"
        raise UsageError.of(rule, fix="name another file", **named, why=error.strerror) from error


def read_trace(path: str | Path) -> Trace:
    """Read what `write_trace` wrote.

    Raises:
        UsageError: no such file, not JSON, no trace of this project, or one of another schema.
    """
    path = Path(path)
    try:
        data = json.loads(read_bounded(path, limit_bytes=2048 * MIB, what="a trace").decode())
    except OSError as error:
        raise UsageError.of(
            "a trace file can be read", fix="name an existing file", path=path, why=error.strerror
        ) from error
    except ValueError as error:
        raise UsageError.of("a trace file is JSON", fix="write it again", path=path, why=error) from error
    if not isinstance(data, dict) or not isinstance(data.get("dbo"), dict):
        rule = "a trace file has the key dbo, or is a profile of torch.profiler"
        raise UsageError.of(rule, fix="write it with dbo check --trace", path=path)
    try:
        return Trace.from_json(data["dbo"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError.of("a trace file holds a whole trace", fix="record it again", path=path, why=error) from error


def trace_events(trace: Trace) -> Iterator[_Event]:
    """Chrome trace events: names of processes and threads, slices in trace order, arrows."""
    threads = _threads(trace)
    for (rank, line), thread in threads.items():
        yield _name("thread_name", rank, thread, line)
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
    for rank in sorted({rank for rank, _ in threads}):
        yield _name("process_name", rank, 0, f"rank {rank}" if rank >= 0 else "meetings")
    records = {record.id: record for record in trace.records}
    arrow = 0
    for record in trace.records:
        yield _slice(record, threads[record.rank, record.line])
        category = _ARROWS.get(record.kind)
        for id in record.after if category else ():
            source = records[id]
            if (source.rank, source.line) == (record.rank, record.line) or _is_issue(source, record):
                continue
            arrow += 1
            start, end = threads[source.rank, source.line], threads[record.rank, record.line]
            shared = {"cat": category, "name": category, "id": arrow}
            yield {**shared, "ph": "s", "pid": source.rank, "tid": start, "ts": _inside(source)}
            yield {**shared, "ph": "f", "bp": "e", "pid": record.rank, "tid": end, "ts": round(record.t_us, 4)}


def _threads(trace: Trace) -> dict[tuple[int, str], int]:
    """A thread number for every line: main, the ubatches, the streams."""
    lines = {(record.rank, record.line) for record in trace.records}
    numbers: dict[tuple[int, str], int] = {}
    for rank, line in sorted(lines, key=lambda key: (key[0], _order(key[1]), key[1])):
        taken = sum(1 for other, _ in numbers if other == rank)
        numbers[rank, line] = taken + 1
    return numbers


def _order(line: str) -> int:
    if line[:1] == "u" and line[1:].isdigit():
        return 1 + int(line[1:])
    return _LINE_ORDER.get(line, 99)


def _slice(record: Record, thread: int) -> _Event:
    spot = {"id": record.id, "step": record.step, "layer": record.layer, "ubatch": record.ubatch, "point": record.point}
    args = {name: value for name, value in spot.items() if value not in (-1, "") or name == "id"}
    if record.src:
        args["src"] = record.src
    small = {name: value for name, value in record.attrs.items() if isinstance(value, (str, int, float, bool))}
    return {
        "ph": "X",
        "name": _title(record),
        "cat": record.kind,
        "pid": record.rank,
        "tid": thread,
        "ts": round(record.t_us, 4),
        "dur": round(record.dur_us or (0.0 if record.on_device else _HOST_US), 4),
        "args": {**small, **args},
    }


def _title(record: Record) -> str:
    who = f" u{record.ubatch}" if record.ubatch >= 0 else ""
    return f"{record.name or record.point or record.kind}{who}"


def _inside(record: Record) -> float:
    """A time at which the record's slice is open, so that a viewer binds the arrow to it."""
    return round(record.t_us + max(0.0, record.dur_us - 1e-3), 4)


def _is_issue(source: Record, record: Record) -> bool:
    """The edge from the host record that launched a device record: true of every one, so not drawn."""
    return record.on_device and not source.on_device and source.rank == record.rank


def _name(kind: str, rank: int, thread: int, text: str) -> _Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": text}}
