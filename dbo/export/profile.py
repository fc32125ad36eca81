"""Files of `torch.profiler` as traces: which ubatch computed while which communicated, in a run that nobody recorded.

A run names what it launches by ranges on the host, `rank/ubatch/point step=S layer=L`. A kernel belongs to the range that
its launch lies in. No torch: a profile is a JSON file with Chrome's events.

    host ranges              lines main, u0, u1 … by their thread       kind point
    kernels, copies          lines compute, comm, side by stream        kind op; those that move bytes between ranks: exchange
    waits between streams    edges, where the profile has them (`enable_cuda_sync_events`)

Ubatches must be threads: greenlets share one, and their ranges do not nest. A profile without a device is one of CPU
tensors: the outermost operations of each thread are the work then.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dbo.config.paths import refuse_irregular
from dbo.errors import UsageError
from dbo.export.chrome import read_trace
from dbo.trace import Record, Trace, kinds

Event = dict[str, Any]

_RANGE = re.compile(r"^(\d+)/(-?\d+)/([A-Za-z]\w*(?:\.\w+)?)(?: step=(-?\d+) layer=(-?\d+))?$")
_HOST_RANGES = frozenset(("user_annotation", "nvtx"))
_LAUNCHES = frozenset(("cuda_runtime", "cuda_driver"))
_WORK = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))

_BETWEEN_RANKS = re.compile(
    r"nccl|nvshmem|deep_ep|internode|intranode|low_latency|(?:^|\W)(?:dispatch|combine)(?:\W|$)|PtoP|Peer|gloo:|c10d::(?!barrier)",
    re.IGNORECASE,
)
"""Names of what moves bytes between ranks."""

CLOCK_SLACK_US = 1.0
"""Ends and beginnings of ranges are told to this precision."""

_COMPUTES = frozenset(("A0", "A1", "MLP"))
_EXCHANGES = frozenset(("D.send", "D.recv", "C.send", "C.recv", "copy"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a range on the host says of itself."""

    rank: int
    ubatch: int
    point: str
    step: int = -1
    layer: int = -1


def range_name(rank: int, ubatch: int, point: str, step: int, layer: int) -> str:
    """The name of a range, as `place_of` reads it."""
    return f"{rank}/{ubatch}/{point} step={step} layer={layer}"


def place_of(name: str) -> Place | None:
    """What the name of a range says; None: it is not one of ours."""
    found = _RANGE.match(name)
    if found is None:
        return None
    rank, ubatch, point, step, layer = found.groups()
    return Place(rank=int(rank), ubatch=int(ubatch), point=point, step=int(step or -1), layer=int(layer or -1))


def moves_bytes(name: str) -> bool:
    """Whether a kernel or copy of this name moves bytes between ranks."""
    return bool(_BETWEEN_RANKS.search(name))


def is_profile(data: Any) -> bool:
    """Whether a JSON value is what `torch.profiler` exports."""
    return isinstance(data, dict) and isinstance(data.get("traceEvents"), list) and "dbo" not in data


def read_any(paths: Sequence[str | Path]) -> Trace:
    """A trace that this project wrote, or the profiles of a run.

    Raises:
        UsageError: as `read_trace` and `read_profile`.
    """
    if len(paths) == 1 and not _looks_like_a_profile(Path(paths[0])):
        return read_trace(paths[0])
    return read_profile(paths)


def _looks_like_a_profile(path: Path) -> bool:
    """By how it begins: both kinds of files may be large."""
    if path.suffix == ".gz":
        return True
    try:
        refuse_irregular(path, what="a trace")
        with open(path, encoding="utf-8", errors="replace") as file:
            return '"schemaVersion"' in file.read(1000)
    except OSError:
        return False


def read_profile(paths: Sequence[str | Path]) -> Trace:
    """One trace of the profiles of one run, one file a rank (`.json` or `.json.gz`).

    Raises:
        UsageError: a file cannot be read, is no profile, or names no points; two files are of one rank, or ubatches
            shared a thread.
    """
    files = [_File(Path(path)) for path in paths]
    ranks = [file.rank for file in files]
    if len(set(ranks)) != len(ranks):
        raise UsageError.of("each rank has one profile", fix="name each rank's file once", ranks=ranks)
    begun_us = min((item.t_us for file in files for item in file.items), default=0.0)
    items = sorted((item for file in files for item in file.items), key=lambda item: item.issued_us)
    for number, item in enumerate(items, start=1):
        item.id = number
    records = [item.record(begun_us) for item in sorted(items, key=lambda item: (item.t_us, item.issued_us, item.id))]
    done: set[int] = set()
    for record in records:
        # Two clocks measure the two sides of an edge; one that seems to point forward says nothing.
        record.after = tuple(id for id in record.after if id in done)
        done.add(record.id)
    meta = {
        "world": "profile",
        "ranks": len(files),
        "mode": "numeric",
        "complete": True,
        "device": "cuda" if any(file.on_device for file in files) else "cpu",
    }
    return Trace(meta=meta, records=records)


@dataclass(eq=False, kw_only=True)
class _Item:
    """A record in the making. Times in microseconds of the machine's clock; `issued_us`: when the host launched it."""

    rank: int
    line: str
    kind: str
    name: str
    t_us: float
    dur_us: float
    issued_us: float
    place: Place | None
    after: list[_Item] = field(default_factory=list)
    id: int = -1

    def record(self, begun_us: float) -> Record:
        place = self.place or Place(rank=self.rank, ubatch=-1, point="")
        return Record(
            self.id,
            self.rank,
            self.line,
            self.kind,
            self.name,
            t_us=self.t_us - begun_us,
            dur_us=self.dur_us,
            step=place.step,
            layer=place.layer,
            ubatch=place.ubatch,
            point=place.point,
            after=tuple(sorted({item.id for item in self.after})),
        )


class _Thread:
    """Ranges of one host thread, to be asked which one holds a moment."""

    def __init__(self) -> None:
        self.ranges: list[tuple[float, float, _Item]] = []
        self._starts: list[float] = []

    def close(self) -> None:
        """All ranges are here. The thread is the line of the ubatch that it works for; now and then it runs a peer's hook."""
        self.ranges.sort(key=lambda r: r[0])
        self._starts = [r[0] for r in self.ranges]
        owners = Counter(item.place.ubatch for _, _, item in self.ranges if item.place is not None)
        ubatch = owners.most_common(1)[0][0]
        for _, _, item in self.ranges:
            item.line = "main" if ubatch < 0 else f"u{ubatch}"

    @property
    def is_shared(self) -> bool:
        """Ranges of several ubatches are open at once: they share this thread."""
        return any(
            following < end - CLOCK_SLACK_US and item.place != other.place
            for (_, end, item), (following, _, other) in pairwise(self.ranges)
        )

    def at(self, t_us: float) -> _Item | None:
        """The range around `t_us`. A thread opens one when it has closed the one before."""
        last = bisect_right(self._starts, t_us) - 1
        if last < 0:
            return None
        _, end, item = self.ranges[last]
        return item if t_us <= end else None


class _File:
    """One rank's profile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = _load(path)
        self._base_us = float(data.get("baseTimeNanoseconds", 0)) / 1000
        events = [e for e in data["traceEvents"] if e.get("ph") == "X" and "ts" in e]
        self._threads: dict[Any, _Thread] = defaultdict(_Thread)
        self.items: list[_Item] = []
        self.rank = self._rank(data, events)
        self._read_ranges(events)
        self.on_device = any(e.get("cat") in _WORK for e in events)
        self._read_device(events) if self.on_device else self._read_host(events)

    def _rank(self, data: dict[str, Any], events: Iterable[Event]) -> int:
        places = (place_of(str(e.get("name"))) for e in events if e.get("cat") in _HOST_RANGES)
        first = next((place for place in places if place is not None), None)
        if first is None:
            rule = "a profile names points by ranges rank/ubatch/point"
            raise UsageError.of(rule, fix="profile the run with gpu.bench.profiled", path=self.path)
        return first.rank

    def _read_ranges(self, events: Iterable[Event]) -> None:
        for event in events:
            place = place_of(str(event["name"])) if event.get("cat") in _HOST_RANGES else None
            if place is not None:
                item = self._add(event, line="", kind=kinds.POINT, name=place.point, place=place)
                self._threads[event["tid"]].ranges.append((item.t_us, item.t_us + item.dur_us, item))
        for thread in self._threads.values():
            thread.close()
            if thread.is_shared:
                rule = "each ubatch of a profiled run has a thread of its own, or nobody can tell whose work is whose"
                raise UsageError.of(rule, fix='launch it with vehicle="thread"', path=self.path)

    def _add(
        self, event: Event, *, line: str, kind: str, name: str, place: Place | None, issued_us: float | None = None
    ) -> _Item:
        t_us = self._time(event)
        item = _Item(
            rank=self.rank,
            line=line,
            kind=kind,
            name=name,
            t_us=t_us,
            dur_us=float(event.get("dur", 0.0)),
            issued_us=t_us if issued_us is None else issued_us,
            place=place,
        )
        self.items.append(item)
        return item

    def _time(self, event: Event) -> float:
        return float(event["ts"]) + self._base_us

    def _range_of(self, event: Event | None) -> _Item | None:
        """The host range in which a launch lies."""
        thread = None if event is None else self._threads.get(event["tid"])
        return None if thread is None or event is None else thread.at(self._time(event))

    # -- a device ---------------------------------------------------------------------------------------------------

    def _read_device(self, events: Sequence[Event]) -> None:
        launches = {_arg(e, "correlation"): e for e in events if e.get("cat") in _LAUNCHES}
        work = [e for e in events if e.get("cat") in _WORK]
        ranges = {id(e): self._range_of(launches.get(_arg(e, "correlation"))) for e in work}
        lines = _lines_of_streams(work, {key: item.place if item else None for key, item in ranges.items()})
        by_stream: dict[Any, list[_Item]] = defaultdict(list)
        for event in work:
            around, launch = ranges[id(event)], launches.get(_arg(event, "correlation"))
            name = str(event["name"])
            item = self._add(
                event,
                line=lines[_stream(event)],
                kind=kinds.EXCHANGE if moves_bytes(name) else kinds.OP,
                name=name,
                place=around.place if around else None,
                issued_us=None if launch is None else self._time(launch),
            )
            if around is not None:
                item.after.append(around)
            by_stream[_arg(event, "stream")].append(item)
        for items in by_stream.values():
            items.sort(key=lambda item: item.issued_us)
        self._read_waits(events, launches, by_stream)

    def _read_waits(
        self, events: Iterable[Event], launches: dict[Any, Event], by_stream: dict[Any, list[_Item]]
    ) -> None:
        """Events that a stream waited for: its next work comes after the last one before the event was recorded."""
        issued = {stream: [item.issued_us for item in items] for stream, items in by_stream.items()}
        for event in events:
            recorded = launches.get(_arg(event, "wait_on_cuda_event_record_corr_id"))
            waited = launches.get(_arg(event, "correlation"))
            if event.get("cat") != "cuda_sync" or recorded is None or waited is None:
                continue
            source, target = _arg(event, "wait_on_stream"), _arg(event, "stream")
            before = bisect_right(issued.get(source, []), self._time(recorded)) - 1
            behind = bisect_left(issued.get(target, []), self._time(waited))
            if before >= 0 and behind < len(issued.get(target, [])):
                by_stream[target][behind].after.append(by_stream[source][before])

    # -- CPU tensors ------------------------------------------------------------------------------------------------

    def _read_host(self, events: Iterable[Event]) -> None:
        """Outermost operations within ranges, as if streams had run them: an exchange and what is around it on comm."""
        ends: dict[Any, float] = {}
        operations = [e for e in events if e.get("cat") == "cpu_op"]
        for event in sorted(operations, key=lambda e: (float(e["ts"]), -float(e.get("dur", 0.0)))):
            around = self._range_of(event)
            if around is None or self._time(event) < ends.get(event["tid"], 0.0):
                continue
            ends[event["tid"]] = self._time(event) + float(event.get("dur", 0.0))
            name = str(event["name"])
            between = moves_bytes(name)
            beside = between or (around.place is not None and around.place.point in _EXCHANGES)
            item = self._add(
                event,
                line="comm" if beside else "compute",
                kind=kinds.EXCHANGE if between else kinds.OP,
                name=name,
                place=around.place,
            )
            item.after.append(around)


def _lines_of_streams(work: Iterable[Event], places: dict[int, Place | None]) -> dict[Any, str]:
    """Which stream is which: the one that runs attention and experts computes; others communicate, or run beside it."""
    computes: dict[Any, float] = defaultdict(float)
    exchanges: dict[Any, float] = defaultdict(float)
    for event in work:
        place = places[id(event)]
        point, us = place.point if place is not None else "", float(event.get("dur", 0.0))
        computes[_stream(event)] += us if point in _COMPUTES else 0.0
        exchanges[_stream(event)] += us if point in _EXCHANGES or moves_bytes(str(event["name"])) else 0.0
    main = max(computes, key=lambda stream: computes[stream], default=None)
    return {
        stream: "compute" if stream == main else ("comm" if exchanges[stream] > 0 else "side") for stream in computes
    }


def _stream(event: Event) -> tuple[Any, Any]:
    return _arg(event, "device"), _arg(event, "stream")


def _arg(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)


def _json(path: Path) -> Any:
    refuse_irregular(path, what="a profile")
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        return json.load(file)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = _json(path)
    except OSError as error:
        why = error.strerror or error
        raise UsageError.of("a profile can be read", fix="name an existing file", path=path, why=why) from error
    except (ValueError, EOFError, zlib.error) as error:  # the latter two: a packed file that is damaged
        raise UsageError.of("a profile is JSON", fix="export it again", path=path, why=error) from error
    if isinstance(data, dict) and "dbo" in data:
        raise UsageError.of("a trace of this project has all ranks", fix="name this file alone", path=path)
    if not is_profile(data):
        rule = "a profile has Chrome's events"
        raise UsageError.of(rule, fix="export it with torch.profiler's export_chrome_trace", path=path)
    found: dict[str, Any] = data
    return found
