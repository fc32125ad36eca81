"""Numeric mode (needs torch): torch tensors on the simulated device, bound to a rank's streams, clock and trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from dbo.contract.own import own
from dbo.trace import Access, kinds
from sim import tensors
from sim.streams import SimStream
from sim.work import Work

if TYPE_CHECKING:
    from dbo.contract.world import Stream
    from sim.world import SimWorld


class NumericDevice:
    """`sim.tensors.TensorDevice` of one rank."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.rank = world.rank
        self._home: dict[int, SimStream] = {}
        self._used: dict[int, set[str]] = {}
        self._recorded: dict[int, set[str]] = {}
        tensors.register_device(world.rank, self)

    @property
    def capturing(self) -> bool:
        return self.world.capture is not None

    def submit(
        self, name: str, *, reads: tuple[Access, ...], writes: tuple[Access, ...], run: Callable[[], None], src: str
    ) -> None:
        nbytes = 0
        for access in (*reads, *writes):
            size = 1
            for n in access.sizes:
                size *= n
            nbytes += size
        self.world.current_stream().launch(
            Work(
                kind=kinds.OP,
                name=name,
                duration_us=self.world.cost.kernel(nbytes, name),
                reads=reads,
                writes=writes,
                run=run,
                src=src,
            )
        )

    def host_read(self, why: str, *, declared: bool) -> None:
        self.world.wait_current_stream(why, declared=declared)

    def new_buffer(self, nbytes: int, name: str) -> int:
        buffer = self.world.engine.new_buffer(self.rank, name, nbytes)
        if self.world.capture is not None:
            self.world.capture.pool.add(buffer)
        elif self.world.cluster.scheduler.current is not None:
            self._home[buffer] = self.world.current_stream()
        return buffer

    def note_use(self, accesses: tuple[Access, ...], stream: str) -> None:
        """Work on `stream` touches these buffers."""
        for access in accesses:
            self._used.setdefault(access.buffer, set()).add(stream)

    def record_stream(self, buffer: int, stream: SimStream) -> None:
        """As torch's: after the free, the bytes stay reserved until what `stream` holds by then has run."""
        self._recorded.setdefault(buffer, set()).add(stream.name)

    def free_buffer(self, buffer: int) -> None:
        """The bytes may be handed out again to work on the home stream, issued from now on.

        That is a hazard only for buffers that another stream has used without `record_stream`; those get a record that
        counts as a write.
        """
        home = self._home.pop(buffer, None)
        used = self._used.pop(buffer, set()) - self._recorded.pop(buffer, set())
        baked_in = [graph.name for graph in self.world.graphs if buffer in graph.baked]
        if baked_in and self.world.cluster.scheduler.current is not None and not self.world.engine.closed:
            self.world.trace.host(kinds.UNBAKE, buffer=buffer, graphs=baked_in)
        if home is None or used <= {home.name} or self.world.cluster.scheduler.current is None:
            return
        if self.world.cluster.scheduler.current.rank != self.rank or self.world.engine.closed:
            return
        self._launch_free(buffer, home)

    def _launch_free(self, buffer: int, home: SimStream) -> None:
        nbytes = self.world.engine.trace.buffers[buffer].nbytes
        home.launch(
            Work(kind=kinds.FREE, name="free", writes=(Access.interval(buffer, 0, nbytes),), attrs={"buffer": buffer})
        )


class NumericTensors:
    """`dbo.contract.world.Tensors` over torch tensors on `sim`."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def from_numpy(self, array: np.ndarray, name: str) -> torch.Tensor:
        return tensors.to_sim(np.ascontiguousarray(array), self.world.rank)

    def from_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor's values on the device, by a queued copy."""
        return tensors.to_sim(tensor, self.world.rank)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed array: a write on the current stream."""
        return torch.zeros(tuple(shape), dtype=dtype, device=f"sim:{self.world.rank}")

    def to_host(self, array: torch.Tensor, why: str) -> np.ndarray:
        with tensors.declared_host_read(why):
            host = array.cpu()
        return host.float().numpy() if host.is_floating_point() else host.numpy()

    def cat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def rows(self, array: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return array[start:stop]

    def take(self, array: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        return array.index_select(0, self.from_numpy(index, "rows"))

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record_stream(self, array: torch.Tensor, stream: Stream) -> None:
        self.world.device.record_stream(tensors.accesses(array).buffer, own(stream, SimStream))

    # -- for collectives ------------------------------------------------------------------------------------------

    def access(self, array: torch.Tensor) -> Access:
        return tensors.accesses(array)

    def itemsize(self, array: torch.Tensor) -> int:
        return array.element_size()

    def mover(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> NumericMover:
        return NumericMover(output, input, output_splits, input_splits)


class NumericMover:
    """One member's rows of an `all_to_all_single`."""

    def __init__(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        self._output, self._input = tensors.raw(output), tensors.raw(input)
        self._output_splits, self._input_splits = output_splits, input_splits

    @torch.inference_mode()
    def block(self, peer: int) -> torch.Tensor:
        """The rows for `peer`, as they are now."""
        return self._input.split(self._input_splits)[peer].clone()

    @torch.inference_mode()
    def deliver(self, blocks: Sequence[torch.Tensor]) -> None:
        """Write the peers' rows, by rank."""
        for part, block in zip(self._output.split(self._output_splits), blocks, strict=True):
            part.copy_(block)


def release() -> None:
    """The run is over: no device stands behind `sim` any more."""
    tensors.unregister_all()
