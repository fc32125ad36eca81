"""Needs torch. Staging memory that is handed out again and again: slots that grow until the lock, and graphs' own
buffers.

A slot is (ubatch, lane). Each slot has one storage; all buffers that one call needs at a time are carved out of it in
one reservation, so they never overlap. Slots are independent: growing one moves no other. After warm-up `lock()` turns
every further growth into an error, so a step allocates nothing.

A captured graph bakes addresses. Inside `capturing(graph)` staging is therefore the graph's own: it is allocated there
(on a device: in the graph's private pool), one set for each (slot, shapes, dtypes), shared by the layers of that graph
and by nobody else, and kept until `release(graph)`. Whatever the slots do later, no baked address moves. A caller that
bakes slot memory instead (`own_staging=False`, after reserving the worst case) must call `check_replay(graph)` before
every replay; it compares the generations. A program that captures outside of the scope is refused.

Called by the ubatch that holds the baton, on the stream that uses the buffers; there is no lock inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dbo.contract.world import Recorder
from dbo.errors import WorkspaceError
from dbo.trace import kinds
from dbo.ubatching.forward_context import get_forward_context

ALIGNMENT_BYTES = 256
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one buffer."""


class Slot(NamedTuple):
    """Who uses a piece of staging: no two live views of different slots share a byte."""

    ubatch: int
    lane: str


@dataclass(slots=True)
class _Storage:
    raw: torch.Tensor
    generation: int


@dataclass(slots=True)
class _GraphStaging:
    """What a graph has baked: buffers of its own, and generations of slots that it borrowed."""

    own: dict[tuple[Slot, tuple[Spec, ...]], torch.Tensor] = field(default_factory=dict)
    borrowed: dict[Slot, int] = field(default_factory=dict)


def ubatch_of_forward_context() -> int:
    """The ubatch of the calling thread's forward pass, 0 outside of one."""
    try:
        return get_forward_context().ubatch
    except RuntimeError:
        return 0


def current_stream_captures() -> bool:
    """Whether the current CUDA stream is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class WorkspaceManager:
    """Staging of one rank.

    Args:
        device: where the buffers live.
        current_ubatch: the ubatch of the calling thread; asked only when a caller names no slot.
        is_capturing: whether the current stream is being captured.
        recorder: is told of every reservation, use, lock and borrowed slot, for the trace.

    Attributes:
        allocations: storages allocated for slots so far; constant after warm-up.
        graph_allocations: buffer sets allocated for graphs so far.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        current_ubatch: Callable[[], int] = ubatch_of_forward_context,
        is_capturing: Callable[[], bool] = current_stream_captures,
        recorder: Recorder | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._current_ubatch = current_ubatch
        self._is_capturing = is_capturing
        self._recorder = recorder
        self._slots: dict[Slot, _Storage] = {}
        self._graphs: dict[Hashable, _GraphStaging] = {}
        self._capture: tuple[Hashable, _GraphStaging, bool] | None = None
        self._locked = False
        self.allocations = 0
        self.graph_allocations = 0

    def get_simultaneous(
        self, *specs: Spec, slot: Slot | None = None, lane: str = "", caller: str = "caller"
    ) -> list[torch.Tensor]:
        """Buffers that live at the same time, contiguous, uninitialised, valid until the slot's next reservation.

        Args:
            specs: (shape, dtype) of each buffer.
            slot: whose staging; it wins over the state of the thread. None: `lane` of the current ubatch.
            lane: used only without `slot`.
            caller: named in errors.

        Raises:
            WorkspaceError: the slot would grow after the lock, or the stream captures outside of `capturing`.
        """
        slot = Slot(self._current_ubatch(), lane) if slot is None else slot
        if self._capture is not None and self._capture[2]:
            return _carve(self._graph_storage(self._capture[1], slot, specs), specs)
        if self._capture is None and self._is_capturing():
            raise WorkspaceError.of(
                "staging that a graph captures belongs to that graph",
                fix="capture inside workspace.capturing(graph)",
                caller=caller,
                slot=tuple(slot),
            )
        raw = self._slot_storage(slot, _total_bytes(specs), caller)
        self._tell(kinds.USE, slot, size=[_padded_bytes(spec) for spec in specs])
        if self._capture is not None:
            graph, staging, _ = self._capture
            staging.borrowed[slot] = self._slots[slot].generation
            self._tell(kinds.BAKE, slot, graph=str(graph), generation=staging.borrowed[slot])
        return _carve(raw, specs)

    def lock(self) -> None:
        """Refuse growth from now on. Called once, after warm-up with the largest batch."""
        self._locked = True
        if self._recorder is not None:
            self._recorder.host(kinds.LOCK, what="workspace")

    def generation(self, slot: Slot) -> int:
        """How often the slot was allocated; an address taken at another generation is stale."""
        storage = self._slots.get(slot)
        return 0 if storage is None else storage.generation

    @contextmanager
    def capturing(self, graph: Hashable, *, own_staging: bool = True) -> Iterator[None]:
        """Staging handed out inside belongs to `graph` and lives until `release(graph)`.

        Args:
            graph: the key under which the graph is stored.
            own_staging: False: hand out the slots' memory and remember its generation for `check_replay`.

        Raises:
            WorkspaceError: inside another capture, or the graph already holds staging.
        """
        if self._capture is not None or graph in self._graphs:
            why = "captures do not nest" if self._capture is not None else "a graph is captured once"
            raise WorkspaceError.of(why, fix="release the old graph, or choose another key", graph=graph)
        self._capture = (graph, staging := _GraphStaging(), own_staging)
        try:
            yield
        except BaseException:
            self._capture = None
            raise
        self._capture = None
        self._graphs[graph] = staging

    def check_replay(self, graph: Hashable) -> None:
        """Refuse a replay that would touch an address which is no longer the graph's.

        Raises:
            WorkspaceError: the graph is unknown or released, or a slot that it borrowed has been allocated anew.
        """
        staging = self._graphs.get(graph)
        if staging is None:
            raise WorkspaceError.of("a replayed graph holds its staging", fix="capture it again", graph=graph)
        for slot, baked in staging.borrowed.items():
            if self.generation(slot) != baked:
                raise WorkspaceError.of(
                    "a replayed graph uses the addresses that it captured",
                    fix="reserve the worst case before capturing, or capture again",
                    graph=graph,
                    slot=tuple(slot),
                    captured_generation=baked,
                    generation=self.generation(slot),
                )

    def release(self, graph: Hashable) -> None:
        """Forget the staging of a graph that will not be replayed again.

        Raises:
            WorkspaceError: the graph holds no staging.
        """
        if self._graphs.pop(graph, None) is None:
            raise WorkspaceError.of("a graph is released once", fix="release it where it is destroyed", graph=graph)

    def _slot_storage(self, slot: Slot, nbytes: int, caller: str) -> torch.Tensor:
        present = self._slots.get(slot)
        present_bytes = 0 if present is None else present.raw.numel()
        if present is not None and nbytes <= present_bytes:
            return present.raw
        if self._locked:
            raise WorkspaceError.of(
                "the workspace is locked after warm-up and does not grow",
                fix="warm up with the largest batch before lock()",
                caller=caller,
                slot=tuple(slot),
                asked_bytes=nbytes,
                present_bytes=present_bytes,
            )
        self.allocations += 1
        raw = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._slots[slot] = _Storage(raw, 1 if present is None else present.generation + 1)
        self._tell(kinds.RESERVE, slot, size=nbytes, generation=self._slots[slot].generation)
        return raw

    def _tell(self, kind: str, slot: Slot, **attrs: Any) -> None:
        if self._recorder is not None:
            self._recorder.host(kind, what="workspace", slot=f"u{slot.ubatch}/{slot.lane}", **attrs)

    def _graph_storage(self, staging: _GraphStaging, slot: Slot, specs: tuple[Spec, ...]) -> torch.Tensor:
        raw = staging.own.get((slot, specs))
        if raw is None:
            self.graph_allocations += 1
            raw = torch.empty(_total_bytes(specs), dtype=torch.uint8, device=self._device)
            staging.own[slot, specs] = raw
        return raw


def _padded_bytes(spec: Spec) -> int:
    shape, dtype = spec
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _total_bytes(specs: tuple[Spec, ...]) -> int:
    return sum(_padded_bytes(spec) for spec in specs)


def _carve(raw: torch.Tensor, specs: tuple[Spec, ...]) -> list[torch.Tensor]:
    buffers, start = [], 0
    for shape, dtype in specs:
        nbytes = math.prod(shape) * dtype.itemsize
        buffers.append(raw[start : start + nbytes].view(dtype).view(shape))
        start += _padded_bytes((shape, dtype))
    return buffers
