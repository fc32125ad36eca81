"""Is a device's trace a linearisation of the partial order that the schedule promises? No torch.

Two questions, for every layer of every ubatch. *Ordered*: is each point ordered before those that use what it
computes, by streams and events alone, so that it would be in every execution? *Late*: does an exchange wait for more
than its own ubatch, because its event was recorded after the baton had been passed? And one for the whole trace: do
the measured times agree with its edges? The first bad edge of each kind is the message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from dbo.check.happens import HappensBefore
from dbo.trace import Record, Trace, kinds

SIDE = "side"
"""Shared experts on the side stream, in the place of a point: from A1 of a layer to the A0 of the next one."""

CONSUMERS: dict[str, tuple[str, ...]] = {
    "A0": ("A1",),
    "A1": ("D.send", "S", SIDE),
    "D.send": ("D.recv", "MLP"),
    "D.recv": ("MLP",),
    "MLP": ("C.send",),
    "C.send": ("C.recv",),
    "C.recv": ("copy",),
}
"""Who uses what a point computes, within one layer of one ubatch."""

CLOCK_SLACK_US = 2.0
"""Two events on one device are recorded with this precision; between two streams nothing finer can be told."""

_MARKERS = frozenset((kinds.RECORD, kinds.WAIT, kinds.COLLECTIVE))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A bad edge.

    Attributes:
        kind: "unordered" | "late" | "time".
        rank, step, layer, ubatch, point: of the work at the edge's later end.
        text: one sentence.
    """

    kind: str
    text: str
    rank: int
    step: int
    layer: int
    ubatch: int
    point: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Linearity:
    """What was found.

    Attributes:
        checked: pairs of points, events and edges that were looked at.
        problems: the first of each kind.
    """

    checked: int
    problems: tuple[Problem, ...] = ()


def linearity(trace: Trace) -> Linearity:
    """Judge a device trace."""
    happens = HappensBefore(trace)
    checked, problems = 0, []
    for found in (_unordered(trace, happens), _late_events(trace, happens), _against_time(trace)):
        first: Problem | None = None
        for problem in found:
            checked += 1
            first = first or problem
        if first is not None:
            problems.append(first)
    return Linearity(checked=checked, problems=tuple(problems))


def _unordered(trace: Trace, happens: HappensBefore) -> Iterator[Problem | None]:
    """For each producer and consumer: None when streams and events order them, else the missing edge."""
    visits: dict[tuple[int, int, int, int], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in trace.records:
        if record.on_device and record.kind not in _MARKERS and record.ubatch >= 0 and record.point:
            point = SIDE if record.line == SIDE else record.point
            visits[record.rank, record.step, record.layer, record.ubatch][point].append(record)
    device = HappensBefore(device_order(trace))
    for place, points in visits.items():
        rank, step, layer, ubatch = place
        following = visits.get((rank, step, layer + 1, ubatch), {})
        pairs = [(p, c, points) for p, consumers in CONSUMERS.items() for c in consumers] + [(SIDE, "A0", following)]
        for producer, consumer, there in pairs:
            if producer in points and consumer in there:
                a, b = points[producer][-1], there[consumer][0]
                if device.ordered(a.id, b.id):
                    yield None
                else:
                    missing = happens.missing_edge(a.id, b.id)
                    yield _problem(
                        "unordered", b, f"{consumer} is not ordered after {producer}; {missing}", point=consumer
                    )


def device_order(trace: Trace) -> Trace:
    """The trace with the edges that a device keeps: streams, events, meetings, and host waits for the device.

    That a host launches one thing after another orders nothing on two streams.
    """
    by_id = {record.id: record for record in trace.records}

    def kept(record: Record) -> tuple[int, ...]:
        if not record.on_device:
            return record.after
        return tuple(id for id in record.after if by_id[id].on_device or by_id[id].kind == kinds.MEET)

    records = [
        Record(r.id, r.rank, r.line, r.kind, r.name, r.t_us, r.dur_us, r.step, r.layer, r.ubatch, r.point, kept(r))
        for r in trace.records
    ]
    return Trace(meta=trace.meta, records=records)


def _late_events(trace: Trace, happens: HappensBefore) -> Iterator[Problem | None]:
    """For each event that another stream waits for: whether the last work before it is the recorder's own."""
    for wait in trace.of_kind(kinds.WAIT):
        if wait.ubatch < 0:
            continue
        marker = next((happens.record(id) for id in wait.after if happens.record(id).kind == kinds.RECORD), None)
        if marker is None or marker.rank != wait.rank or marker.line == wait.line:
            continue
        work = happens.previous_on_line(marker.id)
        while work is not None and work.kind in _MARKERS:
            work = happens.previous_on_line(work.id)
        if work is None or work.ubatch < 0 or work.ubatch == marker.ubatch or work.step != marker.step:
            yield None
        else:
            yield _problem(
                "late",
                wait,
                f"{wait.point or wait.name} waits for {work.point} of ubatch {work.ubatch} too, since event "
                f"{marker.name} was recorded after the baton had been passed",
            )


def _problem(kind: str, record: Record, what: str, *, point: str = "") -> Problem:
    where = f"rank {record.rank} step {record.step} layer {record.layer} ubatch {record.ubatch}"
    return Problem(
        kind=kind,
        rank=record.rank,
        step=record.step,
        layer=record.layer,
        ubatch=record.ubatch,
        point=point or record.point,
        text=f"{where}: {what}",
    )


def _against_time(trace: Trace) -> Iterator[Problem | None]:
    """For each edge between two pieces of device work of one rank: whether the measured times agree with it."""
    timed = {r.id: r for r in trace.records if r.on_device and r.kind not in _MARKERS and r.dur_us > 0}
    for record in timed.values():
        for id in record.after:
            before = timed.get(id)
            if before is None or before.rank != record.rank:
                continue
            late_us = before.end_us - record.t_us
            if late_us <= CLOCK_SLACK_US:
                yield None
            else:
                what = f"{record.name} (#{record.id}) starts {late_us:.1f} us before {before.name} (#{id}) has ended"
                yield _problem("time", record, what)
