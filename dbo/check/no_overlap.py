"""no-overlap: right answers, nothing hidden.

Four witnesses. An operation on the compute stream where the schedule has the comm stream. A communication that starts
later than its own producer's end, because the last thing it waited for is the other ubatch's compute (its event was
recorded after the yield), or the mirror image: compute that waits for the other ubatch's communication. A hidden share far
below what the issue order allows.
And steps that run without the graph that every rank wants (`dbo.check.ladder`).
"""

from __future__ import annotations

from typing import NamedTuple

from dbo.check import ladder, overlap
from dbo.check.happens import HappensBefore
from dbo.check.hooks import failed_steps
from dbo.check.ladder import judge_ladder
from dbo.check.overlap import is_communication, measure, split_steps
from dbo.check.violation import Findings
from dbo.schedule import parse_schedule
from dbo.trace import Record, Trace, kinds
from dbo.trace.accesses import any_overlap

ID = "no-overlap"
SENTENCE = "work waits for the other ubatch although it does not depend on it, so that nothing is hidden"
UNIT = "operations of split steps"
READS = (*overlap.READS, *ladder.READS, kinds.COLLECTIVE, kinds.HOST_WAIT, kinds.MEET, kinds.RECORD, kinds.WAIT)
NEEDS = (kinds.UBATCH_ENTER,)

FAR_BELOW = 0.5
"""A hidden share under this part of the ideal one is a fault."""

WORTH_HIDING = 0.05
"""Schedules whose ideal share is below this promise no overlap."""

_SLACK_US = 1e-3
_LAUNCH_US = 1.0
"""More than a host needs between what it waited for and the launch that follows."""

_MARKERS = frozenset((kinds.RECORD, kinds.WAIT, kinds.MEET, kinds.COLLECTIVE))


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Reports late starts by rank, ubatch and point (the first of each), else the share."""
    found = Findings(ID)
    failed = failed_steps(trace)  # cut short, so that what they hid says nothing
    split = split_steps(trace) - failed
    last: dict[tuple[int, int, int, bool], Record] = {}
    late: dict[tuple[int, int, str], list[_Late]] = {}
    travelling: list[Record] = []
    early = False
    for record in sorted(trace.records, key=lambda r: r.id):
        key = (record.rank, record.step)
        if not record.on_device or record.ubatch < 0 or key not in split or record.kind in (kinds.RECORD, kinds.WAIT):
            continue
        travels = _travels(record)
        producer = last.get((*key, record.ubatch, not travels))
        last[(*key, record.ubatch, travels)] = record
        found.checked += 1
        if producer is None:
            continue
        if travels:
            travelling.append(record)
        early = early or (travels and _is_early(record, producer))
        culprit = _waited_for(record, producer, happens)
        if culprit is not None and record.t_us - producer.end_us > _SLACK_US:
            place = (record.rank, record.ubatch, record.point or record.name)
            late.setdefault(place, []).append(_Late(record, producer, culprit))
    _judge_streams(trace, split, found)
    for cases in late.values():
        _add(cases, found)
    # Without either of these a small share is the schedule's own: exchanges queue behind each other, and a host waits
    # for counts, both of which the ideal share leaves out.
    drained = any(not r.attrs["declared"] and (r.rank, r.step) in split for r in trace.of_kind(kinds.HOST_WAIT))
    held_up = drained or any(_is_held_up(record, happens) for record in travelling)
    if held_up and not (late or early or failed):
        _judge_share(trace, happens, found)
    judge_ladder(trace, found)
    return found


def _judge_streams(trace: Trace, split: set[tuple[int, int]], found: Findings) -> None:
    """What the schedule puts on the comm stream has run there."""
    text, backend = trace.meta.get("schedule", ""), trace.meta.get("backend")
    if "\n" not in text or backend is None:
        return
    on_comm = {point.name for point in parse_schedule(text).program(backend).points if point.stream == "comm"}
    for record in sorted(trace.records, key=lambda r: r.id):
        if record.line != "compute" or record.kind in _MARKERS or (record.rank, record.step) not in split:
            continue
        if record.ubatch >= 0 and record.point in on_comm:
            found.violate(
                f"{record.name} of {record.point} of ubatch {record.ubatch} (rank {record.rank}, layer {record.layer}) runs "
                f"on the compute stream, the schedule has it on the comm stream",
                record,
            )
            return


class _Late(NamedTuple):
    """`record` could have started when `producer` ended, and waited for `culprit`."""

    record: Record
    producer: Record
    culprit: Record


def _add(cases: list[_Late], found: Findings) -> None:
    record, producer, culprit = cases[0]
    found.violate(
        f"{record.point or record.name} of ubatch {record.ubatch} (rank {record.rank}, layer {record.layer}) starts "
        f"{record.t_us - producer.end_us:.1f} us after its producer {producer.name} (#{producer.id}) has ended, since "
        f"it waits for {culprit.name} of ubatch {culprit.ubatch} (#{culprit.id}); {len(cases)} such starts: record the "
        f"event before the yield",
        record,
        producer.id,
        culprit.id,
    )


def _judge_share(trace: Trace, happens: HappensBefore, found: Findings) -> None:
    if trace.meta.get("world", "sim") != "sim":
        return  # a small eager run on devices is as fast as its host: what it hides is a benchmark's question
    overlap = measure(trace, happens=happens)
    hidden, ideal = overlap.hidden_share, overlap.ideal_share
    if hidden is not None and ideal is not None and ideal >= WORTH_HIDING and hidden < FAR_BELOW * ideal:
        found.violate(
            f"{hidden:.0%} of {overlap.comm_us:.0f} us of communication is hidden, the schedule allows {ideal:.0%}: "
            f"something keeps compute from running beside it"
        )


def _waited_for(record: Record, producer: Record, happens: HappensBefore) -> Record | None:
    """The last thing that `record` waited for, if that is another ubatch's work on the other side of the same rank.

    Followed through the producer's event, or one that `record`'s own point captured: what the queue of its own stream
    imposes, or of the other one on another point without work, is the schedule's doing.
    """
    queues = _queues(record, happens)
    current = record
    while True:
        before = happens.previous_on_line(current.id)
        sources = [happens.record(id) for id in current.after]
        if before is not None:
            sources.append(before)
        if not sources:
            return None
        current = max(sources, key=lambda r: (r.end_us, r.on_device))
        if current.rank != record.rank or current.end_us < record.t_us - _SLACK_US:
            return None
        if current.kind not in _MARKERS:
            break
        if current.line in queues:
            if current.ubatch != record.ubatch:
                return None
        elif current.ubatch == record.ubatch and current.point not in ("", producer.point, record.point):
            return None
    other_side = current.on_device and _travels(current) is not _travels(record)
    is_foreign = other_side and current.ubatch >= 0 and current.ubatch != record.ubatch
    return current if is_foreign and not any_overlap(record.reads, current.writes) else None


def _queues(record: Record, happens: HappensBefore) -> set[str]:
    """The lines in whose order `record` stands: a transfer on line "net" is in that of the stream that it was queued on."""
    if record.line != "net":
        return {record.line}
    return {record.line, *(r.line for id in record.after if (r := happens.record(id)).on_device)}


def _is_held_up(record: Record, happens: HappensBefore) -> bool:
    """Whether `record` starts later than its stream's queue, its events, its peers and its launch let it.

    A kernel that takes SMs also waits until they are free, which leaves no edge.
    """
    if "sms" in record.attrs:
        return False
    before = happens.previous_on_line(record.id)
    sources = [happens.record(id) for id in record.after] + ([before] if before is not None else [])
    return record.t_us > max((r.end_us for r in sources), default=0.0) + _LAUNCH_US


def _travels(record: Record) -> bool:
    """Communication, and what is done for it on its own stream: packing rows, summing what came."""
    return is_communication(record) or record.line == "comm"


def _is_early(record: Record, producer: Record) -> bool:
    """A communication that overtakes its own producer is a race; what it hides then means nothing."""
    return record.t_us < producer.end_us - _SLACK_US and any_overlap(record.reads, producer.writes) is not None
