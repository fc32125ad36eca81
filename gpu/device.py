"""`GpuWorld`: the contract's `World` for one process (needs torch): a rank, its device, streams and communicators."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from dbo.contract.task_state import ContextState
from dbo.contract.world import TaskState
from dbo.dcp.interface import ContextParallel, DCPShape
from dbo.errors import CaptureError, NotAvailable, PeerFailed
from dbo.export.profile import range_name
from dbo.trace import kinds
from dbo.ubatching.forward_context import get_forward_context
from gpu.alltoall.gloo_low_latency import GlooLowLatency
from gpu.group import DistGroup
from gpu.host.threads import ThreadHost
from gpu.record.ranges import Ranges
from gpu.record.recorder import QUIET_POINTS, HostTask, RankRecorder, Tags, now_us
from gpu.streams import CudaEvent, CudaStream, HostEvent, HostStream
from gpu.tensors import DeviceTensors, StreamTaskState, copy_rows, row_ops
from gpu.watch.flight_recorder import DEVICE, Board

if TYPE_CHECKING:
    from gpu.launch.process import Groups


class GpuWorld:
    """See `dbo.contract.world.World`.

    Args:
        rank, size: this rank among all.
        device: `cpu` (work runs at once) or a CUDA device, which is current in this process.
        groups: the process groups.
        board: of the run, or None: nobody watches.
        keep_trace: record; without it only the board is written.
        shared: other ranks use the same device, so how long an exchange takes says nothing.
        vehicle: ubatches are threads ("thread") or greenlets on the main thread ("greenlet").

    Attributes:
        at_end: called when the program has returned and the device is done: what may still raise.
    """

    mode = "numeric"

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        groups: Groups,
        board: Board | None,
        keep_trace: bool = True,
        shared: bool = False,
        vehicle: str = "thread",
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.asynchronous = device.type == "cuda"
        self.measures = self.asynchronous and not shared
        self._ranges = Ranges(nvtx=self.asynchronous)
        self.process_groups = groups
        self.board = board
        self.rows = board.rank(rank) if board is not None else None
        self.trace = RankRecorder(rank, self.rows, place=_place_in_schedule, stamp=self._stamp, keep=keep_trace)
        self.compute: Any = self._stream("compute")
        self.comm: Any = self._stream("comm")
        self.side: Any = self._stream("side")
        self.counters: dict[str, int] = {}
        self.at_end: list[Callable[[], None]] = []
        self.trace.start_line("main", self.compute)
        self._enter_thread()
        self.group = DistGroup(self, "ep", groups.data)
        self.control = DistGroup(self, "dp.cpu", groups.control)
        self.host: Any = self._make_host(vehicle)
        self.tensors = DeviceTensors(self)
        self.row_ops = row_ops(self)
        self.copy_rows = copy_rows(self)
        self._error: BaseException | None = None
        self.unread: Any = None
        if self.asynchronous:
            self._base = torch.cuda.Event(enable_timing=True)
            self._base.record(self.compute.cuda)
            self._base.synchronize()
            self._base_us = now_us()

    # -- times inside graphs ----------------------------------------------------------------------------------------

    @cached_property
    def stamps(self) -> Any:
        """The clock that graphs write, or None without triton: replays then leave no records."""
        if importlib.util.find_spec("triton") is None:
            return None
        from gpu.record.stamp import Stamps

        return Stamps(self.device)

    def collect_stamps(self) -> None:
        """Read the times of the last replay. Blocks until it has ended."""
        graph, self.unread = self.unread, None
        if graph is not None:
            self.compute.drain()
            graph.collect(self.stamps.read_us())

    # -- exchanges --------------------------------------------------------------------------------------------------

    @cached_property
    def low_latency(self) -> Any:
        """DeepEP's `Buffer` in low-latency mode, made with the first call; on CPU tensors an exchange over gloo."""
        if not self.asynchronous:
            return GlooLowLatency(self, self.process_groups.low_latency)
        from gpu.alltoall.deepep_v1 import DeepEPLowLatency

        return DeepEPLowLatency(self, self.process_groups.low_latency)

    @cached_property
    def high_throughput(self) -> Any:
        """DeepEP's `Buffer` in normal mode.

        Raises:
            NotAvailable: there is no such library here, or no device.
        """
        self._refuse_on_cpu("deepep_high_throughput")
        from gpu.alltoall.deepep_v1 import DeepEPHighThroughput

        return DeepEPHighThroughput(self, self.process_groups.low_latency)

    @cached_property
    def elastic(self) -> Any:
        """DeepEP V2's `ElasticBuffer`.

        Raises:
            NotAvailable: there is no such library here, or no device a rank.
        """
        self._refuse_on_cpu("deepep_v2")
        from gpu.alltoall.deepep_v2 import DeepEPElastic

        return DeepEPElastic(self, self.process_groups.data)

    @cached_property
    def symmetric(self) -> Any:
        """Copies between ranks through symmetric memory; on CPU tensors an exchange over gloo."""
        if self.asynchronous:
            from gpu.alltoall.symmetric_copies import DeviceCopies

            return DeviceCopies(self, self.process_groups.data, self.process_groups.low_latency)
        from gpu.alltoall.gloo_copies import GlooCopies

        return GlooCopies(self, self.process_groups.low_latency)

    def context_parallel(self, shape: DCPShape) -> ContextParallel:
        """This rank's end of its DCP group; called once, on all ranks, before the first step.

        Raises:
            NotAvailable: ranks share a device, or the direct exchange is asked for on CPU tensors.
        """
        from gpu.dcp.group import context_parallel

        return context_parallel(self, shape)

    def _refuse_on_cpu(self, backend: str) -> None:
        if not self.asynchronous:
            fix = "on CPU tensors use --all2all-backend nccl, symm_copy or deepep_low_latency"
            raise NotAvailable.of(f"the library of {backend} runs on devices", fix=fix, device=self.device)

    def next_index(self, group: str) -> int:
        """The number of this rank's next exchange in `group`."""
        index = self.counters.get(group, 0)
        self.counters[group] = index + 1
        return index

    # -- streams and events -----------------------------------------------------------------------------------------

    def event(self, name: str) -> Any:
        return CudaEvent(self, name, torch.cuda.Event()) if self.asynchronous else HostEvent(self, name)

    def new_graph(self, name: str) -> Any:
        """An empty CUDA graph.

        Raises:
            NotAvailable: CPU tensors have none.
        """
        if not self.asynchronous:
            rule = "graphs are CUDA graphs"
            raise NotAvailable.of(rule, fix="use --cudagraph-mode NONE, or a device", device=self.device)
        from gpu.graph import CudaGraph

        return CudaGraph(self, name)

    def current_stream(self) -> Any:
        return self.trace.task.stream

    def set_stream(self, stream: Any) -> None:
        self.trace.task.stream = stream
        if self.asynchronous:
            torch.cuda.set_stream(stream.cuda)

    def host_wait(self, stream: Any, why: str) -> None:
        """Block the calling thread until `stream` is empty, and say so on the board and in the trace."""
        task = self.trace.task
        self.trace.end_visit(task)
        if self.trace.capturing:
            rule = "the host cannot wait for a stream that is being captured"
            raise CaptureError.of(rule, fix="read it after the replay", stream=stream.name, why=why)
        if self.asynchronous:
            self.trace.waits(DEVICE, f"{stream.name}: {why}")
            stream.drain()
            self.trace.goes_on()
            self.collect_stamps()
        self.trace.after_all_of(stream)
        self.trace.on_line(kinds.HOST_WAIT, stream.name, {"why": why, "declared": True})

    def _stream(self, name: str) -> Any:
        if not self.asynchronous:
            return HostStream(self, name)
        # An exchange begins with small kernels. Behind the blocks of a large product its bytes would start late.
        priority = -1 if name == "comm" else 0
        return CudaStream(self, name, torch.cuda.Stream(self.device, priority=priority))

    def _make_host(self, vehicle: str) -> Any:
        if vehicle == "thread":
            return ThreadHost(self.trace, self.compute, self._enter_thread)
        if importlib.util.find_spec("greenlet") is None:
            rule = "ubatches are greenlets only where greenlet is installed"
            raise NotAvailable.of(rule, fix="install greenlet, or use threads", vehicle=vehicle)
        from gpu.host.greenlets import GreenletHost

        return GreenletHost(self.trace, self._resume, self.compute)

    def _resume(self, stream: Any) -> None:
        """A host line that shares its thread with others goes on."""
        if self.asynchronous:
            torch.cuda.set_stream(stream.cuda)

    def _enter_thread(self) -> None:
        """The calling thread begins to work for this world."""
        if self.asynchronous:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.compute.cuda)

    # -- where a line stands ----------------------------------------------------------------------------------------

    def at_point(self, point: str, *, layer: int) -> None:
        task = self.trace.task
        self._mark(task, point, layer)
        self.trace.end_visit(task)
        task.tags = (task.tags[0], layer, task.tags[2], point)
        if point:
            self.trace.on_line(kinds.POINT, point, {})
        self.trace.notice(task, at_point=True)
        if point not in QUIET_POINTS:
            self.trace.launches()

    def launches(self) -> None:
        self.trace.launches()

    def _mark(self, task: HostTask, point: str, layer: int = -1) -> None:
        """For profilers, a range around what the line launches until its next point."""
        if task.range is not None:
            self._ranges.close(task.range)
            task.range = None
        if point and self._ranges.wanted:
            step, _, ubatch, _ = task.tags
            task.range = self._ranges.open(range_name(self.rank, ubatch, point, step, layer))

    def in_ubatch(self, ubatch: int, *, step: int) -> None:
        task = self.trace.task
        self._mark(task, "")
        self.trace.end_visit(task)
        task.tags, task.own = (step, -1, ubatch, ""), (-1, "")
        self.trace.notice(task)

    def tags(self) -> Tags:
        return self.trace.task.tags

    def restore_tags(self, tags: Tags) -> None:
        task = self.trace.task
        self.trace.end_visit(task)
        task.tags = tags
        self._mark(task, tags[3], tags[1])

    def set_real_tokens(self, tokens: int) -> None:
        self.trace.task.real_tokens = tokens

    def task_state(self) -> TaskState:
        return StreamTaskState(self) if isinstance(self.host, ThreadHost) else ContextState()

    # -- failures ---------------------------------------------------------------------------------------------------

    @contextmanager
    def peers_may_fail(self) -> Iterator[None]:
        """Around a wait for other ranks: what the library raises when one is gone becomes `PeerFailed`."""
        try:
            yield
        except RuntimeError as error:
            peer, why = self.board.failed_peer(self.rank) if self.board is not None else (-1, "")
            if peer < 0 and "onnection" not in str(error):
                raise
            raise PeerFailed(peer, why or str(error).partition("\n")[0]) from error

    def fail(self, error: BaseException) -> None:
        """Remember what ended the step; `recover` ends the rank with it."""
        self._error = error
        if self.rows is not None and not isinstance(error, PeerFailed):
            self.rows.find(self.tags(), "error", f"{type(error).__name__}: {error}")

    def recover(self, step: int) -> int:
        """On devices a failed step ends the rank, and the launcher ends the others: there is no next step.

        Raises:
            BaseException: the error that `fail` was told.
        """
        if self._error is None:
            raise RuntimeError("a step recovers only after it has failed")
        raise self._error

    def forgive(self) -> None:
        """Forget what failed: whoever called `fail` by itself, on every rank alike, goes on. A collective call."""
        self._error = None
        if "symmetric" in self.__dict__:
            self.symmetric.restart()

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the worker threads and fill in the times of device work."""
        if self.asynchronous:
            torch.cuda.synchronize(self.device)
            self.collect_stamps()
        for check in self.at_end:
            check()
        self.host.close()
        self.trace.resolve(self._to_us)

    def _stamp(self, stream: Any) -> Any:
        if not self.asynchronous:
            return now_us()
        if self.trace.capturing:
            return self.stamps.mark(stream)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream.cuda)
        return event

    def _to_us(self, stamp: Any) -> float:
        if isinstance(stamp, float):
            return stamp
        return self._base_us + 1000.0 * float(self._base.elapsed_time(stamp))


def _place_in_schedule() -> tuple[int, int]:
    """(yields, played_yields) of the calling ubatch; equal numbers outside of one."""
    try:
        player = get_forward_context().player
    except RuntimeError:
        return 0, 0
    context = getattr(player, "context", None)
    return (0, 0) if context is None else (context.yields, context.played_yields)
