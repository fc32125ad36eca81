"""One rank's program, read from the trace of a run of two ranks.

Rank 0's device records become operations, meetings of both ranks become meetings of all, and bytes that the ranks write on
each other become windows. Ubatches run one at a time, so what any host line does after a wait for a device comes after that
wait: the waits form one line, and whatever is launched after one follows it.
"""

from __future__ import annotations

from dbo.errors import DBOError
from dbo.trace import Access, Record, Trace, kinds
from sim.compiled.program import Array, DeviceOp, Meeting

HOST = "main"
_KEPT = ("event", "group", "index", "op", "call", "buffer", "sms", "holds_until_peers", "why", "declared")
_NAME_OF_PEER = "->r"


class Recording:
    """`ops`, `arrays` and `meetings` of a compiled schedule, from a finished run of two ranks."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops: list[DeviceOp] = []
        self.arrays: list[Array] = []
        self.meetings: list[Meeting] = []
        self._array_of: dict[int | str, int] = {}
        self._written_by_peers = {
            trace.buffers[access.buffer].name
            for record in trace.records
            for access in record.writes
            if trace.buffers[access.buffer].rank not in (-1, record.rank)
        }
        self._meeting_at: dict[tuple[str, int], int] = {}
        self._follows: dict[int, int] = {}
        self._joins: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._waits: list[int] = []
        # How many waits for a device a host record follows or is; and the latest record of each host line.
        self._waited: dict[int, int] = {}
        self._waited_on_line: dict[str, int] = {}
        self._meet()
        mine, theirs = ([r for r in trace.records if r.rank == rank] for rank in range(2))
        self._refuse_other_program(mine, theirs)
        for record in sorted(mine, key=lambda r: r.id):
            if record.on_device:
                self._operation(record)
            else:
                self._host(record)
        if self.ops and self.ops[-1].line == HOST:  # the step's end; nothing follows it
            self.ops.pop()

    def _refuse_other_program(self, *programs: list[Record]) -> None:
        """What holds for one rank has to hold for all."""
        said = [
            [
                (r.line, r.kind, r.name, r.layer, r.ubatch, r.point)
                for r in sorted(records, key=lambda r: r.id)
                if r.on_device
            ]
            for records in programs
        ]
        if said[0] != said[1]:
            rule = "ranks of a run without a fault launch the same operations"
            raise DBOError.of(rule, fix="run the real ring", launched=[len(records) for records in said])

    def _meet(self) -> None:
        """Meetings in order of their opening. One that leaves its follower out is one of several: one per rank."""
        for record in sorted(self.trace.of_kind(kinds.MEET), key=lambda r: r.id):
            group, of_others = record.attrs["group"].partition(_NAME_OF_PEER)[0], "members" in record.attrs
            key = group, record.attrs["index"]
            if key not in self._meeting_at:
                self._meeting_at[key] = len(self.meetings)
                self.meetings.append(Meeting(group=group, index=key[1], of_others=of_others))
            self._follows[record.id] = self._meeting_at[key]
            for member in record.after:
                self._joins[member] = self._meeting_at[key]

    def _host(self, record: Record) -> None:
        """Follow what the host knows of its devices."""
        known = max((self._waited.get(id, 0) for id in record.after), default=0)
        known = max(known, self._waited_on_line.get(record.line, 0))
        if record.kind == kinds.HOST_WAIT:
            if known != len(self._waits):
                raise DBOError.of("ubatches of a rank run one at a time", fix="run the real ring", line=record.line)
            self._waits.append(len(self.ops))
            known += 1
            self._add(record, HOST, after=tuple(self._place[id] for id in record.after if id in self._place))
        self._waited[record.id] = self._waited_on_line[record.line] = known

    def _operation(self, record: Record) -> None:
        after = [self._place[id] for id in record.after if id in self._place]
        waits = max((self._waited[id] for id in record.after if id in self._waited), default=0)
        if waits:
            after.append(self._waits[waits - 1])
        self._place[record.id] = len(self.ops)
        self._add(record, record.line, after=tuple(sorted(set(after))))

    def _add(self, record: Record, line: str, *, after: tuple[int, ...]) -> None:
        self.ops.append(
            DeviceOp(
                line=line,
                kind=record.kind,
                name=record.name,
                point=record.point,
                ubatch=record.ubatch,
                layer=record.layer,
                dur_us=record.dur_us,
                after=after,
                joins=self._joins.get(record.id, -1),
                follows=max((self._follows[id] for id in record.after if id in self._follows), default=-1),
                reads=tuple(map(self._access, record.reads)),
                writes=tuple(map(self._access, record.writes)),
                to_peers=isinstance(record.attrs.get("dst"), int),
                attrs={name: record.attrs[name] for name in _KEPT if name in record.attrs},
            )
        )

    def _access(self, access: Access) -> Access:
        info = self.trace.buffers[access.buffer]
        window = "all" if info.rank == -1 else "peers" if info.name in self._written_by_peers else ""
        key = info.name if window else info.id
        if key not in self._array_of:
            self._array_of[key] = len(self.arrays)
            self.arrays.append(Array(name=info.name, nbytes=info.nbytes, window=window))
        return access._replace(buffer=self._array_of[key])
