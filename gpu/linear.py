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
from dbo.trace import Record, Trace

CONSUMERS: dict[str, tuple[str, ...]] = {
    "A0": ("A1",),
    "A1": ("D.send", "S"),
    "D.send": ("D.recv", "MLP"),
    "D.recv": ("MLP",),
    "MLP": ("C.send",),
    "C.send": ("C.recv",),
    "C.recv": ("copy",),
}
"""Who uses what a point computes, within one layer of one ubatch."""

CLOCK_SLACK_US = 2.0
"""Two events on one device are recorded with this precision; between two streams nothing finer can be told."""

_MARKERS = frozenset(("record", "wait", "collective"))


@dataclass(frozen=True, kw_only=True)
class Linearity:
    """What was found.

    Attributes:
        checked: pairs of points, events and edges that were looked at.
        problems: sentences, the first of each kind.
    """

    checked: int
    problems: tuple[str, ...] = ()


def linearity(trace: Trace) -> Linearity:
    """Judge a device trace."""
    happens = HappensBefore(trace)
    checked, problems = 0, []
    for found in (_unordered(trace, happens), _late_events(trace, happens), _against_time(trace)):
        first: str | None = None
        for sentence in found:
            checked += 1
            first = first or sentence
        if first:
            problems.append(first)
    return Linearity(checked=checked, problems=tuple(problems))


def _unordered(trace: Trace, happens: HappensBefore) -> Iterator[str]:
    """For each producer and consumer: "" when streams and events order them, else the missing edge."""
    visits: dict[tuple[int, int, int, int], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in trace.records:
        if record.on_device and record.kind not in _MARKERS and record.ubatch >= 0 and record.point:
            visits[record.rank, record.step, record.layer, record.ubatch][record.point].append(record)
    device = HappensBefore(device_order(trace))
    for place, points in visits.items():
        for producer, consumers in CONSUMERS.items():
            for consumer in consumers:
                if producer in points and consumer in points:
                    a, b = points[producer][-1], points[consumer][0]
                    if device.ordered(a.id, b.id):
                        yield ""
                    else:
                        where = "rank {} step {} layer {} ubatch {}".format(*place)
                        yield f"{where}: {consumer} is not ordered after {producer}; {happens.missing_edge(a.id, b.id)}"


def device_order(trace: Trace) -> Trace:
    """The trace with the edges that a device keeps: streams, events, meetings, and host waits for the device.

    That a host launches one thing after another orders nothing on two streams.
    """
    kinds = {record.id: record for record in trace.records}

    def kept(record: Record) -> tuple[int, ...]:
        if not record.on_device:
            return record.after
        return tuple(id for id in record.after if kinds[id].on_device or kinds[id].kind == "meet")

    records = [
        Record(r.id, r.rank, r.line, r.kind, r.name, r.t_us, r.dur_us, r.step, r.layer, r.ubatch, r.point, kept(r))
        for r in trace.records
    ]
    return Trace(meta=trace.meta, records=records)


def _late_events(trace: Trace, happens: HappensBefore) -> Iterator[str]:
    """For each event that another stream waits for: whether the last work before it is the recorder's own."""
    for wait in trace.of_kind("wait"):
        if wait.ubatch < 0:
            continue
        marker = next((happens.record(id) for id in wait.after if happens.record(id).kind == "record"), None)
        if marker is None or marker.rank != wait.rank or marker.line == wait.line:
            continue
        work = happens.previous_on_line(marker.id)
        while work is not None and work.kind in _MARKERS:
            work = happens.previous_on_line(work.id)
        if work is None or work.ubatch < 0 or work.ubatch == marker.ubatch or work.step != marker.step:
            yield ""
        else:
            where = f"rank {wait.rank} step {wait.step} layer {wait.layer} ubatch {wait.ubatch}"
            yield (
                f"{where}: {wait.point or wait.name} waits for {work.point} of ubatch {work.ubatch} too, since event "
                f"{marker.name} was recorded after the baton had been passed"
            )


def _against_time(trace: Trace) -> Iterator[str]:
    """For each edge between two pieces of device work of one rank: whether the measured times agree with it."""
    timed = {r.id: r for r in trace.records if r.on_device and r.kind not in _MARKERS and r.dur_us > 0}
    for record in timed.values():
        for id in record.after:
            before = timed.get(id)
            if before is None or before.rank != record.rank:
                continue
            late_us = before.end_us - record.t_us
            if late_us <= CLOCK_SLACK_US:
                yield ""
            else:
                yield f"{record.name} (#{record.id}) starts {late_us:.1f} us before {before.name} (#{id}) has ended"
