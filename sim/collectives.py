"""Communicators of the simulated machine.

Members of a collective meet by (epoch, group, index): each rank counts its own calls on a group. When their signatures
(operation, shape, dtype) differ the exchange never completes, as on a real machine; tags (step, layer, ubatch, point) may
differ silently, and the detector says so. Host-level collectives block the calling task; device-level ones queue a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dbo.errors import PeerFailed
from dbo.trace import kinds
from sim.engine import Node
from sim.tasks import Task
from sim.work import Work

if TYPE_CHECKING:
    from sim.world import SimWorld


@dataclass(slots=True)
class HostMeeting:
    """One host-level collective: who has come, with what."""

    values: dict[int, Any] = field(default_factory=dict)
    signatures: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    tasks: dict[int, Task] = field(default_factory=dict)
    records: dict[int, int] = field(default_factory=dict)
    result: Any = None
    meet: int = -1
    at_us: float = 0.0
    complete: bool = False


@dataclass(slots=True)
class DeviceMeeting:
    """One device-level collective: the meet that all members depend on, and what each brought."""

    meet: Node
    members: dict[int, Any] = field(default_factory=dict)
    signatures: dict[int, tuple[Any, ...]] = field(default_factory=dict)


class SimGroup:
    """One rank's end of a communicator over all ranks of the cluster, or over some: `members`, ranks of the cluster."""

    def __init__(self, world: SimWorld, name: str, members: Sequence[int] | None = None) -> None:
        self.world = world
        self.name = name
        self.rank = world.rank
        self.members = tuple(range(world.size)) if members is None else tuple(members)
        self.size = len(self.members)
        self.index = 0

    def restart(self) -> None:
        """A new epoch: counting begins again."""
        self.index = 0

    @property
    def _ranks(self) -> int | list[int]:
        """Who comes, as the trace says it: how many, or which of the cluster's ranks."""
        return self.size if self.size == self.world.size else list(self.members)

    # -- host level -------------------------------------------------------------------------------------------------

    def all_reduce(self, table: np.ndarray, *, tag: int) -> np.ndarray:
        def total(values: list[np.ndarray]) -> np.ndarray:
            return np.asarray(np.sum(values, axis=0, dtype=np.int32))

        signature = ("all_reduce", list(table.shape), str(table.dtype))
        return self._meet_host(table.copy(), signature, tag, total).copy()

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(self._meet_host(value, ("all_gather_object", [], "object"), -1, lambda values: values))

    def _meet_host(self, value: Any, signature: tuple[Any, ...], tag: int, combine: Callable[[list[Any]], Any]) -> Any:
        world, cluster, task = self.world, self.world.cluster, self.world.task()
        world.refuse_in_capture(f"host-level {signature[0]}")
        index, self.index = self.index, self.index + 1
        key = (cluster.epoch, self.name, index)
        meeting = cluster.host_meetings.setdefault(key, HostMeeting())
        op, shape, dtype = signature
        record = world.engine.host_record(
            task,
            kinds.COLLECTIVE,
            op,
            {
                "group": self.name,
                "index": index,
                "op": op,
                "shape": shape,
                "dtype": dtype,
                "tag": tag,
                "ranks": self._ranks,
                "epoch": cluster.epoch,
            },
        )
        meeting.values[self.rank] = value
        meeting.signatures[self.rank] = signature
        meeting.records[self.rank] = record
        if len(meeting.values) == self.size and len({str(s) for s in meeting.signatures.values()}) == 1:
            meeting.complete = True
            meeting.at_us = max([task.now_us, *(t.now_us for t in meeting.tasks.values())]) + world.cost.collective_us
            meeting.result = combine([meeting.values[r] for r in self.members])
            meeting.meet = cluster.host_meet(self.name, index, sorted(meeting.records.values()), meeting.at_us)
            for other in meeting.tasks.values():
                cluster.scheduler.wake(other, meeting.at_us)
            del cluster.host_meetings[key]
        while not meeting.complete:
            cluster.check_peers(self.rank)
            meeting.tasks[self.rank] = task
            missing = [r for r in self.members if r not in meeting.values]
            cluster.scheduler.block(("collective", self.name, index, op, tuple(missing)))
        task.now_us = max(task.now_us, meeting.at_us)
        task.edges.append(meeting.meet)
        return meeting.result

    # -- device level -----------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
    ) -> None:
        world = self.world
        read, write = world.tensors.access(input), world.tensors.access(output)
        width = input.shape[-1]
        mover = world.tensors.mover(output, input, list(output_split_sizes), list(input_split_sizes))
        nbytes = sum(n for peer, n in enumerate(input_split_sizes) if peer != self.rank) * width
        self.exchange(
            Work(
                kind=kinds.EXCHANGE,
                name="all_to_all_single",
                reads=(read,),
                writes=(write,),
                duration_us=world.cost.collective(nbytes * world.tensors.itemsize(input)),
            ),
            signature=([int(width)], str(input.dtype)),
            value=mover,
            connect=_all_to_all,
            rows={"sends": list(map(int, input_split_sizes)), "receives": list(map(int, output_split_sizes))},
        )

    def exchange(
        self,
        work: Work,
        *,
        signature: tuple[list[int], str],
        value: Any,
        connect: Callable[[dict[int, Any], int], tuple[Callable[[], None], Callable[[], None]]],
        rows: dict[str, list[int]] | None = None,
    ) -> None:
        """Queue this rank's part of a collective on the current stream; `work` is the kernel, named as the collective.

        `value` is what the member brings; `connect(members, rank)` gives what it does at its start and at its end.
        `rows` says in the trace how many rows go to and come from each peer. The kernel holds `work.takes_sms` from its
        start until all members have come and its part is done. Where that is 0 it waits for none, and occupies as many as
        the cost table says of a collective.
        """
        world, cluster = self.world, self.world.cluster
        stream = world.current_stream()
        if world.capture is not None:
            world.capture.note((*work.reads, *work.writes))
            again = replace(work, src=world.source())
            world.capture.add(
                stream, lambda: self.exchange(again, signature=signature, value=value, connect=connect, rows=rows)
            )
            return
        cluster.check_peers(self.rank)
        index, self.index = self.index, self.index + 1
        key = (cluster.epoch, self.name, index)
        op, sms = work.name, work.takes_sms
        shape, dtype = signature
        tag = list(world.task().tags)
        attrs = {
            "group": self.name,
            "index": index,
            "op": op,
            "shape": shape,
            "dtype": dtype,
            "tag": tag,
            "ranks": self._ranks,
            "epoch": cluster.epoch,
            **(rows or {}),
        }
        if sms:
            attrs |= {"sms": sms, "holds_until_peers": True}
        occupied = sms or world.cost.collective_sms
        arrive = stream.launch(Work(kind=kinds.COLLECTIVE, name=op, attrs=attrs, takes_sms=occupied, reserves=sms > 0))
        meeting = cluster.device_meetings.get(key)
        if meeting is None:
            meeting = DeviceMeeting(cluster.open_meet(self.name, index))
            if self.size < world.size:
                meeting.meet.record.attrs["members"] = list(self.members)
            cluster.device_meetings[key] = meeting
        meeting.members[self.rank] = value
        meeting.signatures[self.rank] = (op, str(shape), dtype)
        cluster.join_meet(meeting.meet, arrive, self.rank)
        found = meeting

        def begin() -> None:
            state["begin"], state["end"] = connect(found.members, self.rank)
            state["begin"]()

        state: dict[str, Callable[[], None]] = {}
        stream.launch(
            replace(
                work,
                run=begin,
                finish=lambda: state["end"](),
                after=(meeting.meet,),
                src=work.src or world.source(),
                attrs={"group": self.name, "index": index, "op": op},
                takes_sms=0,
                frees_sms=occupied,
                reserves=sms > 0,
            )
        )
        if len(meeting.members) == self.size:
            if len(set(meeting.signatures.values())) == 1:
                world.engine.release_hold(meeting.meet)
            del cluster.device_meetings[key]


def _all_to_all(members: dict[int, Any], rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Read every peer's block for `rank` at the start, write the output at the end."""
    taken: list[Any] = []

    def begin() -> None:
        taken.extend(members[peer].block(rank) for peer in sorted(members))

    return begin, lambda: members[rank].deliver(taken)


def peer_failed(rank: int, error: BaseException) -> PeerFailed:
    """The error that a rank sees when `rank` has failed."""
    return PeerFailed(rank, f"{type(error).__name__}: {error}")
