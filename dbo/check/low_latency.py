"""The rules of numbered low-latency calls, a part of buffer-reuse.

A call is a send and a receive, numbered over dispatch and combine; it uses receive buffer k mod 2, and its send clears
the flags of the other one.
"""

from __future__ import annotations

from dbo.check.happens import HappensBefore
from dbo.check.hooks import failed_steps
from dbo.check.violation import Findings, need
from dbo.trace import Record, Trace, kinds
from dbo.trace.accesses import any_overlap

READS = (kinds.RECV, kinds.SEND, kinds.TRANSFER)
"""Kinds of records that this module looks at, for the detectors that use it."""


def judge_calls(trace: Trace, happens: HappensBefore, found: Findings) -> None:
    """Call k uses buffer k mod 2; its receive comes before send k + 1; its result is read before send k + 2.

    A call number that does not grow starts a new epoch: communicators restart at buffer 0 after a failed step.
    """
    failed = failed_steps(trace)
    pending: dict[int, dict[int, Record]] = {}
    last: dict[int, tuple[Record, Record | None]] = {}
    for record in sorted(trace.of_kind(kinds.SEND, kinds.RECV), key=lambda r: r.id):
        call, buffer, rank = need(record, "call"), need(record, "buffer"), record.rank
        found.checked += 1
        if buffer != call % 2:
            found.violate(f"{_call(record)} uses buffer {buffer}: call k uses buffer k mod 2", record)
        waiting = pending.setdefault(rank, {})
        if record.kind == kinds.RECV:
            waiting.pop(call, None)
            if rank in last and last[rank][0].attrs["call"] == call:
                last[rank] = (last[rank][0], record)
            continue
        before, received = last.get(rank, (None, None))
        if before is not None and call <= before.attrs["call"]:
            waiting.clear()
            received = None
        if waiting and (rank, record.step) not in failed:
            first = next(iter(waiting.values()))
            found.violate(
                f"{_call(record)} clears the flags of buffer {1 - buffer} before {_call(first)} was received "
                f"({len(waiting) + 1} calls outstanding): call {first.attrs['call']}'s receive is launched before "
                f"call {first.attrs['call'] + 1}'s send",
                record,
                first.id,
            )
            waiting.clear()
        elif received is not None and not happens.ordered(received.id, record.id):
            found.violate(f"{_call(record)} is not ordered after the receive of {_call(received)}", record, received.id)
        waiting[call] = record
        last[rank] = (record, None)


def judge_held_results(trace: Trace, found: Findings) -> None:
    """A dispatch's result is a view of its buffer, which send k + 2 fills again. (A combine copies its result out.)"""
    holds: dict[int, Record] = {}
    last_send: dict[int, Record] = {}
    told: set[int] = set()
    for record in sorted(trace.records, key=lambda r: r.id):
        if record.kind == kinds.SEND:
            last_send[record.rank] = record
        if record.kind in (kinds.RECV, kinds.TRANSFER):
            for access in record.writes if record.kind == kinds.RECV else ():
                holds[access.buffer] = record
            continue
        for access in record.reads if last_send else ():
            receive = holds.get(access.buffer)
            if receive is None or receive.attrs["op"] != "dispatch" or receive.id in told:
                continue
            send = last_send.get(receive.rank)
            if (
                send is not None
                and send.attrs["call"] >= receive.attrs["call"] + 2
                and any_overlap([access], receive.writes)
            ):
                told.add(receive.id)
                found.violate(
                    f"{record.name} (#{record.id}, ubatch {record.ubatch} of rank {record.rank}) reads the result of "
                    f"{_call(receive)} after {_call(send)} was sent: at most two results are held",
                    record,
                    receive.id,
                    send.id,
                )


def _call(record: Record) -> str:
    return f"call {record.attrs['call']} ({need(record, 'op')}, u{record.ubatch} of rank {record.rank}, #{record.id})"
