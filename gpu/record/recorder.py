"""One rank's trace, and its rows on the board, written while its program runs.

Device work is recorded by *visits*: one record for a stretch of work that one host line launches at one point, on one
stream. A visit begins when the line reaches a point where the model computes, or with the first launch at a point that
may have none (some backends launch nothing there); it ends with the next point, yield, event or exchange.

`after` names records of this rank. A number below 0 stands for a meeting of all ranks (`meet_reference`); `gpu.launch.merge`
puts the real one in its place.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dbo.trace import DEVICE_LINES, Access, BufferInfo, Record, kinds
from gpu.watch import flight_recorder as board

Tags = tuple[int, int, int, str]
Stamp = Any
"""When something happened: microseconds on the host's clock, or a device event that knows."""

QUIET_POINTS = frozenset(("", "D.send", "D.recv", "C.send", "C.recv", "S", "copy"))
"""Points where the model itself may launch nothing: the backend, or who runs the shared experts, says that it does."""

_UNKEPT = Record(0, -1, "", "", "")
"""Stands for device work of which no record is kept."""

_ENDS_A_VISIT = frozenset((kinds.YIELD, kinds.UBATCH_EXIT, kinds.STEP_END, kinds.ERROR, kinds.JOIN))


@dataclass(slots=True)
class Time:
    """When a device record began and ended on its stream."""

    stream: Any
    start: Stamp
    stop: Stamp | None = None


@dataclass(slots=True)
class Captured:
    """Device work of one captured graph, to be recorded with each replay.

    Attributes:
        first: by communicator, the number of the exchange that came first.
        has_clock: times are written by the graph itself; without, its work leaves no records.
        later: integers that the graph computes for attributes.
    """

    first: dict[str, int]
    has_clock: bool
    records: list[Record] = field(default_factory=list)
    times: dict[int, Time] = field(default_factory=dict)
    later: list[tuple[Record, str, Any]] = field(default_factory=list)


class Replayed(NamedTuple):
    """A record of a replay, and the captured one that it stands for."""

    record: Record
    captured: Record


@dataclass(eq=False)
class HostTask:
    """One host line: where it stands, and what its next record comes after.

    Attributes:
        line: "main", "u0" and so on. row: its place on the board; lines beyond the last one share that.
        stream: current on it.
        tags: step, layer, ubatch and point whose work it does.
        last: id of its last record. after: of others that its next record comes after, too.
        visit: the stretch of device work that it is launching.
        real_tokens: of the ubatch whose work it does.
        yields, played: of that ubatch, and what the schedule has passed.
        range: of a profiler, open until its next point.
        own: (layer, point) where it stands in its own program, also while it runs another ubatch's hook.
    """

    line: str
    stream: Any
    tags: Tags = (-1, -1, -1, "")
    last: int = -1
    after: list[int] = field(default_factory=list)
    visit: Record | None = None
    real_tokens: int = 0
    yields: int = 0
    played: int = 0
    range: Any = None
    own: tuple[int, str] = (-1, "")
    row: int = -1

    def __post_init__(self) -> None:
        known = board.LINES.index(self.line) if self.line in board.LINES else len(board.LINES)
        self.row = min(known, len(board.LINES) - 1)


class RankRecorder:
    """The records of one rank. Every host line calls it from its own thread.

    Args:
        rank: whose.
        rows: the rank's part of the board; None: nobody watches.
        place: where the calling line stands in its schedule, (yields, played_yields).
        stamp: the time on a stream's end (host microseconds where work runs at once).
        keep: keep records; without, only the board is written.
    """

    def __init__(
        self,
        rank: int,
        rows: board.RankBoard | None,
        *,
        place: Callable[[], tuple[int, int]],
        stamp: Callable[[Any], Stamp],
        keep: bool = True,
    ) -> None:
        self.rank = rank
        self.rows = rows
        self.records: list[Record] = []
        self.capture: Captured | None = None
        self._times: dict[int, Time] = {}
        self._later: list[tuple[Record, str, Any]] = []
        self._tails: dict[str, int] = {}
        self.buffers: dict[int, BufferInfo] = {}
        self.meets: list[tuple[str, int]] = []
        self._place = place
        self._stamp = stamp
        self._keep = keep
        self._ids = itertools.count()
        self._local = threading.local()

    @property
    def capturing(self) -> bool:
        """Device work is being captured, not done."""
        return self.capture is not None

    @property
    def keeps(self) -> bool:
        """Device work is recorded now: not without a trace, and not in a capture that has no clock."""
        return self._keep and (self.capture is None or self.capture.has_clock)

    # -- host lines -------------------------------------------------------------------------------------------------

    @property
    def task(self) -> HostTask:
        """The calling host line."""
        task: HostTask | None = getattr(self._local, "task", None)
        if task is None:
            raise RuntimeError("a world is used by its rank's main thread and its workers")
        return task

    def start_line(self, line: str, stream: Any) -> HostTask:
        """The calling thread is host line `line`."""
        self._local.task = HostTask(line, stream)
        return self._local.task

    def host(self, kind: str, name: str = "", **attrs: Any) -> None:
        """Write a record on the calling line. `dbo.contract.world.Recorder`."""
        self.on_line(kind, name, attrs)

    def on_line(self, kind: str, name: str, attrs: dict[str, Any]) -> int:
        """As `host`; returns the record's id."""
        task = self.task
        if kind in _ENDS_A_VISIT:
            self.end_visit(task)
            if kind == kinds.YIELD:
                self.notice(task)
        elif kind == kinds.STEP_BEGIN and self.rows is not None:
            self.rows.mark("stepping")
        if not self._keep:
            return -1
        step, layer, ubatch, point = task.tags
        record = Record(
            next(self._ids),
            self.rank,
            task.line,
            kind,
            name,
            t_us=now_us(),
            step=step,
            layer=layer,
            ubatch=ubatch,
            point=point,
            after=tuple(task.after),
            attrs=attrs,
        )
        task.after = []
        task.last = record.id
        self.records.append(record)
        return record.id

    def notice(self, task: HostTask, *, at_point: bool = False) -> None:
        """Write the line's row; at a point, where the counts must be equal, also what is wrong with its yields."""
        if self.rows is None:
            return
        task.yields, task.played = self._place() if task.tags[2] >= 0 else (0, 0)
        if at_point:
            task.own = task.tags[1], task.tags[3]
        self.rows.write(task.row, task.tags, task.yields, task.played, own=task.own)
        if at_point and task.yields != task.played:
            text = f"yielded {task.yields} times where the schedule had passed {task.played} yields"
            self.rows.find(task.tags, "unequal-yields", text)

    def waits(self, state: int, what: str, group: str = "", index: int = -1) -> None:
        """The calling line is about to block."""
        if self.rows is not None:
            task, wait = self.task, board.LineWait(state=state, what=what, group=group, index=index)
            self.rows.write(task.row, task.tags, task.yields, task.played, wait, task.own)

    def sleeps(self, state: int) -> None:
        """The calling line is about to wait for another one of its rank."""
        if self.rows is not None:
            self.rows.set_line_state(self.task.row, state)

    def switch_to(self, task: HostTask) -> None:
        """The calling thread goes on as another line."""
        self._local.task = task

    def goes_on(self) -> None:
        """The calling line blocks no longer."""
        if self.rows is not None:
            self.rows.goes_on(self.task.row)

    def came(self, group: str, index: int, op: str) -> None:
        """The calling line comes to exchange `index` of `group`."""
        if self.rows is not None and not self.capturing:
            self.rows.log(group, index, self.task.tags, op)

    # -- device work ------------------------------------------------------------------------------------------------

    def launches(self) -> None:
        """The calling line is about to launch work at its point: a visit begins, unless one is open."""
        task = self.task
        if task.visit is None and task.tags[3] and self.keeps:
            task.visit = self._device(kinds.OP, task.tags[3], task)

    def end_visit(self, task: HostTask) -> None:
        """What the line has launched at its point is complete."""
        visit, task.visit = task.visit, None
        if visit is not None and self.keeps:
            self._append(visit)
            self._end(visit)

    def device(
        self,
        kind: str,
        name: str,
        *,
        attrs: dict[str, Any],
        after: tuple[int, ...] = (),
        stream: Any = None,
        writes: tuple[Access, ...] = (),
    ) -> Record:
        """A record on a stream's line (default: the current one); it takes no time unless `timed` says so."""
        task = self.task
        self.end_visit(task)
        record = self._device(kind, name, task, attrs, after, stream)
        record.writes = writes
        if self.keeps:
            self._append(record)
        return record

    def timed_device(
        self,
        kind: str,
        name: str,
        *,
        attrs: dict[str, Any],
        after: tuple[int, ...] = (),
        writes: tuple[Access, ...] = (),
    ) -> Record:
        """A record for what the line launches next at its point; it ends as a visit does."""
        task = self.task
        self.end_visit(task)
        task.visit = self._device(kind, name, task, attrs, after)
        task.visit.writes = writes
        return task.visit

    def later(self, record: Record, name: str, value: Any) -> None:
        """`attrs[name]` of `record` is an integer that the device still has to compute."""
        (self._later if self.capture is None else self.capture.later).append((record, name, value))

    def timed(self, record: Record) -> None:
        """What `record` stands for has been launched in full."""
        self._end(record)

    def meet_reference(self, group: str, index: int) -> int:
        """Stands in `after` for the meeting of all ranks in exchange `index` of `group`; for nothing without records."""
        if not self._keep:
            return -1
        self.meets.append((group, index))
        return -len(self.meets)

    def has_met(self, group: str, index: int) -> None:
        """The calling line has met all ranks in that exchange: its next record comes after that."""
        if self._keep:
            self.task.after.append(self.meet_reference(group, index))

    def resolve(self, to_us: Callable[[Stamp], float]) -> None:
        """Fill in the times of device records so far; the device must have come to their ends."""
        for record, name, value in self._later:
            record.attrs[name] = int(value)
        self._later.clear()
        for record in self.records:
            time_of = self._times.pop(record.id, None)
            if time_of is not None:
                record.t_us = to_us(time_of.start)
                record.dur_us = 0.0 if time_of.stop is None else max(0.0, to_us(time_of.stop) - record.t_us)

    def new_buffer(self, name: str, nbytes: int) -> int:
        """Register a storage; its id appears in accesses."""
        number = len(self.buffers)
        self.buffers[number] = BufferInfo(number, self.rank, name, nbytes)
        return number

    def whole(self, buffer: int) -> Access:
        """All bytes of a buffer."""
        return Access.interval(buffer, 0, self.buffers[buffer].nbytes)

    def after_all_of(self, stream: Any) -> None:
        """The calling line has waited for everything on `stream`: its next record comes after that."""
        tail = self._tails.get(stream.name, -1)
        if tail >= 0:
            self.task.after.append(tail)

    # -- graphs -----------------------------------------------------------------------------------------------------

    def begin_capture(self, counters: Mapping[str, int], *, has_clock: bool) -> Captured:
        """From now on device work is captured: kept apart, to be recorded with each replay."""
        self.end_visit(self.task)
        self.capture = Captured(first=dict(counters), has_clock=has_clock)
        return self.capture

    def end_capture(self) -> None:
        self.end_visit(self.task)
        self.capture = None

    def replay(self, captured: Captured, counters: Mapping[str, int], real_tokens: Sequence[int]) -> list[Replayed]:
        """Record captured work as done once more, by the calling line, now; its times are still to be filled in."""
        task, step = self.task, self.task.tags[0]
        ids = {old.id: next(self._ids) for old in sorted(captured.records, key=lambda r: r.id)}
        done = []
        for old in captured.records:
            attrs = dict(old.attrs)
            shift = counters.get(attrs.get("group", "low_latency"), 0) - captured.first.get(
                attrs.get("group", "low_latency"), 0
            )
            for name in ("index", "call"):
                if name in attrs:
                    attrs[name] += shift
            if "tag" in attrs:
                attrs["tag"] = [step, *attrs["tag"][1:]]
            if "real" in attrs and 0 <= old.ubatch < len(real_tokens):
                attrs["real"] = real_tokens[old.ubatch]
            elif "real" in attrs and real_tokens:
                attrs["real"] = real_tokens[0]
            after = [ids[id] for id in old.after if id in ids]
            after += [self._meet_again(id, captured, counters) for id in old.after if id < 0]
            new = Record(
                ids[old.id],
                self.rank,
                old.line,
                old.kind,
                old.name,
                step=step,
                layer=old.layer,
                ubatch=old.ubatch,
                point=old.point,
                after=(task.last, *after) if task.last >= 0 else tuple(after),
                writes=old.writes,
                attrs=attrs,
            )
            self._append(new)
            done.append(Replayed(new, old))
        return done

    def _meet_again(self, reference: int, captured: Captured, counters: Mapping[str, int]) -> int:
        group, index = self.meets[-1 - reference]
        return self.meet_reference(group, index - captured.first.get(group, 0) + counters.get(group, 0))

    def _append(self, record: Record) -> None:
        if self.capture is not None and record.line in DEVICE_LINES:
            self.capture.records.append(record)
            return
        self.records.append(record)
        self._tails[record.line] = record.id

    def _device(
        self,
        kind: str,
        name: str,
        task: HostTask,
        attrs: dict[str, Any] | None = None,
        after: tuple[int, ...] = (),
        stream: Any = None,
    ) -> Record:
        if not self.keeps:
            return _UNKEPT
        stream = stream or task.stream
        step, layer, ubatch, point = task.tags
        issuer = (task.last,) if task.last >= 0 else ()
        record = Record(
            next(self._ids),
            self.rank,
            stream.name,
            kind,
            name,
            step=step,
            layer=layer,
            ubatch=ubatch,
            point=point,
            after=(*issuer, *task.after, *after),
            attrs=attrs or {},
        )
        times = self._times if self.capture is None else self.capture.times
        times[record.id] = Time(stream, self._stamp(stream))
        return record

    def _end(self, record: Record) -> None:
        if self.keeps:
            time_of = (self._times if self.capture is None else self.capture.times)[record.id]
            time_of.stop = self._stamp(time_of.stream)


def now_us() -> float:
    """Microseconds on a clock that all processes of this machine share."""
    return time.perf_counter_ns() / 1000
