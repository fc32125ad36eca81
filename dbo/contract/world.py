"""The contract between the overlap system and the world it runs in.

`sim` and `gpu` each provide a `World` per rank; `dbo` uses nothing else of them. Method names are torch's own where torch
has the thing. "Host task" is the caller's thread: the rank's main task or one of its ubatch threads.

Legal during graph capture: launching work, `record`, `wait_event`, `all_to_all_single`, batons, points. Not legal:
`synchronize`, `query`, host collectives (`all_reduce`, `all_gather_object`), `Tensors.to_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from dbo.dcp.interface import ContextParallel, DCPShape


class Event(Protocol):
    """A marker in a stream. Waiting for an event that was never recorded does nothing, as in CUDA."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the tail of `stream` (default: the caller's current stream)."""

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of `stream` (default: current) wait for the last record made before this call."""

    def query(self) -> bool:
        """True when the work before the last record is done. A choice point in the simulator."""

    def synchronize(self) -> None:
        """Block the calling host task until the work before the last record is done."""


class Stream(Protocol):
    """A FIFO queue of device work. `name` is its line in the trace."""

    @property
    def name(self) -> str: ...

    def wait_event(self, event: Event) -> None:
        """Later work here waits for `event`."""

    def wait_stream(self, stream: Stream) -> None:
        """Later work here waits for what `stream` holds now."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event` (a new one by default) here and return it."""

    def synchronize(self) -> None:
        """Block the calling host task until everything queued here is done."""


class Baton(Protocol):
    """A binary semaphore with one owner at a time; the ring's hand-over."""

    def give(self) -> None:
        """Let one `take` return. Never blocks."""

    def take(self) -> None:
        """Block the calling host task until somebody gives; consumes it."""


class Barrier(Protocol):
    """`parties` host tasks meet."""

    @property
    def aborted(self) -> bool:
        """`abort` was called."""

    def wait(self) -> None:
        """Block until all parties have come.

        Raises:
            RingError: `abort` was called, before or during the wait.
        """

    def abort(self) -> None:
        """Wake everybody with an error."""


class Worker(Protocol):
    """A long-lived host task that runs one function after another."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` in the worker's task. The previous work must be done."""

    def join(self) -> None:
        """Block until the submitted work has ended; never raises what the work raised."""


class Host(Protocol):
    """Host tasks of one rank and what they synchronise with."""

    def baton(self, name: str) -> Baton: ...
    def barrier(self, parties: int, name: str) -> Barrier: ...
    def worker(self, name: str) -> Worker:
        """A new worker; `name` is its line in the trace ("u0", "u1", …)."""


class Group(Protocol):
    """A communicator over ranks.

    `all_reduce` and `all_gather_object` are host-level (they block the calling task, as gloo does);
    `all_to_all_single` is device-level: it queues on the caller's current stream.
    """

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, table: np.ndarray, *, tag: int) -> np.ndarray:
        """SUM of `table` (int32) over the group. `tag` names the step and travels in the trace."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Everybody's JSON-able `value`, by rank."""

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
    ) -> None:
        """Rows of `input` go to peers by `input_split_sizes`; rows from peers fill `output`. The output comes first."""


ArrayT = TypeVar("ArrayT")
"""What flows through the model: a torch tensor, or a symbol."""


class Tensors(Protocol[ArrayT]):
    """Between numpy and what flows through the model: torch tensors, or symbols in ordering mode."""

    def from_numpy(self, array: np.ndarray, name: str) -> ArrayT:
        """A device array with these values, written on the current stream."""

    def to_host(self, array: ArrayT, why: str) -> np.ndarray:
        """Wait for the current stream and read: a declared host read."""

    def cat(self, parts: Sequence[ArrayT]) -> ArrayT:
        """Join along axis 0."""

    def rows(self, array: ArrayT, start: int, stop: int) -> ArrayT:
        """Rows [start, stop): a view."""

    def take(self, array: ArrayT, index: np.ndarray) -> ArrayT:
        """Rows of `array` by `index`."""

    def copy_into(self, target: ArrayT, source: ArrayT) -> None:
        """Overwrite `target` with `source` on the current stream: how a graph gets its inputs."""

    def record_stream(self, array: ArrayT, stream: Stream) -> None:
        """`stream` uses `array`, too: its bytes are not handed out again before what is queued there by its end has run."""


class TorchTensors(Tensors[ArrayT], Protocol[ArrayT]):
    """Of worlds with numbers."""

    def from_torch(self, tensor: Any) -> ArrayT:
        """A CPU tensor's copy on the device, written on the current stream."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> ArrayT:
        """A device tensor of zeros; `dtype` is torch's."""


class SymbolicTensors(Tensors[ArrayT], Protocol[ArrayT]):
    """Of worlds in ordering mode: arrays have bytes but no values."""

    def empty(self, shape: Sequence[int], name: str) -> ArrayT:
        """A new array; `name` appears in reports."""

    def op(self, name: str, reads: Sequence[ArrayT], shape: Sequence[int], writes: Sequence[ArrayT] = ()) -> ArrayT:
        """Queue an operation that reads and writes these arrays, and return its result of `shape`."""


class Graph(Protocol):
    """A captured program of one rank."""

    def capture(self) -> AbstractContextManager[Any]:
        """Keep what is launched inside the block, from the current stream and those that join it.

        Raises:
            CaptureError: the program did what a capture forbids, or left a stream unjoined.
        """

    def replay(self, real_tokens: Sequence[int] = ()) -> None:
        """Launch it again. No other task wakes; `real_tokens` (by ubatch) is what sends carry in the trace."""


class TaskState(Protocol):
    """What a host task inherits from the one that started its work: context variables, grad and inference mode, …"""

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work(*args)` under the captured state; several tasks may do so at the same time."""


class Recorder(Protocol):
    """Writes host records; the world adds rank, line, time, step, ubatch and edges. See `dbo.trace` for the kinds.

    Attributes:
        keeps: somebody will read them; where not, what is long need not be described.
    """

    @property
    def keeps(self) -> bool: ...

    def host(self, kind: str, name: str = "", **attrs: Any) -> None: ...


class World(Protocol):
    """Everything a rank's program may touch.

    Attributes:
        rank, size: this rank among all ranks.
        mode: "numeric" or "ordering".
        compute, comm: the two streams, shared by the rank's ubatches.
        side: a third one, for shared experts that are placed there (`dbo.moe.side_stream`).
        group: all ranks, device exchanges. `control`: all ranks, host-level coordination.
        low_latency: DeepEP's `Buffer`, or the simulator's with the same two methods.
        high_throughput: DeepEP V1's `Buffer`, or the simulator's with the methods of its normal mode.
        elastic: DeepEP V2's `ElasticBuffer`, or the simulator's. With both libraries `comm` is their comm stream.
        symmetric: symmetric memory and copy engines (`dbo.moe.symm_copy.SymmetricCopies`).
        row_ops: the device work around the exchanges of backend `nccl` (`dbo.moe.nccl.RowOps`) and after those of
            `deepep_v2` (`dbo.moe.deepep_v2.ValidRows`).
        copy_rows: the device work around the copies of backend `symm_copy` (`dbo.moe.symm_copy.CopyRows`).
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def compute(self) -> Stream: ...
    @property
    def comm(self) -> Stream: ...
    @property
    def side(self) -> Stream: ...
    @property
    def group(self) -> Group: ...
    @property
    def control(self) -> Group: ...
    @property
    def host(self) -> Host: ...
    @property
    def tensors(self) -> Tensors[Any]: ...
    @property
    def trace(self) -> Recorder: ...
    @property
    def low_latency(self) -> Any: ...
    @property
    def high_throughput(self) -> Any: ...
    @property
    def elastic(self) -> Any: ...
    @property
    def symmetric(self) -> Any: ...
    @property
    def row_ops(self) -> Any: ...
    @property
    def copy_rows(self) -> Any: ...

    def event(self, name: str) -> Event:
        """A new event; `name` appears in reports."""

    def context_parallel(self, shape: DCPShape) -> ContextParallel:
        """This rank's end of its DCP group; called once, on all ranks, before the first step."""

    def new_graph(self, name: str) -> Graph:
        """An empty graph."""

    def current_stream(self) -> Stream:
        """The calling task's current stream."""

    def set_stream(self, stream: Stream) -> None:
        """Make `stream` current for the calling task."""

    def at_point(self, point: str, *, layer: int) -> None:
        """Work that the calling task launches from now on belongs to `point` of `layer`."""

    def launches(self) -> None:
        """Work at the calling task's point follows on its current stream, where that is not plain from the point alone.

        For worlds that see points, not single operations.
        """

    def in_ubatch(self, ubatch: int, *, step: int) -> None:
        """The calling task now works for `ubatch` (-1: for no ubatch) of `step`."""

    def tags(self) -> Any:
        """The calling task's (step, layer, ubatch, point), to be given to `restore_tags`."""

    def restore_tags(self, tags: Any) -> None: ...

    def set_real_tokens(self, tokens: int) -> None:
        """The calling task now works for a (u)batch of so many real tokens; sends carry it in the trace."""

    def task_state(self) -> TaskState:
        """The calling task's state."""

    def fail(self, error: BaseException) -> None:
        """This rank ends its step with `error`: pending exchanges of its peers fail with `PeerFailed`."""

    def recover(self, step: int) -> int:
        """Meet all ranks after a failed step, restart communicators under a new epoch, return the next step number."""


def torch_tensors(world: World) -> TorchTensors[Any]:
    """The tensors of a world in numeric mode."""
    return cast(TorchTensors[Any], world.tensors)


def symbolic_tensors(world: World) -> SymbolicTensors[Any]:
    """The arrays of a world in ordering mode."""
    return cast(SymbolicTensors[Any], world.tensors)
