"""The board: a file in shared memory on which every rank writes where it stands. The watchdog reads it.

Only writers of a rank touch its part, and a row is rewritten in one piece. A reader acts only on rows that have not
moved for a while, or on log entries, which are written once, so it needs no lock. Nothing here waits or imports torch.

    rank   pid, state, the first thing that the rank itself found wrong, and when it came how far
    line   "main", "u0" …: step, layer, ubatch, point, yields, and what it waits for
    log    per communicator the last exchanges: sequence number, operation, and whose they are

All ranks meet in a communicator, but for those named dcp0, dcp1, …: a rank is in one of them, logs it as "dcp" and notes
who its members are.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dbo.errors import RingError

LINES = ("main", *(f"u{i}" for i in range(8)))
GROUPS = ("dp.cpu", "ep", "low_latency", "high_throughput", "deepep_v2", "symm_copy", "dcp")
LOG_ENTRIES = 256

NEW, RUNNING, ENDED, FAILED = range(4)
UNUSED, BUSY, IDLE, BATON, BARRIER, JOIN, COLLECTIVE, DEVICE = range(8)
_WORDS = {BATON: "the baton", BARRIER: "the barrier", JOIN: "the ubatches' end"}
_STATES = [state.to_bytes(4, "little") for state in range(8)]
WAITING = frozenset((BATON, BARRIER, JOIN, COLLECTIVE, DEVICE))

_HEAD = struct.Struct("<4sI56x")
_RANK = struct.Struct("<ii")
_FOUND = struct.Struct("<iiii16s32s160s")
_LINE = struct.Struct("<QiiiiiI16s48s16sqi16s")
_ENTRY = struct.Struct("<qiii16s32s")
_MAGIC = b"dbo1"
_STATE_AT = struct.calcsize("<Qiiiii")

MARKS = ("started", "connected", "stepping", "planted")
"""What a rank notes the time of: its process, its groups and device, its first step, a fault that was planted in it."""
_MARK = struct.Struct("<d")

_MEMBERS = struct.Struct("<ii")

_FOUND_AT = _RANK.size
_MARKS_AT = 256
_MEMBERS_AT = 384
_LINES_AT = 512
_LOGS_AT = _LINES_AT + _LINE.size * len(LINES)
_RANK_BYTES = _LOGS_AT + len(GROUPS) * (8 + LOG_ENTRIES * _ENTRY.size)


def log_of(group: str) -> str:
    """Where the exchanges of `group` are logged; one of `GROUPS`."""
    return "dcp" if group.startswith("dcp") else group


@dataclass(frozen=True, kw_only=True, slots=True)
class LineWait:
    """What a host line waits for.

    Attributes:
        state: what kind of wait, one of `WAITING`; or `BUSY`: it does not wait.
        what: in words. group, index: the exchange, if it is one.
    """

    state: int
    what: str = ""
    group: str = ""
    index: int = -1


GOES_ON = LineWait(state=BUSY)


@dataclass(frozen=True, kw_only=True)
class LineState:
    """One host line as it was last written.

    Attributes:
        step, layer, ubatch, point: whose work it does; in a receive hook the owner's.
        own_layer, own_point: where it stands in its own program.
    """

    name: str
    seq: int
    step: int
    layer: int
    ubatch: int
    yields: int
    played: int
    state: int
    point: str
    what: str
    group: str
    index: int
    own_layer: int = -1
    own_point: str = ""

    @property
    def waits(self) -> bool:
        return self.state in WAITING


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One exchange that a rank came to: whose it is, and what it is."""

    index: int
    step: int
    layer: int
    ubatch: int
    point: str
    op: str

    @property
    def tag(self) -> tuple[int, int, int, str]:
        return self.step, self.layer, self.ubatch, self.point

    @property
    def signature(self) -> tuple[str, tuple[int, int, int, str]]:
        """What members of one exchange have in common."""
        return self.op, self.tag


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """What a rank found wrong with itself, the first time that it did."""

    step: int
    layer: int
    ubatch: int
    point: str
    kind: str
    text: str


class Board:
    """The whole board; `rank(r)` is one rank's part."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self.memory = memory
        magic, self.ranks = _HEAD.unpack_from(memory, 0)
        if magic != _MAGIC:
            raise RingError.of("a board is written by the same version", fix="start the run again", path=path)

    @classmethod
    def create(cls, path: Path, ranks: int) -> Board:
        """A new, empty board."""
        with open(path, "wb") as file:
            file.truncate(_HEAD.size + ranks * _RANK_BYTES)
            file.write(_HEAD.pack(_MAGIC, ranks))
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Board:
        """The board at `path`, shared with whoever has it open."""
        handle = os.open(path, os.O_RDWR)
        try:
            return cls(path, mmap.mmap(handle, 0))
        finally:
            os.close(handle)

    def rank(self, rank: int) -> RankBoard:
        return RankBoard(self.memory, _HEAD.size + rank * _RANK_BYTES)

    def parts(self) -> Iterator[tuple[int, RankBoard]]:
        """Every rank's part, by rank."""
        return ((rank, self.rank(rank)) for rank in range(self.ranks))

    def circles(self, group: str) -> list[tuple[int, ...]]:
        """Who meets whom in the communicators logged as `group`: all ranks in one, or each DCP group apart."""
        if group != "dcp":
            return [tuple(range(self.ranks))]
        return sorted({part.dcp_members() for _, part in self.parts()} - {()})

    def failed_peer(self, rank: int) -> tuple[int, str]:
        """Whom `rank` waits for in vain, and why, as far as the board knows: (-1, "") when nobody has failed."""
        for peer, part in self.parts():
            if peer == rank:
                continue
            found = part.finding()
            if part.state == FAILED or (found is not None and found.kind == "error"):
                return peer, found.text if found is not None else "its program raised"
            if part.state == RUNNING and not is_alive(part.pid):
                return peer, "its process is gone"
        return -1, ""

    def close(self) -> None:
        self.memory.close()


class RankBoard:
    """One rank's part of the board."""

    def __init__(self, memory: mmap.mmap, base: int) -> None:
        self._memory = memory
        self._base = base
        self._counts = [0] * len(LINES)

    # -- written by the rank ----------------------------------------------------------------------------------------

    def set_state(self, state: int, pid: int) -> None:
        _RANK.pack_into(self._memory, self._base, pid, state)

    def write(
        self,
        line: int,
        tags: tuple[int, int, int, str],
        yields: int,
        played: int,
        wait: LineWait = GOES_ON,
        own: tuple[int, str] = (-1, ""),
    ) -> None:
        """Where host line number `line` stands, and what it waits for."""
        self._counts[line] += 1
        step, layer, ubatch, point = tags
        own_layer, own_point = own
        _LINE.pack_into(
            self._memory,
            self._base + _LINES_AT + line * _LINE.size,
            self._counts[line],
            step,
            layer,
            ubatch,
            yields,
            played,
            wait.state,
            point.encode()[:16],
            wait.what.encode()[:48],
            log_of(wait.group).encode()[:16],
            wait.index,
            own_layer,
            own_point.encode()[:16],
        )

    def goes_on(self, line: int) -> None:
        """The line waits no longer."""
        self.set_line_state(line, BUSY)

    def set_line_state(self, line: int, state: int) -> None:
        """Only what the line does changes, not where it stands; it counts as no progress."""
        at = self._base + _LINES_AT + line * _LINE.size + _STATE_AT
        self._memory[at : at + 4] = _STATES[state]

    def joins_dcp(self, members: Sequence[int]) -> None:
        """The rank's DCP group consists of `members`, consecutive ranks."""
        _MEMBERS.pack_into(self._memory, self._base + _MEMBERS_AT, members[0], len(members))

    def log(self, group: str, index: int, tags: tuple[int, int, int, str], op: str) -> None:
        """This rank has come to exchange `index` of `group`."""
        base = self._base + _LOGS_AT + GROUPS.index(log_of(group)) * (8 + LOG_ENTRIES * _ENTRY.size)
        step, layer, ubatch, point = tags
        at = base + 8 + (index % LOG_ENTRIES) * _ENTRY.size
        _ENTRY.pack_into(self._memory, at, index, step, layer, ubatch, point.encode()[:16], op.encode()[:32])
        self._memory[base : base + 8] = (index + 1).to_bytes(8, "little")

    def find(self, tags: tuple[int, int, int, str], kind: str, text: str) -> None:
        """Keep the first thing that this rank found wrong."""
        if self.finding() is None:
            step, layer, ubatch, point = tags
            place = (step, layer, ubatch, 0, point.encode()[:16])
            _FOUND.pack_into(self._memory, self._base + _FOUND_AT, *place, kind.encode()[:32], text.encode()[:160])

    def mark(self, name: str) -> None:
        """One of `MARKS` happens now; its first time is kept."""
        at = self._base + _MARKS_AT + MARKS.index(name) * _MARK.size
        if not _MARK.unpack_from(self._memory, at)[0]:
            _MARK.pack_into(self._memory, at, time.monotonic())

    # -- read by the watchdog ---------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return int(_RANK.unpack_from(self._memory, self._base)[0])

    @property
    def state(self) -> int:
        return int(_RANK.unpack_from(self._memory, self._base)[1])

    def marks(self) -> dict[str, float]:
        """When what of `MARKS` happened, in seconds of `time.monotonic`, which all processes of a machine share."""
        at = self._base + _MARKS_AT
        times = (_MARK.unpack_from(self._memory, at + i * _MARK.size)[0] for i in range(len(MARKS)))
        return {name: t for name, t in zip(MARKS, times, strict=True) if t}

    def lines(self) -> list[LineState]:
        """Host lines that have been used."""
        found = []
        for at, name in enumerate(LINES):
            seq, step, layer, ubatch, yields, played, state, point, what, group, index, own_layer, own_point = (
                _LINE.unpack_from(self._memory, self._base + _LINES_AT + at * _LINE.size)
            )
            if state != UNUSED:
                found.append(
                    LineState(
                        name=name,
                        seq=seq,
                        step=step,
                        layer=layer,
                        ubatch=ubatch,
                        yields=yields,
                        played=played,
                        state=state,
                        point=_text(point),
                        what=_WORDS.get(state) or _text(what),
                        group=_text(group),
                        index=index,
                        own_layer=own_layer,
                        own_point=_text(own_point),
                    )
                )
        return found

    def dcp_members(self) -> tuple[int, ...]:
        """The ranks of its DCP group; none before it has joined one."""
        first, count = _MEMBERS.unpack_from(self._memory, self._base + _MEMBERS_AT)
        return tuple(range(first, first + count))

    def entries(self, group: str, start: int = 0) -> dict[int, Entry]:
        """The last exchanges of a communicator, by sequence number, from number `start` on."""
        base = self._base + _LOGS_AT + GROUPS.index(log_of(group)) * (8 + LOG_ENTRIES * _ENTRY.size)
        count = int.from_bytes(self._memory[base : base + 8], "little")
        found = {}
        for index in range(max(start, count - LOG_ENTRIES), count):
            at = base + 8 + (index % LOG_ENTRIES) * _ENTRY.size
            number, step, layer, ubatch, point, op = _ENTRY.unpack_from(self._memory, at)
            if number == index:
                found[index] = Entry(
                    index=index, step=step, layer=layer, ubatch=ubatch, point=_text(point), op=_text(op)
                )
        return found

    def finding(self) -> RankFinding | None:
        step, layer, ubatch, _, point, kind, text = _FOUND.unpack_from(self._memory, self._base + _FOUND_AT)
        if not kind.strip(b"\0"):
            return None
        return RankFinding(
            step=step, layer=layer, ubatch=ubatch, point=_text(point), kind=_text(kind), text=_text(text)
        )


def is_alive(pid: int) -> bool:
    """Whether process `pid` runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
