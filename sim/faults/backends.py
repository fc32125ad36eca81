"""Faults of exchanges: waits around them, events captured too late, signals skipped, regions shared, lifetimes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dbo.engine.components import Components
from dbo.moe.symm_copy import Channel, Table
from dbo.trace import kinds
from dbo.ubatching.player import RESULTS, SchedulePlayer
from dbo.ubatching.ring import dbo_current_ubatch_id, dbo_enabled, dbo_get_previous_event
from sim.faults.clean_run import CleanRun, every_split_rank, every_ubatch, outside_captures
from sim.faults.essential import essential_waits
from sim.faults.fault import Fault, Site
from sim.faults.streams import STREAM_BACKENDS, events_that_can_be_late

DEEPEP = ("deepep_high_throughput", "deepep_v2")


def _affected(site: Site) -> bool:
    return dbo_enabled() and dbo_current_ubatch_id() == site.ubatch


def unawaited_input(program: Components, site: Site) -> Components:
    """Sends do not wait for what they send."""

    class Hasty(SchedulePlayer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.context.index == site.ubatch:
                self._needs = self._needs | {"D.send": (), "C.send": ()}

    return replace(program, player=Hasty)


def unawaited_result(program: Components, site: Site) -> Components:
    """The model goes on without waiting for combine."""

    class Hasty(SchedulePlayer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.context.index == site.ubatch:
                self._needs = self._needs | {"C.recv": ()}
                self._recorded = self._recorded - set(RESULTS)  # the shared expert's wait would stand in for it

    return replace(program, player=Hasty)


def late_capture(program: Components, site: Site) -> Components:
    """A call is given an event of compute that was captured after the yield, so it covers what the peer has queued."""

    def wrap(backend: Any) -> Any:
        launch = backend._launch

        def late() -> dict[str, Any]:
            options = launch()
            if _affected(site):
                options["previous_event"] = dbo_get_previous_event(backend.buffer.capture)
                if "async_with_compute_stream" in options:  # V2 wants both
                    options["allocate_on_comm_stream"] = True
            return dict(options)

        backend._launch = late
        return backend

    return replace(program, prepare_finalize=wrap)


class _Deaf:
    """An arrival that is not waited for."""

    def __init__(self, arrival: Any) -> None:
        self._arrival = arrival

    def rows(self) -> tuple[Any, ...]:
        return self._at_once(self._arrival.rows)

    def blocks(self) -> tuple[Any, ...]:
        return self._at_once(self._arrival.blocks)

    def _at_once(self, ask: Callable[[], Any]) -> tuple[Any, ...]:
        memory = self._arrival.memory
        wait, memory._wait_for_signals = memory._wait_for_signals, lambda channel, call: None
        try:
            return tuple(ask())
        finally:
            memory._wait_for_signals = wait


class _Through:
    """Symmetric memory seen through a fault."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def own_rows(self, like: Any, table: Table, *, channel: Channel) -> Any:
        return self._inner.own_rows(like, table, channel=channel)

    def exchange_counts(self, counts: Any, *, channel: Channel) -> Table:
        return list(self._inner.exchange_counts(counts, channel=channel))

    def send(self, arrays: Any, table: Table, *, channel: Channel, to_all: bool = False) -> Any:
        return self._inner.send(arrays, table, channel=channel, to_all=to_all)


def skip_signal(program: Components, site: Site) -> Components:
    """A receive copies rows out of its region without waiting for the peers' signals."""

    class Skipping(_Through):
        def send(self, arrays: Any, table: Table, *, channel: Channel, to_all: bool = False) -> Any:
            arrival = super().send(arrays, table, channel=channel, to_all=to_all)
            return _Deaf(arrival) if _affected(site) else arrival

    def wrap(backend: Any) -> Any:
        backend.copies = Skipping(backend.copies)
        return backend

    return replace(program, prepare_finalize=wrap)


def one_region(program: Components, site: Site) -> Components:
    """All ubatches receive in the regions of ubatch 0."""

    class Sharing(_Through):
        def exchange_counts(self, counts: Any, *, channel: Channel) -> Table:
            return super().exchange_counts(counts, channel=(0, channel[1]))

        def send(self, arrays: Any, table: Table, *, channel: Channel, to_all: bool = False) -> Any:
            return super().send(arrays, table, channel=(0, channel[1]), to_all=to_all)

    def wrap(backend: Any) -> Any:
        backend.copies = Sharing(backend.copies)
        return backend

    return replace(program, prepare_finalize=wrap)


def unrecorded_stream(program: Components, site: Site) -> Components:
    """The allocator is not told that another stream uses an exchange's inputs and outputs."""

    class Silent:
        def used_here(self, *arrays: Any) -> None:
            return None

        used_by_compute = used_here

        def copy_out(self, combined: Any) -> Any:
            return combined.clone()

    def wrap(backend: Any) -> Any:
        backend._streams = Silent()
        return backend

    return replace(program, prepare_finalize=wrap)


def late_epilogue(program: Components, site: Site) -> Components:
    """A dispatch's rows are copied out of the process's receive buffer only when the experts want them."""

    def wrap(backend: Any) -> Any:
        prepare, buffer = backend.prepare_async, backend.buffer
        epilogue = buffer._epilogue

        def late(*args: Any) -> Any:
            if not _affected(site):
                return prepare(*args)
            kept: list[tuple[Any, ...]] = []
            buffer._epilogue = lambda *parts: kept.append(parts)
            try:
                receive = prepare(*args)
            finally:
                buffer._epilogue = epilogue

            def copy_out() -> Any:
                epilogue(*kept[0])
                buffer.world.current_stream().wait_stream(buffer.get_comm_stream())
                return receive()

            return copy_out

        backend.prepare_async = late
        return backend

    return replace(program, prepare_finalize=wrap)


def dispatches_that_are_followed(run: CleanRun) -> Iterator[Site]:
    """Ubatches whose dispatch another one's exchange follows on the comm stream before their experts are launched."""
    for rank, ubatch in run.ubatches():
        for (r, step, u), line in run.eager_lines.items():
            if (r, u) != (rank, ubatch):
                continue
            others = [
                x for (q, s, v), xs in run.eager_lines.items() if (q, s) == (rank, step) and v != ubatch for x in xs
            ]
            fills = [x.id for x in others if x.kind == kinds.EXCHANGE]
            sends = {x.layer: x.id for x in line if x.kind == kinds.EXCHANGE and x.name == "dispatch"}
            wanted = {x.layer: x.id for x in reversed(line) if x.point in ("D.recv", "MLP")}
            if any(sends[layer] < fill < wanted[layer] for layer in sends for fill in fills):
                yield Site(rank=rank, ubatch=ubatch)
                break


def exchanges_that_overlap(run: CleanRun) -> Iterator[Site]:
    """Once, if on some rank a ubatch sends while another one's exchange of the same kind is under way."""
    spans: dict[tuple[int, int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for (rank, step, ubatch), line in run.lines.items():
        ids: dict[tuple[str, int], list[int]] = defaultdict(list)
        for record in line:
            if record.on_device and record.point.endswith((".send", ".recv")):
                ids[record.point[0], record.layer].append(record.id)
        for (kind, _), found in ids.items():
            spans[rank, step, kind].append((found[0], found[-1], ubatch))
    pairs = ((a, b) for found in spans.values() for a in found for b in found)
    if any(a[0] < b[0] < a[1] and a[2] != b[2] for a, b in pairs):
        yield Site()


def numeric_split_ranks(run: CleanRun) -> Iterator[Site]:
    """Any rank of a run with numbers in which some step is split: symbols are never freed."""
    yield from every_split_rank(run) if run.trace.meta.get("mode") == "numeric" else ()


_SPLIT = "a split step"
_NEEDED = "a split step in which nothing else orders what those waits order, and no graph of a split step"

FAULTS = (
    Fault(
        name="unawaited-input",
        sentence="exchanges do not wait for what they send",
        id="stream-race",
        plant=unawaited_input,
        needs=_NEEDED,
        sites=outside_captures(essential_waits("D.send", "C.send")),
        backends=STREAM_BACKENDS,
        keys=("rank", "ubatch"),
        also=("buffer-reuse",),
    ),
    Fault(
        name="unawaited-result",
        sentence="the model goes on without waiting for combine",
        id="stream-race",
        plant=unawaited_result,
        needs=_NEEDED,
        sites=outside_captures(essential_waits("C.recv", "")),
        backends=STREAM_BACKENDS,
        keys=("rank", "ubatch"),
    ),
    Fault(
        name="late-capture",
        sentence="an exchange waits for an event captured after the yield",
        id="no-overlap",
        plant=late_capture,
        needs="a send whose producer stands directly before a yield, and that starts before the "
        "peer's compute of that yield ends",
        sites=events_that_can_be_late,
        backends=DEEPEP,
        keys=("rank", "ubatch"),
    ),
    Fault(
        name="skip-signal",
        sentence="a receive does not wait for its peers' signals",
        id="stream-race",
        plant=skip_signal,
        needs=_SPLIT,
        sites=every_ubatch,
        backends=("symm_copy",),
        keys=("rank", "ubatch"),
        also=(
            "buffer-reuse",
        ),  # from graphs, where no host waits for counts, the next step's rows may be there already
    ),
    Fault(
        name="one-region",
        sentence="all ubatches receive in one region",
        id="buffer-reuse",
        plant=one_region,
        needs="a ubatch that sends while another one's exchange of the same kind is under way",
        sites=exchanges_that_overlap,
        backends=("symm_copy",),
        everywhere=True,
        keys=(),
    ),
    Fault(
        name="late-epilogue",
        sentence="rows stay in the receive buffer over the peer's exchange",
        id="buffer-reuse",
        plant=late_epilogue,
        needs="a dispatch that the peer's exchange follows before its rows are wanted",
        sites=dispatches_that_are_followed,
        backends=("deepep_v2",),
        keys=("rank", "ubatch"),
    ),
    Fault(
        name="unrecorded-stream",
        sentence="what crosses streams is freed too early",
        id="stream-race",
        plant=unrecorded_stream,
        needs="a split step in a run with numbers",
        sites=numeric_split_ranks,
        backends=STREAM_BACKENDS,
        keys=("rank",),
        numeric=True,
    ),
)
