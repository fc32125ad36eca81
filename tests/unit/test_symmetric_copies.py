"""Where rows and signals lie in symmetric memory: nobody's bytes are somebody else's (needs torch)."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo.errors import ConfigError
from dbo.moe.modular_kernel import FusedMoEModularKernel
from dbo.moe.symm_copy import SymmCopyPrepareAndFinalize
from dbo.moe.symm_copy_ops import TorchCopyRows
from dbo.ubatching.forward_context import ForwardContext, override_forward_context
from gpu.alltoall import symmetric_copies
from gpu.alltoall.symmetric_copies import ALIGNMENT_BYTES, HALVES, DeviceCopies, Memory, RegionLayout

LAYOUT = RegionLayout(ranks=3, ubatches=2, rows=5, row_bytes=(48, 16))
CHANNELS = list(itertools.product(range(2), HALVES))


def test_channels_and_flags_do_not_overlap() -> None:
    spans = []
    for channel in CHANNELS:
        for start, width in zip(LAYOUT.arrays_at(channel, 15, (48, 16)), (48, 16), strict=True):
            assert start % ALIGNMENT_BYTES == 0
            spans.append((start, start + 15 * width))
        spans += [(at, at + 4) for at in (LAYOUT.flag_at(channel, source) for source in range(3))]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[0][0] == 0 and spans[-1][1] <= LAYOUT.total_bytes


@pytest.mark.parametrize(("channel", "rows"), [((0, "dispatch"), 30), ((2, "combine"), 1)])
def test_more_than_was_reserved_is_refused(channel: tuple[int, str], rows: int) -> None:
    with pytest.raises(ConfigError, match=f"ubatch={channel[0]}"):
        LAYOUT.arrays_at(channel, rows, (48, 16))


def test_a_smaller_reservation_takes_the_memory_that_is_there() -> None:
    assert LAYOUT.covers(RegionLayout(ranks=3, ubatches=1, rows=4, row_bytes=(48, 16)))
    assert not LAYOUT.covers(RegionLayout(ranks=3, ubatches=2, rows=99, row_bytes=(48, 16)))
    assert not LAYOUT.covers(RegionLayout(ranks=2, ubatches=2, rows=5, row_bytes=(48, 16)))


class Signals:
    """Flags in CPU memory."""

    def __init__(self) -> None:
        self.up: set[int] = set()

    def raise_flag(self, address: int) -> None:
        assert address not in self.up, "raised again before it was lowered"
        self.up.add(address)

    def await_flag(self, address: int) -> None:
        assert address in self.up, "nobody has raised it"
        self.up.remove(address)


class World:
    """As much of one as the copies ask for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.trace = rank, size, self
        self.task = None
        self._index = 0

    def next_index(self, name: str) -> int:
        self._index += 1
        return self._index - 1

    def nothing(self, *args: object, **named: object) -> int:
        return 0

    came = timed_device = end_visit = device = meet_reference = launches = nothing


def ends(size: int) -> list[DeviceCopies]:
    """All ranks' ends over one memory, as they see each other's on devices."""
    layout = RegionLayout(ranks=size, ubatches=2, rows=7, row_bytes=(16, 8))
    memory = Memory(layout=layout, regions=[torch.zeros(layout.total_bytes, dtype=torch.uint8) for _ in range(size)])
    signals, made = Signals(), []
    for rank in range(size):
        end = DeviceCopies(World(rank, size), None, None)  # type: ignore[arg-type]
        end._memory = memory
        end.__dict__["signals"] = signals
        made.append(end)
    return made


def rows_of(source: int, count: int, peer: int) -> tuple[torch.Tensor, torch.Tensor]:
    marks = 100 * source + 10 * peer + torch.arange(count)
    return marks[:, None].repeat(1, 4).float(), marks[:, None].long()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_arrive_by_source_rank_whatever_the_counts(size: int) -> None:
    made = ends(size)
    for round_, half in enumerate(["dispatch", "combine", "dispatch"]):
        table = [[(source + 2 * peer + round_) % 4 for peer in range(size)] for source in range(size)]
        arrivals = []
        for source, end in enumerate(made):
            parts = [rows_of(source, table[source][peer], peer) for peer in range(size)]
            arrays = tuple(torch.cat(column) for column in zip(*parts, strict=True))
            arrivals.append(end.send(arrays, table, channel=(1, half)))
        for rank, arrival in enumerate(arrivals):
            expected = [rows_of(source, table[source][rank], rank) for source in range(size)]
            if half == "dispatch":
                for got, want in zip(arrival.rows(), zip(*expected, strict=True), strict=True):
                    assert torch.equal(got, torch.cat(want))
            else:
                for got, want in zip(arrival.blocks(), zip(*expected, strict=True), strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_with_to_all_every_peer_gets_every_row() -> None:
    made = ends(3)
    tokens = [2, 0, 5]
    table = [[count] * 3 for count in tokens]
    arrivals = [
        end.send(rows_of(source, tokens[source], 0), table, channel=(0, "dispatch"), to_all=True)
        for source, end in enumerate(made)
    ]
    expected = torch.cat([rows_of(source, count, 0)[0] for source, count in enumerate(tokens)])
    assert all(torch.equal(arrival.rows()[0], expected) for arrival in arrivals)


def test_rows_that_are_made_in_their_place_are_not_copied() -> None:
    made = ends(2)
    tokens = [3, 2]
    table = [[count] * 2 for count in tokens]
    arrivals, places = [], []
    for source, end in enumerate(made):
        rows, marks = rows_of(source, tokens[source], 0)
        place = end.own_rows(rows, table, channel=(1, "dispatch"))
        place.copy_(rows)
        places.append(place.data_ptr())
        arrivals.append(end.send((place, marks), table, channel=(1, "dispatch"), to_all=True))
    expected = torch.cat([rows_of(source, count, 0)[0] for source, count in enumerate(tokens)])
    for rank, arrival in enumerate(arrivals):
        rows, marks = arrival.rows()
        assert torch.equal(rows, expected) and torch.equal(marks[:3, 0], torch.arange(3))
        assert rows[sum(tokens[:rank]) :].data_ptr() == places[rank]


@pytest.mark.parametrize(("following", "stay"), [([3, 2], True), ([1, 1], False), ([2, 3], False)], ids=str)
def test_rows_in_their_place_stay_until_somebody_sends_by_another_table(following: list[int], stay: bool) -> None:
    """What a rank still reads of its own while a peer is ahead of it by one exchange."""
    made, tokens = ends(2), [3, 2]
    kept = []
    for source, end in enumerate(made):
        rows, _ = rows_of(source, tokens[source], 0)
        place = end.own_rows(rows, [[count] * 2 for count in tokens], channel=(0, "dispatch"))
        kept.append((place, place.copy_(rows).clone()))
    for source, end in enumerate(made):
        table = [[count] * 2 for count in following]
        end.send(rows_of(source, following[source], 7), table, channel=(0, "dispatch"), to_all=True)
    assert all(torch.equal(place, before) for place, before in kept) == stay


class AwaitedSignals(Signals):
    """Flags between ranks that are threads."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def raise_flag(self, address: int) -> None:
        with self._changed:
            super().raise_flag(address)
            self._changed.notify_all()

    def await_flag(self, address: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: address in self.up, timeout=10.0)
            super().await_flag(address)


@pytest.mark.parametrize("meets", [True, False])
def test_shared_experts_read_a_faster_peer_s_rows_unless_all_meet_before_sizes_change(meets: bool) -> None:
    """Rank 1 is as far ahead of rank 0 as the exchanges let it: in the next step's dispatch, of other sizes."""
    made, signals = ends(2), AwaitedSignals()
    ahead, together = threading.Event(), threading.Barrier(2)
    outputs: list[torch.Tensor] = [torch.zeros(0)] * 2

    def shared(hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) == 3 and hidden[0, 0] == 1.0:  # rank 0 in the first step
            ahead.wait(0.3 if meets else 10.0)
        return hidden.clone()

    class Telling(SymmCopyPrepareAndFinalize):
        def prepare_async(self, a1: torch.Tensor, *routing: torch.Tensor) -> Any:
            started = super().prepare_async(a1, *routing)
            if (self.rank, len(a1)) == (1, 2):
                ahead.set()
            return started

    def run(rank: int) -> None:
        end = made[rank]
        end.__dict__["signals"] = signals
        tensors = SimpleNamespace(record_stream=lambda array, stream: None)
        world: Any = SimpleNamespace(
            rank=rank,
            size=2,
            symmetric=end,
            copy_rows=TorchCopyRows(),
            tensors=tensors,
            compute=None,
            current_stream=lambda: None,
        )
        backend = Telling(world, num_experts=2, worst_case=True)
        experts: Any = SimpleNamespace(apply=lambda inputs: inputs.x.clone())
        kernel = FusedMoEModularKernel(backend, experts, shared)
        for tokens in (3, 2):
            with override_forward_context(ForwardContext(attn_metadata=None, num_tokens_across_ranks=[tokens] * 2)):
                hidden = kernel.input_buffer(torch.empty(tokens, 4))
                assert hidden is not None
                hidden.copy_(torch.full((tokens, 4), 1.0 + rank + 10 * (tokens == 2)))
                ids = torch.zeros(tokens, 1, dtype=torch.int64)
                _, found = kernel.parts(hidden, torch.ones(tokens, 1), ids, layer=0)
                outputs[rank] = found if tokens == 3 else outputs[rank]
            if meets:
                together.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert torch.equal(outputs[1], torch.full((3, 4), 2.0))
    assert torch.equal(outputs[0], torch.full((3, 4), 1.0)) == meets


def test_nothing_is_sent_before_memory_is_reserved() -> None:
    end = DeviceCopies(World(0, 1), None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="call reserve"):
        end.send((torch.zeros(1, 4),), [[1]], channel=(0, "dispatch"))


def test_flags_of_a_failed_step_are_lowered_and_rows_stay() -> None:
    memory = ends(2)[0].memory
    for region in memory.regions:
        region.fill_(1)
    memory.lower_all(1)
    at = memory.layout.flags_at
    assert memory.regions[0].all() and memory.regions[1][:at].all() and not memory.regions[1][at:].any()


def test_memory_that_is_taken_again_has_no_flag_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, meetings = ends(2)[0], list[Any]()
    memory = first.memory
    monkeypatch.setattr(symmetric_copies, "_KEPT", [memory])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(symmetric_copies.dist, "barrier", meetings.append)
    memory.regions[0].fill_(1)
    later = DeviceCopies(World(0, 2), None, "control")  # type: ignore[arg-type]
    later.reserve(ubatches=1, rows=3, row_bytes=(16, 8))
    at = memory.layout.flags_at
    assert later.memory is memory and not memory.regions[0][at:].any() and memory.regions[0][:at].all()
    assert meetings == ["control"] * 2, "before, so that nothing is under way, and behind"
