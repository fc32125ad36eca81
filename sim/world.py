"""The simulated machine: a `Cluster` of ranks, and the `World` that each rank's program receives.

    result = launch(program, ranks=2)          # program(world) runs once a rank
    result.trace, result.values, result.errors

The happy path is one canonical run; who runs next is the scheduler's `Strategy`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

from dbo.contract.own import own
from dbo.contract.task_state import ContextState
from dbo.contract.world import Stream
from dbo.dcp.interface import DCPShape
from dbo.trace import Trace, kinds
from dbo.trace.collector import collector_paused
from sim.alltoall.copy_symbols import SymbolCopyPayload, SymbolCopyRows
from sim.alltoall.elastic import ElasticBuffer
from sim.alltoall.flat_symbols import SymbolFlatPayload
from sim.alltoall.high_throughput import HighThroughputBuffer
from sim.alltoall.low_latency import Exchange, LowLatencyBuffer, SymbolPayload, SymmetricWindow
from sim.alltoall.symmetric import SymmetricMemory
from sim.alltoall.symmetric_memory import Fabric
from sim.collectives import DeviceMeeting, HostMeeting, SimGroup, peer_failed
from sim.cost import CostTable
from sim.dcp.fabric import DirectFabric
from sim.engine import Engine, Node
from sim.graph import SimGraph
from sim.host import SimBarrier, SimBaton, SimWorker
from sim.streams import SimEvent, SimStream
from sim.symbols import SymbolRowOps, SymbolTensors
from sim.tasks import Scheduler, Strategy, Task, TaskKilled
from sim.work import Work

Tags = tuple[int, int, int, str]


@dataclass(kw_only=True)
class SimRun:
    """What a run left: the trace, and per rank what the program returned or raised."""

    trace: Trace = field(repr=False)
    values: list[Any] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=list)
    deadlocked: bool = False
    switches: int = 0
    device_operations: int = 0

    @property
    def ticks(self) -> int:
        """Moves of the simulator: task switches and device operations."""
        return self.switches + self.device_operations


class Cluster:
    """All ranks: scheduler, engine, and what they share (collectives, epochs, failures)."""

    def __init__(self, ranks: int, *, mode: str, vehicle: str, strategy: Strategy | None, cost: CostTable) -> None:
        self.trace = Trace(meta={"world": "sim", "ranks": ranks, "mode": mode, "complete": True})
        self.engine = Engine(self.trace, cost)
        self.scheduler = Scheduler(
            vehicle=vehicle, strategy=strategy, idle=self.engine.progress, on_deadlock=self._deadlock
        )
        self.engine.scheduler = self.scheduler
        self.cost = cost
        self.mode = mode
        self.size = ranks
        self.epoch = 0
        self.host_meetings: dict[Any, HostMeeting] = {}
        self.device_meetings: dict[Any, DeviceMeeting] = {}
        self.exchanges: dict[tuple[int, int], Exchange] = {}
        self.fabric = Fabric(self)
        self.direct_fabric = DirectFabric(self)
        self.low_latency_windows = tuple(SymmetricWindow(self, f"low_latency.recv{i}") for i in range(2))
        self.failed: dict[int, BaseException] = {}
        self.recovering: dict[int, tuple[int, Task]] = {}
        self.deadlocked = False
        self.worlds = [SimWorld(self, rank) for rank in range(ranks)]

    def spawn(self, world: SimWorld, work: Callable[[], None], line: str, *, daemon: bool = False) -> Task:
        """A host task of `world`; it starts with the world's compute stream current."""
        task = self.scheduler.spawn(work, rank=world.rank, line=line, daemon=daemon)
        task.stream = world.compute
        return task

    # -- meetings ---------------------------------------------------------------------------------------------------

    def open_meet(self, group: str, index: int) -> Node:
        """A node that ends when all members have come; it starts held."""
        node = self.engine.node(
            Work(kind=kinds.MEET, name=f"{group}#{index}", attrs={"group": group, "index": index}),
            rank=-1,
            line=group,
            tags=(-1, -1, -1, ""),
            held=True,
        )
        node.members = {}
        return node

    def join_meet(self, meet: Node, member: Node, rank: int) -> None:
        """`meet` cannot end before `member`."""
        assert meet.members is not None
        meet.members[rank] = member
        self.engine.depend(meet, member)

    def host_meet(self, group: str, index: int, after: Sequence[int], at_us: float) -> int:
        """The record of a host-level meeting that is complete."""
        from dbo.trace import Record

        record = Record(
            self.engine.new_id(),
            -1,
            group,
            kinds.MEET,
            f"{group}#{index}",
            t_us=at_us,
            after=tuple(after),
            attrs={"group": group, "index": index},
        )
        self.trace.records.append(record)
        return record.id

    def low_latency_exchange(self, call: int) -> Exchange:
        """The meeting of call number `call` in this epoch."""
        key = (self.epoch, call)
        if key not in self.exchanges:
            self.exchanges[key] = Exchange(self.open_meet("low_latency", call))
        return self.exchanges[key]

    # -- failures ---------------------------------------------------------------------------------------------------

    def check_peers(self, rank: int) -> None:
        """Raise `PeerFailed` when another rank has failed in this epoch."""
        for peer, error in self.failed.items():
            if peer != rank:
                raise peer_failed(peer, error)

    def fail(self, rank: int, error: BaseException) -> None:
        """`rank` ends its step with `error`: whoever waits for an exchange wakes with `PeerFailed`."""
        self.failed.setdefault(rank, error)
        for task in self.scheduler.tasks:
            if task.rank != rank and task.waits is not None and task.waits[0] in ("collective", "device"):
                self.scheduler.raise_in(task, peer_failed(rank, error))

    def recover(self, world: SimWorld, step: int) -> int:
        """All ranks meet after a failed step; communicators restart in a new epoch."""
        self.recovering[world.rank] = (step, world.task())
        epoch = self.epoch
        if len(self.recovering) == self.size:
            self._restart()
        while self.epoch == epoch:
            self.scheduler.block(("recover", step))
        return self._agreed

    def _restart(self) -> None:
        """Let the devices run dry, forget what can never run, and begin a new epoch after all of that."""
        # What does not depend on the failed exchanges still runs, as it would on devices: uploads, earlier steps.
        self.engine.progress(until_ready=False)
        self.engine.drop(self.engine.unfinished())
        self.engine.errors.clear()
        tasks = [self.recovering[world.rank][1] for world in self.worlds]
        # The last that ran on each device line; a stream's tail may lie behind something that never can.
        last = {(record.rank, record.line): record.id for record in self.trace.records if record.on_device}
        records = []
        for world, task in zip(self.worlds, tasks, strict=True):
            task.edges += [record for (rank, _), record in last.items() if rank == world.rank]
            records.append(self.engine.host_record(task, kinds.RECOVER, attrs={"epoch": self.epoch + 1}))
        meet = self.host_meet("recover", self.epoch, records, max(task.now_us for task in tasks))
        self.host_meetings.clear()
        self.device_meetings.clear()
        self.exchanges.clear()
        self.failed.clear()
        self.epoch += 1
        self._agreed = 1 + max(step for step, _ in self.recovering.values())
        self.recovering.clear()
        for world, task in zip(self.worlds, tasks, strict=True):
            world.restart()
            task.edges.append(meet)
            if task.waits is not None and task.waits[0] == "recover":
                self.scheduler.wake(task)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _deadlock(self, stuck: list[Task]) -> None:
        """Write what every blocked line waits for; detectors and reports read it from the trace."""
        from sim.stuck import blocked_records

        self.deadlocked = True
        self.trace.meta["complete"] = False
        self.trace.records.extend(blocked_records(self, stuck))
        self.engine.closed = True


class SimWorld:
    """One rank's world; see `dbo.contract.world.World`."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster = cluster
        self.engine = cluster.engine
        self.cost = cluster.cost
        self.rank = rank
        self.size = cluster.size
        self.mode = cluster.mode
        self.compute = SimStream(self, "compute")
        self.comm = SimStream(self, "comm")
        self.side = SimStream(self, "side")
        self.net_tail: Node | None = None
        self.capture: SimGraph | None = None
        self.replaying: SimGraph | None = None
        self.replay_real_tokens: list[int] = []
        self.graphs: list[SimGraph] = []
        self.group = SimGroup(self, "ep")
        self.control = SimGroup(self, "dp.cpu")
        self.host = SimHost(self)
        self.trace = SimRecorder(self)
        self.device: Any = None
        if self.mode == "numeric":
            from dbo.moe.row_ops import TorchRowOps
            from sim.alltoall.copy_numeric import FusedCopyRows, NumericCopyPayload
            from sim.alltoall.flat_numeric import NumericFlatPayload
            from sim.alltoall.numeric_payload import NumericPayload
            from sim.numeric import NumericDevice, NumericTensors

            self.device = NumericDevice(self)
            self.tensors: Any = NumericTensors(self)
            payload: Any = NumericPayload(self)
            self.row_ops: Any = TorchRowOps()
            flat: Any = NumericFlatPayload(self)
            copies: Any = NumericCopyPayload(self)
            self.copy_rows: Any = FusedCopyRows(self)
        else:
            self.tensors = SymbolTensors(self)
            payload = SymbolPayload(self)
            self.row_ops = SymbolRowOps(self)
            flat, copies = SymbolFlatPayload(self), SymbolCopyPayload(self)
            self.copy_rows = SymbolCopyRows(self)
        self.low_latency = LowLatencyBuffer(self, payload)
        self.high_throughput = HighThroughputBuffer(self, flat)
        self.elastic = ElasticBuffer(self, flat)
        self.symmetric = SymmetricMemory(self, copies, cluster.fabric)
        self.restarted: list[Callable[[], None]] = []

    def context_parallel(self, shape: DCPShape) -> Any:
        """See `dbo.contract.world.World`."""
        from sim.dcp.build import context_parallel

        return context_parallel(self, shape)

    def task(self) -> Task:
        """The calling host task."""
        task = self.cluster.scheduler.current
        if task is None:
            raise RuntimeError("a world is used by its rank's host tasks: run the program with sim.world.launch")
        return task

    def restart(self) -> None:
        """A new epoch: streams are empty, calls are counted from 0."""
        for stream in (self.compute, self.comm, self.side):
            stream.tail = None
        self.net_tail = None
        self.group.restart()
        self.control.restart()
        self.low_latency.restart()
        self.high_throughput.restart()
        self.elastic.restart()
        self.symmetric.restart()
        for restart in self.restarted:
            restart()

    def event(self, name: str) -> SimEvent:
        return SimEvent(self, name)

    def new_graph(self, name: str) -> SimGraph:
        return SimGraph(self, name)

    def refuse_in_capture(self, what: str) -> None:
        """Raise `CaptureError` while a capture is open on this rank."""
        if self.capture is not None:
            self.capture.refuse(what, "do it before the capture or after the replay")

    def current_stream(self) -> SimStream:
        return self.task().stream

    def set_stream(self, stream: Stream) -> None:
        self.task().stream = own(stream, SimStream)

    def wait_current_stream(self, why: str, *, declared: bool) -> None:
        """Block the calling task until its current stream is empty; a host read."""
        self.refuse_in_capture(f"host read ({why})")
        task = self.task()
        self.cluster.check_peers(self.rank)
        tail = self.current_stream().tail
        if tail is not None:
            self.engine.wait_host(task, tail, why)
        self.engine.host_record(task, kinds.HOST_WAIT, self.current_stream().name, {"why": why, "declared": declared})

    def at_point(self, point: str, *, layer: int) -> None:
        task = self.task()
        task.tags = (task.tags[0], layer, task.tags[2], point)

    def launches(self) -> None:
        """Every operation is seen here."""

    def in_ubatch(self, ubatch: int, *, step: int) -> None:
        self.task().tags = (step, -1, ubatch, "")

    def tags(self) -> Tags:
        return self.task().tags

    def restore_tags(self, tags: Tags) -> None:
        self.task().tags = tags

    def real_tokens(self) -> int:
        """Real tokens of the (u)batch that the calling task works for."""
        if self.replaying is not None and self.replay_real_tokens:
            return self.replay_real_tokens[max(self.task().tags[2], 0)]
        return int(self.task().attrs.get("real_tokens", 0))

    def set_real_tokens(self, tokens: int) -> None:
        """Told by the wrapper when a task starts on a (u)batch; sends carry it in the trace."""
        self.task().attrs["real_tokens"] = tokens

    def task_state(self) -> Any:
        if self.mode == "numeric":
            from dbo.contract.torch_task_state import TorchTaskState

            return TorchTaskState()
        return ContextState()

    def fail(self, error: BaseException) -> None:
        self.cluster.fail(self.rank, error)

    def recover(self, step: int) -> int:
        return self.cluster.recover(self, step)

    def source(self) -> str:
        """ "package/file.py:line" of the nearest caller outside the simulator."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = _path_of(frame.f_globals.get("__name__", ""))
            if path:
                return f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


@cache
def _path_of(module: str) -> str:
    """The file of a module as reports show it; empty for the simulator and what lies between it and its caller."""
    return "" if module.startswith(("sim.", "torch", "contextlib")) else f"{module.replace('.', '/')}.py"


class SimHost:
    """Makes batons, barriers and workers of one rank."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def baton(self, name: str) -> SimBaton:
        return SimBaton(self._world, name)

    def barrier(self, parties: int, name: str) -> SimBarrier:
        return SimBarrier(self._world, parties, name)

    def worker(self, name: str) -> SimWorker:
        return SimWorker(self._world, name)


class SimRecorder:
    """Host records of one rank."""

    keeps = True

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def host(self, kind: str, name: str = "", **attrs: Any) -> None:
        self._world.engine.host_record(self._world.task(), kind, name, attrs)


def launch(
    program: Callable[[Any], Any],
    *,
    ranks: int,
    mode: str = "numeric",
    vehicle: str | None = None,
    strategy: Strategy | None = None,
    cost: CostTable | None = None,
) -> SimRun:
    """Run `program(world)` on every rank of a simulated machine, to the end or to a deadlock.

    Args:
        mode: "numeric" (torch tensors, OS threads) or "ordering" (symbols, no torch).
        vehicle: "thread" or "greenlet"; by default threads in numeric mode and greenlets in ordering mode.
    """
    chosen = vehicle or ("thread" if mode == "numeric" else "greenlet")
    cluster = Cluster(ranks, mode=mode, vehicle=chosen, strategy=strategy, cost=cost or CostTable())
    values: list[Any] = [None] * ranks

    def main(world: SimWorld) -> None:
        try:
            values[world.rank] = program(world)
        except Exception as error:  # it ends this rank's program; the trace says so, too
            world.trace.host(kinds.ERROR, type(error).__name__, type=type(error).__name__, message=str(error))
            raise

    tasks = [cluster.spawn(w, lambda w=w: main(w), "main") for w in cluster.worlds]  # type: ignore[misc]
    if mode == "numeric":
        from sim.numeric import release

        cluster.scheduler.run()
        release()
    else:
        with collector_paused():  # not with numbers: there it frees tensors
            cluster.scheduler.run()
    errors = [None if isinstance(t.error, TaskKilled) else t.error for t in tasks]
    return SimRun(
        trace=cluster.trace,
        values=values,
        errors=errors,
        deadlocked=cluster.deadlocked,
        switches=cluster.scheduler.switches,
        device_operations=cluster.engine.executed,
    )
