"""What tensors on `sim` need of the simulator's device. No torch here, so that the engine does not need it either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from dbo.trace import Access


class TensorDevice(Protocol):
    """The device of one simulated rank. Called by the host task that issues an operation, in its own thread.

    Attributes:
        rank: index of ``torch.device("sim", rank)``.
        capturing: whether a graph capture is open; the host may then read nothing.
    """

    rank: int

    @property
    def capturing(self) -> bool: ...

    def submit(
        self, name: str, *, reads: tuple[Access, ...], writes: tuple[Access, ...], run: Callable[[], None], src: str
    ) -> None:
        """Queue one operation on the calling task's current stream.

        `run` does the work; it may be called from any thread, at any later time, and again when a graph is replayed.
        It keeps the data that it touches alive, not the buffers: a buffer freed in between may be reported as dead.
        """

    def host_read(self, why: str, *, declared: bool) -> None:
        """Block the calling host task until everything queued on its current stream has run."""

    def new_buffer(self, nbytes: int, name: str) -> int:
        """A storage of `nbytes` begins; returns the id that its `Access`es carry."""

    def free_buffer(self, buffer: int) -> None:
        """The last tensor of the storage is gone. May come after the device has been unregistered."""


@runtime_checkable
class RecordsStreams(Protocol):
    """Optional: a device whose allocator knows `Tensor.record_stream`."""

    def record_stream(self, buffer: int, stream: object) -> None:
        """The storage is in use on `stream` until what is queued there now has run."""
