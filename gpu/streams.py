"""Streams and events of one rank: CUDA's (needs torch), or ones whose work is done when it is issued.

Both kinds write the same records, so a trace of a CPU run has the same edges as one of a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbo.contract.own import own
from dbo.trace import kinds

if TYPE_CHECKING:
    from dbo.contract.world import Event, Stream
    from gpu.device import GpuWorld


class HostStream:
    """A stream of CPU tensors: an operation is complete when its call returns."""

    def __init__(self, world: GpuWorld, name: str) -> None:
        self.world = world
        self.name = name

    def wait_event(self, event: Event) -> None:
        event = own(event, HostEvent)
        if event.marker >= 0:
            self._wait(event)
            self.world.trace.device(
                kinds.WAIT, event.name, attrs={"event": event.name}, after=(event.marker,), stream=self
            )

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> HostEvent:
        mine = own(event if event is not None else self.world.event(f"{self.name}.tail"), HostEvent)
        mine.record(self)
        return mine

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.world.host_wait(self, "synchronize")

    def drain(self) -> None:
        """Block until the work is done; nothing to wait for here."""

    def _wait(self, event: HostEvent) -> None:
        return None


class HostEvent:
    """A marker; `record` again moves it, and waits made before keep the old place."""

    def __init__(self, world: GpuWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.marker = -1

    def record(self, stream: Stream | None = None) -> None:
        stream = own(stream if stream is not None else self.world.current_stream(), HostStream)
        self.marker = self.world.trace.device(kinds.RECORD, self.name, attrs={"event": self.name}, stream=stream).id
        self._record(stream)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.world.current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.world.host_wait(self.world.current_stream(), f"synchronize {self.name}")

    def _record(self, stream: HostStream) -> None:
        return None


class CudaStream(HostStream):
    """A `torch.cuda.Stream`; `cuda` is the real one."""

    def __init__(self, world: GpuWorld, name: str, cuda: Any) -> None:
        super().__init__(world, name)
        self.cuda = cuda

    def query(self) -> bool:
        return bool(self.cuda.query())

    def drain(self) -> None:
        self.cuda.synchronize()

    def _wait(self, event: Any) -> None:
        self.cuda.wait_event(event.cuda)


class CudaEvent(HostEvent):
    """A `torch.cuda.Event`."""

    def __init__(self, world: GpuWorld, name: str, cuda: Any) -> None:
        super().__init__(world, name)
        self.cuda = cuda

    def query(self) -> bool:
        return bool(self.cuda.query())

    def synchronize(self) -> None:
        self.cuda.synchronize()
        super().synchronize()

    def _record(self, stream: Any) -> None:
        self.cuda.record(stream.cuda)
