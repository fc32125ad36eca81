"""The order in which a schedule issues its points: every ubatch's program, played round robin by an abstract ring.

No streams, no threads, no world: one generator per ubatch. The rules are those of the real ring, so a trace of a run
can be compared with `ring_order` step by step: the baton goes to the next ubatch that is still there; a hook is left
with the next ubatch and runs at its next `hook` item or at its exit; left with a ubatch that is gone, it runs at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dbo.errors import ScheduleError
from dbo.schedule.model import HOOK_BACKENDS, RECV_OF, Item, Point, RunRecvHook, Schedule, Yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One point, issued.

    Attributes:
        point, ubatch, layer: what, for whom, where (layers count from 0).
        runner: the ubatch whose thread issued it: another one than `ubatch` where a hook receives.
        turn: how often the baton had moved before.
        stream: "compute" or "comm".
    """

    point: str
    ubatch: int
    layer: int
    runner: int
    turn: int
    stream: str


@dataclass(frozen=True, kw_only=True)
class RingRun:
    """A whole split region.

    Attributes:
        steps: in order of issue.
        taken: (point, ubatch, layer) of each receive to the number of steps that came before its owner took the result.
        layer_ends: (ubatch, layer) to the number of steps that came before the ubatch left the layer, in order of time;
            layer -1 ends where the ubatch begins. What a model does between two layers stands there.
    """

    steps: tuple[Step, ...]
    taken: Mapping[tuple[str, int, int], int]
    layer_ends: Mapping[tuple[int, int], int]


def ring_order(
    schedule: Schedule, *, backend: str | None = None, num_ubatches: int = 2, layers: int = 4
) -> tuple[Step, ...]:
    """The steps of `layers` MoE layers in order of issue. Raises what `run_ring` raises."""
    return run_ring(schedule, backend=backend, num_ubatches=num_ubatches, layers=layers).steps


def run_ring(schedule: Schedule, *, backend: str | None = None, num_ubatches: int = 2, layers: int = 4) -> RingRun:
    """Play `schedule` to its end.

    Raises:
        ScheduleError: not for this backend; a receive is reached before the peer ran its hook; a second hook is left
            with a ubatch that has not run the first.
    """
    backend = schedule.backends[0] if backend is None else backend
    ring = _Ring(schedule, schedule.program(backend).folded, backend in HOOK_BACKENDS, num_ubatches, layers)
    ring.run()
    return RingRun(steps=tuple(ring.steps), taken=ring.taken, layer_ends=ring.layer_ends)


def steady_window(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The period of a long run: from ubatch 0's dispatch send of layer 1 up to its next one.

    Raises:
        ScheduleError: fewer than three layers, so that no whole period lies between the start and the end.
    """
    starts = [i for i, step in enumerate(steps) if step.point == "D.send" and step.ubatch == 0]
    if len(starts) < 3:
        raise ScheduleError.of("a steady window needs 3 layers", fix="play more layers", layers=len(starts))
    return tuple(steps[starts[1] : starts[2]])


class _Ring:
    """The baton, the ubatches that are still there, and the hooks that were left with them."""

    def __init__(
        self, schedule: Schedule, items: tuple[Item, ...], hooks: bool, num_ubatches: int, layers: int
    ) -> None:
        self.schedule, self.items, self.hooks = schedule, items, hooks
        self.num_ubatches, self.layers = num_ubatches, layers
        self.steps: list[Step] = []
        self.taken: dict[tuple[str, int, int], int] = {}
        self.layer_ends: dict[tuple[int, int], int] = {}
        self.pending: dict[int, tuple[str, int, int]] = {}  # holder -> (receive point, owner, layer)
        self.received: set[tuple[str, int, int]] = set()
        self.present = set(range(num_ubatches))
        self.turn = 0
        self.streams = {item.name: item.stream for item in items if isinstance(item, Point)}

    def run(self) -> None:
        contexts = deque(self._context(ubatch) for ubatch in range(self.num_ubatches))
        while contexts:
            context = contexts.popleft()
            if next(context, False):
                contexts.append(context)
            self.turn += 1

    def _context(self, ubatch: int) -> Iterator[bool]:
        """One ubatch's thread; gives True at each yield that it does not skip."""
        index = 0
        self.layer_ends[ubatch, -1] = len(self.steps)
        for layer in range(self.layers):
            for item in self.items:
                if isinstance(item, Point):
                    self._reach(item.name, ubatch, layer)
                elif isinstance(item, RunRecvHook):
                    self._run_hook(ubatch)
                elif isinstance(item, Yield):
                    if not self.schedule.skips(
                        index, num_moe_layers=self.layers, ubatch=ubatch, num_ubatches=self.num_ubatches
                    ):
                        yield True
                    index += 1
            self.layer_ends[ubatch, layer] = len(self.steps)
        self._run_hook(ubatch)
        self.present.discard(ubatch)

    def _reach(self, point: str, ubatch: int, layer: int) -> None:
        if point in RECV_OF.values():
            if self.hooks and (point, ubatch, layer) not in self.received:
                raise ScheduleError.of(
                    "the peer runs a receive hook before the owner takes the result",
                    fix=f"put a yield after {point[0]}.send, and a hook into what the peer runs then",
                    schedule=self.schedule.name,
                    point=point,
                    ubatch=ubatch,
                    layer=layer,
                )
            if not self.hooks:
                self._issue(point, ubatch, layer, runner=ubatch)
            self.taken[point, ubatch, layer] = len(self.steps)
            return
        self._issue(point, ubatch, layer, runner=ubatch)
        if self.hooks and point in RECV_OF:
            self._leave_hook((RECV_OF[point], ubatch, layer))

    def _leave_hook(self, receive: tuple[str, int, int]) -> None:
        point, owner, layer = receive
        holder = (owner + 1) % self.num_ubatches
        if holder == owner or holder not in self.present:
            self._receive(receive, runner=owner)
        elif holder in self.pending:
            raise ScheduleError.of(
                "one receive hook at a time is left with a ubatch",
                fix=f"put a hook before the next {point[0]}.send",
                schedule=self.schedule.name,
                holder=holder,
                pending=self.pending[holder][0],
                point=point,
                layer=layer,
            )
        else:
            self.pending[holder] = receive

    def _run_hook(self, holder: int) -> None:
        receive = self.pending.pop(holder, None)
        if receive is not None:
            self._receive(receive, runner=holder)

    def _receive(self, receive: tuple[str, int, int], runner: int) -> None:
        self.received.add(receive)
        self._issue(*receive, runner=runner)

    def _issue(self, point: str, ubatch: int, layer: int, runner: int) -> None:
        stream = self.streams.get(point, "compute")
        self.steps.append(Step(point=point, ubatch=ubatch, layer=layer, runner=runner, turn=self.turn, stream=stream))
