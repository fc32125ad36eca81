"""Part `leftovers`: what a raising ubatch or a failed capture leaves behind, and what the same process does next (needs torch).

All ranks fail alike, at one point of one step, so that no rank is ahead of the others afterwards; the failed step is
then planned again and run to the end. What must be as before: threads, current streams, bytes of live tensors, hooks.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dbo.engine.components import Components
from dbo.engine.requests import Request
from dbo.engine.runner import GPUModelRunner
from dbo.errors import CaptureError
from dbo.job.compare import compare
from dbo.job.rank import RankJob, agree_on_config, build_runner
from dbo.schedule import Item
from dbo.ubatching.player import SchedulePlayer
from dbo.ubatching.ring import UBatchContext, dbo_enabled
from gpu.check import planted_faults
from gpu.check.setup import Found, Setup

SETTLING_STEPS = 3
"""Split steps before the one that fails: libraries and allocators have what they keep by then."""

SLACK_BYTES = 2**20
"""What the device's allocator may hold more: workspaces that libraries take once a thread and stream."""

CAPTURES_FAIL = ("the world refuses a host wait", "the device refuses a host wait")

Texts = dict[str, tuple[list[int], list[Any]]]


class Trap:
    """Raises once, in ubatch 1 of every rank behind its combine, when armed; a hook of it may be pending then.

    Attributes:
        armed: whether the next passage fails. in_capture: only a passage that is captured.
        pending: hooks that were waiting to be run when it failed.
        contexts: of all steps since `rearm`.
    """

    def __init__(self) -> None:
        self.armed = False
        self.in_capture = False
        self.wait_of_device = False
        self.pending = 0
        self.sprung = False
        self.contexts: list[UBatchContext] = []

    def arm(self, *, in_capture: bool = False, wait_of_device: bool = False) -> None:
        self.armed, self.sprung, self.pending = True, False, 0
        self.in_capture, self.wait_of_device = in_capture, wait_of_device
        self.contexts.clear()

    def spring(self, context: UBatchContext) -> None:
        world: Any = context.ring.world
        if not self.armed or (self.in_capture and not world.trace.capturing):
            return
        self.armed, self.sprung = False, True
        self.pending = sum(other.recv_hook is not None for other in context.ring.contexts)
        if self.in_capture and self.wait_of_device:
            torch.cuda.current_stream().synchronize()
        elif self.in_capture:
            world.compute.synchronize()
        raise ValueError("planted in ubatch 1")

    def program(self) -> Components:
        """The shipped program with the trap in it."""
        trap = self

        class Trapped(SchedulePlayer):
            def _next(self, layer: int) -> Item:
                item = super()._next(layer)
                here = self.context.index == 1 and layer == planted_faults.struck_layer(self.moe_layers)
                if here and planted_faults.is_point(item, "S"):
                    trap.spring(self.context)
                return item

        class Kept(UBatchContext):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                if trap.armed:
                    trap.contexts.append(self)

        return Components(player=Trapped, context=Kept)


@dataclass(frozen=True, kw_only=True)
class State:
    """What a failure must not change, as seen from a rank's main thread and its ubatch threads.

    Attributes:
        threads: of the process. streams: current on each line. tensor_bytes: of all storages that Python can reach.
        device_bytes: that the device's allocator has handed out.
    """

    threads: tuple[str, ...]
    streams: tuple[str, ...]
    tensor_bytes: int
    device_bytes: int


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """What a rank found.

    Attributes:
        problems: sentences. notes: what happened, in words.
        texts: by way ("clean", "raised", and from graphs), tokens and logits of every request.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]
    texts: dict[str, Texts]


@dataclass(frozen=True)
class Leftovers:
    """The program: a clean run, one in which a ubatch raises, and with graphs one whose captures fail at first."""

    job: RankJob
    graphs: bool

    def __call__(self, world: Any) -> LeftBehind:
        with torch.inference_mode():
            checked = _Checked(world, self.job)
            checked.run("clean", self.job)
            checked.raise_in_a_step()
            if self.graphs:
                checked.fail_captures(replace(self.job, config=self.job.config.replace(cudagraph_mode="FULL")))
        return LeftBehind(problems=tuple(checked.problems), notes=tuple(checked.notes), texts=checked.texts)


class _Checked:
    """One rank's way through the part."""

    def __init__(self, world: Any, job: RankJob) -> None:
        self.world = world
        self.job = job
        self.trap = Trap()
        self.program = self.trap.program()
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.texts: dict[str, Texts] = {}
        agree_on_config(world, job.config, self.program)

    def run(self, way: str, job: RankJob, runner: GPUModelRunner | None = None, steps: int = 1000) -> GPUModelRunner:
        """Step to the end, or so many split steps; what is said is added to the texts of `way`."""
        if runner is None:
            runner = self._runner(job)
        texts = self.texts.setdefault(way, {})
        while steps:
            outcome = runner.step()
            for id, token in outcome.tokens.items():
                tokens, rows = texts.setdefault(id, ([], []))
                tokens.append(token)
                rows.append(outcome.logits[id])
            if outcome.all_idle:
                break
            steps -= bool(outcome.slices)
        return runner

    def raise_in_a_step(self) -> None:
        """A ubatch raises in a step; the same runner goes on."""
        runner = self.run("raised", self.job, steps=SETTLING_STEPS)
        before = self._state()
        self.trap.arm()
        self._fails("a ubatch that raises", lambda: self.run("raised", self.job, runner))
        self._compare("a ubatch that raises", before)
        self.run("raised", self.job, runner)

    def fail_captures(self, job: RankJob) -> None:
        """Captures fail in two ways; after each the capture phase works, and what it captured is right."""
        runner = self._runner(job)
        runner.capture_graphs()
        for way in CAPTURES_FAIL:
            runner.wrapper.graphs.steps.clear()
            before = self._state()
            self.trap.arm(in_capture=True, wait_of_device=way.startswith("the device"))
            name = f"a capture in which {way}"
            self._fails(name, runner.capture_graphs)
            if torch.cuda.is_current_stream_capturing() or self.world.trace.capturing:
                self.problems.append(f"{name}: a capture is still open")
            if runner.wrapper.graphs.steps or runner.wrapper.graphs.capturing:
                self.problems.append(f"{name}: graphs are kept, or the capture phase is still open")
            self._compare(name, before)
            runner.capture_graphs()
            self._add(runner, job)
            self.run(name, job, runner)

    def _runner(self, job: RankJob) -> GPUModelRunner:
        runner = build_runner(self.world, job, self.program)
        if job.config.cudagraph_mode != "FULL":
            self._add(runner, job)
        return runner

    def _add(self, runner: GPUModelRunner, job: RankJob) -> None:
        for spec in job.requests[self.world.rank]:
            runner.scheduler.add(
                Request(id=spec.id, prompt_token_ids=spec.prompt_token_ids, max_new_tokens=spec.max_new_tokens)
            )

    def _fails(self, name: str, run: Callable[[], Any]) -> None:
        """`run` must raise; then this process is told, as it would be by a peer, that the run goes on."""
        said = "nothing"
        try:
            run()
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            expected = (ValueError, CaptureError, RuntimeError)
            if not isinstance(error.__cause__ or error, expected):
                self.problems.append(f"{name}: raised {error!r}")
        if not self.trap.sprung or said == "nothing":
            self.problems.append(f"{name}: the fault never struck")
        self.notes.append(f"{name}: {said}; {self.trap.pending} hooks were pending")
        self.world.forgive()
        self.world.control.all_gather_object(self.world.rank)

    def _compare(self, name: str, before: State) -> None:
        contexts = self.trap.contexts
        pending = sum(context.recv_hook is not None for context in contexts)
        inside = sum(not context.left for context in contexts)
        if not contexts or pending or inside:
            self.problems.append(f"{name}: {pending} hooks pending, {inside} of {len(contexts)} contexts in the ring")
        contexts.clear()
        if dbo_enabled():
            self.problems.append(f"{name}: the main thread takes itself for a ubatch")
        after = self._state()
        for what in ("threads", "streams"):
            was, now = getattr(before, what), getattr(after, what)
            if was != now:
                self.problems.append(f"{name}: {what} were {was} and are {now}")
        if after.tensor_bytes > before.tensor_bytes:
            self.problems.append(f"{name}: tensors of {after.tensor_bytes - before.tensor_bytes} bytes stay alive")
        if after.device_bytes > before.device_bytes + SLACK_BYTES:
            self.problems.append(f"{name}: the allocator holds {after.device_bytes - before.device_bytes} bytes more")
        self.notes[-1] += f"; {after.device_bytes - before.device_bytes:+d} bytes on the device"

    def _state(self) -> State:
        world = self.world
        if world.asynchronous:
            torch.cuda.synchronize(world.device)
        gc.collect()
        tensor_bytes = _tensor_bytes()
        device_bytes = torch.cuda.memory_allocated(world.device) if world.asynchronous else 0
        streams = [_stream_of(world)]
        for worker in world.host.workers:
            worker.submit(lambda: streams.append(_stream_of(world)))
            worker.join()
        return State(
            threads=tuple(sorted(thread.name for thread in threading.enumerate())),
            streams=tuple(streams),
            tensor_bytes=tensor_bytes,
            device_bytes=device_bytes,
        )


def _stream_of(world: Any) -> str:
    """The calling line's current stream, as the world and the library know it."""
    known = world.current_stream().name
    return f"{known} {torch.cuda.current_stream(world.device).cuda_stream}" if world.asynchronous else known


def _tensor_bytes() -> int:
    storages = {}
    for found in gc.get_objects():
        if type(found) is torch.Tensor or type(found) is torch.nn.Parameter:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def check_leftovers(setup: Setup, backend: str) -> Found:
    """One run in which every rank does all of it."""
    job = setup.job(backend)
    launched = setup.run(Leftovers(job, graphs=setup.on_device), trace=False)
    if any(launched.errors):
        return False, f"{launched.errors}"
    found: Sequence[LeftBehind] = launched.values
    problems = [f"rank {rank}: {problem}" for rank, left in enumerate(found) for problem in left.problems]
    lines = [*found[0].notes]
    for rank, left in enumerate(found):
        for way in left.texts.keys() - {"clean"}:
            said = compare(left.texts["clean"], left.texts[way], dtype=job.config.dtype)
            if not (said.tokens_equal and said.logits_close and said.compared):
                problems.append(f"rank {rank}: after {way} the tokens or logits differ: {said}")
    compared = sum(len(tokens) for left in found for tokens, _ in left.texts["clean"].values())
    first = f"{len(lines)} failures, {compared} tokens after each as without"
    return not problems, "\n".join([first, *(f"  {line}" for line in lines), *(f"  WRONG: {p}" for p in problems)])
