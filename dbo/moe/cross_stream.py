"""What a backend owes the allocator when its exchange runs on another stream than the work around it."""

from __future__ import annotations

from typing import Any

from dbo.contract.world import World
from dbo.ubatching.ring import dbo_enabled


class CrossStream:
    """Tells the allocator which stream uses what, so that no bytes are handed out again while somebody still needs them.

    An exchange may be issued on the comm stream and consumed on compute. The allocator knows only the stream that an array
    was made on; freed there, its bytes may be reused at once by work on that stream.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def used_here(self, *arrays: Any) -> None:
        """The current stream uses arrays that may belong to the other one."""
        for array in arrays:
            self._world.tensors.record_stream(array, self._world.current_stream())

    def used_by_compute(self, *arrays: Any) -> None:
        """What a receiver returns is used on the compute stream, wherever it was made."""
        for array in arrays:
            self._world.tensors.record_stream(array, self._world.compute)

    def copy_out(self, combined: Any) -> Any:
        """A copy of `combined` made on the current stream, for use on compute: point "copy". Unsplit, `combined` itself."""
        if not dbo_enabled():
            return combined
        self._world.launches()
        self.used_here(combined)
        output = combined.clone()
        self.used_by_compute(output)
        return output
