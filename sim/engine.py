"""The devices of all ranks as one dataflow graph in virtual time.

Work is a `Node`: it may start when everything it depends on is done. A stream is a chain of nodes; an event is an edge; a
collective or an all-to-all is a `Meet`, a node without a stream that others depend on. The engine runs nodes in order of
time, only when no host task can run (the host races ahead of the device, as on real machines), and writes a record for
each when it is done. So the trace is topologically ordered by construction.

A compute node's `run` acts at its start. A communication node may also have `finish`, which acts at its end: it reads
its input early and writes its output late, so that a missing wait shows as stale or poisoned bytes, not only as a race.

A device has so many SMs. A node that takes some waits until they are free; whoever takes them frees them at its end, or
lets a later node do so (a kernel that spins until its peers come holds them over the meeting). Meanwhile the rank's compute
is slower: `sim.contention`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dbo.trace import BufferInfo, Record, Trace, kinds
from sim.contention import Crowd, Paced
from sim.tasks import Scheduler, Task

if TYPE_CHECKING:
    from sim.cost import CostTable
    from sim.work import Work

SMS_PER_DEVICE = 132


class Node:
    """One piece of device work. It is done when it ran, or was dropped after a failed step."""

    __slots__ = (
        "dependents",
        "done",
        "end_us",
        "finish",
        "members",
        "pending",
        "ready_us",
        "record",
        "run",
        "takes_sms",
        "frees_sms",
        "waiters",
        "occupies",
        "vacates",
        "paced",
    )

    def __init__(self, record: Record, pending: int, ready_us: float) -> None:
        self.record = record
        self.pending = pending
        self.ready_us = ready_us
        self.end_us = 0.0
        self.done = False
        self.run: Callable[[], None] | None = None
        self.finish: Callable[[], None] | None = None
        self.dependents: list[Node] = []
        self.waiters: list[Task] = []
        self.members: dict[int, Node] | None = None
        self.takes_sms = 0
        self.frees_sms = 0
        self.occupies: tuple[int, int] | None = None  # SMs and copy engines, from its start on
        self.vacates: tuple[int, int] | None = None  # the same, at its end
        self.paced: Paced | None = None


class Engine:
    """Nodes, buffers, the trace and the clock of one simulated machine."""

    def __init__(self, trace: Trace, cost: CostTable) -> None:
        self.trace = trace
        self.cost = cost
        self.scheduler: Scheduler | None = None
        self.closed = False
        self.errors: dict[int, Exception] = {}
        self.executed = 0
        self._heap: list[tuple[float, int, int, Node]] = []
        self._next_id = 0
        self._next_buffer = 0
        self._unfinished: dict[int, Node] = {}
        self.free_sms: dict[int, int] = {}
        self.starved: dict[int, list[Node]] = {}
        self.crowds: dict[int, Crowd] = {}

    # -- records of host tasks --------------------------------------------------------------------------------------

    def host_record(self, task: Task, kind: str, name: str = "", attrs: dict[str, Any] | None = None) -> int:
        """Append a record on the task's line, after whatever the task has synchronised with since its last record."""
        if self.closed:  # tasks are being unwound after a deadlock: the trace has ended
            return -1
        step, layer, ubatch, point = task.tags
        record = Record(
            self.new_id(),
            task.rank,
            task.line,
            kind,
            name,
            task.now_us,
            0.0,
            step,
            layer,
            ubatch,
            point,
            _in_order(task.edges),
            (),
            (),
            "",
            attrs or {},
        )
        task.edges = []
        self.trace.records.append(record)
        task.last_record = record.id
        return record.id

    def new_id(self) -> int:
        """The next record id: the order of issue."""
        self._next_id += 1
        return self._next_id - 1

    def new_buffer(self, rank: int, name: str, nbytes: int, owner: str = "") -> int:
        """Register a storage; its id appears in accesses."""
        number = self._next_buffer
        self._next_buffer += 1
        self.trace.buffers[number] = BufferInfo(number, rank, name, nbytes, owner)
        return number

    # -- building the graph -----------------------------------------------------------------------------------------

    def node(
        self,
        work: Work,
        *,
        rank: int,
        line: str,
        tags: tuple[int, int, int, str],
        issued_by: Task | None = None,
        stream_tail: Node | None = None,
        held: bool = False,
    ) -> Node:
        """Add a node. `stream_tail` is its predecessor in a FIFO (an edge the line itself implies), beside `work.after`."""
        edges = [n.record.id for n in work.after]
        ready_us = 0.0
        if issued_by is not None:
            ready_us = issued_by.now_us
            if issued_by.last_record >= 0:
                edges.append(issued_by.last_record)
            edges.extend(issued_by.edges)
        step, layer, ubatch, point = tags
        record = Record(
            self.new_id(),
            rank,
            line,
            work.kind,
            work.name,
            0.0,
            work.duration_us,
            step,
            layer,
            ubatch,
            point,
            _in_order(edges),
            work.reads,
            work.writes,
            work.src,
            work.attrs if work.attrs is not None else {},
        )
        node = Node(record, 0, ready_us)
        node.run = work.run
        node.finish = work.finish
        takes_sms, frees_sms, copies = work.takes_sms, work.frees_sms, work.copies
        if work.reserves:
            node.takes_sms, node.frees_sms = takes_sms, frees_sms
        if (takes_sms or frees_sms or copies) and self.cost.contention:
            node.occupies = (takes_sms, int(copies)) if takes_sms or copies else None
            node.vacates = (-frees_sms, -int(copies)) if frees_sms or copies else None
            if rank not in self.crowds:
                self.crowds[rank] = Crowd(self.cost, SMS_PER_DEVICE)
        depends = work.after if stream_tail is None else (*work.after, stream_tail)
        for other in depends:
            self.depend(node, other)
        self._unfinished[record.id] = node
        if held:
            node.pending += 1
        if node.pending == 0:
            self._push(node)
        return node

    def depend(self, node: Node, other: Node) -> None:
        """`node` starts after `other` ends. For a node that has not started."""
        if other.done:
            node.ready_us = max(node.ready_us, other.end_us)
        else:
            node.pending += 1
            other.dependents.append(node)

    def release_hold(self, node: Node) -> None:
        """Let a node that was made `held` start when its dependencies are done: the last member of a meet has come."""
        node.pending -= 1
        if node.pending == 0:
            self._push(node)

    # -- running ----------------------------------------------------------------------------------------------------

    def _push(self, node: Node) -> None:
        heapq.heappush(self._heap, (node.ready_us, node.record.id, 0, node))

    def progress(self, *, until_ready: bool = True) -> bool:
        """Run nodes until a host task becomes ready (or all that can). False when there was nothing to run."""
        scheduler = self.scheduler
        ran = False
        while self._heap and not (until_ready and scheduler is not None and scheduler.ready):
            at_us, _, phase, node = heapq.heappop(self._heap)
            record = node.record
            ran = True
            if node.done or (phase == 0 and node.takes_sms and not self._take_sms(node)):
                continue
            if phase == 0:
                record.t_us = at_us
                node.end_us = at_us + record.dur_us
                if node.run is not None:
                    self._act(node, node.run)
                    node.run = None
                if self.crowds and self._runs_beside(node, at_us):
                    continue
                if node.finish is not None or node.frees_sms or node.vacates:  # SMs are free when it ends, not before
                    heapq.heappush(self._heap, (node.end_us, record.id, 1, node))
                    continue
            else:
                if node.paced is not None and node.end_us != at_us:  # where the end was before an exchange moved it
                    continue
                if node.vacates is not None:
                    self._shift(record.rank, node.vacates, at_us)
                if node.finish is not None:
                    self._act(node, node.finish)
                    node.finish = None
            self._complete(node)
        return ran

    def _act(self, node: Node, act: Callable[[], None]) -> None:
        """Do a node's work. What it raises is a device error: the rank's host learns of it at its next wait, as in CUDA."""
        try:
            act()
        except Exception as error:
            self.errors.setdefault(node.record.rank, error)

    def _runs_beside(self, node: Node, at_us: float) -> bool:
        """Whether `node` is compute of a rank that exchanges: then it is open until its end, which may move."""
        record = node.record
        if node.occupies is not None:
            self._shift(record.rank, node.occupies, at_us)
            return False
        crowd = self.crowds.get(record.rank)
        if crowd is None or record.kind != kinds.OP or not record.dur_us:
            return False
        crowd.start(node, at_us)
        if node.finish is None:  # it takes effect at its start
            self.trace.records.append(record)
        heapq.heappush(self._heap, (node.end_us, record.id, 1, node))
        return True

    def _shift(self, rank: int, by: tuple[int, int], at_us: float) -> None:
        """An exchange of `rank` takes or gives back (SMs, copy engines)."""
        for moved in self.crowds[rank].change(*by, at_us):
            heapq.heappush(self._heap, (moved.end_us, moved.record.id, 1, moved))

    def _take_sms(self, node: Node) -> bool:
        """Take what the node needs, or let it wait for somebody to free some."""
        rank = node.record.rank
        free = self.free_sms.setdefault(rank, SMS_PER_DEVICE)
        if node.takes_sms > free:
            self.starved.setdefault(rank, []).append(node)
            return False
        self.free_sms[rank] = free - node.takes_sms
        return True

    def _free_sms(self, node: Node) -> None:
        rank = node.record.rank
        self.free_sms[rank] += node.frees_sms
        for waiting in self.starved.pop(rank, ()):
            waiting.ready_us = max(waiting.ready_us, node.end_us)
            self._push(waiting)

    def _complete(self, node: Node) -> None:
        node.done = True
        self.executed += 1
        del self._unfinished[node.record.id]
        if node.members is not None:  # set once: a tuple that grows with each of R members costs R * R
            node.record.after = tuple(member.record.id for member in node.members.values())
        if node.paced is not None:
            self.crowds[node.record.rank].running.remove(node)
        if node.paced is None or not node.paced.written:
            self.trace.records.append(node.record)
        end_us = node.end_us
        if node.frees_sms:
            self._free_sms(node)
        for other in node.dependents:
            if end_us > other.ready_us:
                other.ready_us = end_us
            other.pending -= 1
            if other.pending == 0:
                self._push(other)
        node.dependents = []
        if node.waiters and self.scheduler is not None:
            for task in node.waiters:
                self.scheduler.wake(task, end_us)
            node.waiters = []

    def wait_host(self, task: Task, node: Node, why: str) -> None:
        """Block `task` until `node` is done, and order the task after it.

        Raises:
            Exception: what work of this rank's device raised meanwhile; told once.
        """
        if not node.done:
            node.waiters.append(task)
            assert self.scheduler is not None
            self.scheduler.block(("device", node.record.line, node.record.id, why))
        task.now_us = max(task.now_us, node.end_us)
        task.edges.append(node.record.id)
        if (error := self.errors.pop(task.rank, None)) is not None:
            raise error

    def unfinished(self) -> list[Node]:
        """Nodes that were issued and are not done, in order of issue."""
        return [self._unfinished[k] for k in sorted(self._unfinished)]

    def drop(self, nodes: Iterable[Node]) -> None:
        """Forget nodes that will never run (after a failed step); their devices are idle then."""
        self.free_sms.clear()
        self.starved.clear()
        for crowd in self.crowds.values():
            crowd.reset()
        for node in nodes:
            node.done = True
            node.run = node.finish = None
            self._unfinished.pop(node.record.id, None)
            node.dependents = []


def _in_order(ids: list[int]) -> tuple[int, ...]:
    """Record ids, each once, in order of issue."""
    return tuple(ids) if len(ids) < 2 else tuple(sorted(set(ids)))
