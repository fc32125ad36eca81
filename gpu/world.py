"""World `gpu`: one process per rank, on devices or on CPU tensors over gloo. No torch: the ranks' processes import it.

    result = launch(program, ranks=2, device="cpu")      # program(world) runs once a rank; it must be picklable
    result.trace, result.values, result.errors, result.deadlocked

Under torchrun (RANK and WORLD_SIZE set) the calling process is one of the ranks, and each gets the whole result.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from dbo.contract.patience import Patience
from dbo.errors import DBOError, NotAvailable, PeerFailed, UsageError
from dbo.trace import Record, Trace, kinds
from gpu.launch import transport
from gpu.launch.merge import merge
from gpu.probe import device_count
from gpu.watch import flight_recorder as board
from gpu.watch.watchdog import watch

VEHICLES = ("auto", "thread", "greenlet")

PATIENCE = Patience()
"""Of the watchdog where nobody asks for another: well below any communication library's own time-out."""

PRELOADED = (
    "gpu.launch.process",
    "gpu.watch.watchdog",
    "dbo.job.rank",
    "dbo.model.deepseek_v2",
    "dbo.model.loader",
    "triton",
)
"""What every rank loads anyway. Those that are missing here are skipped."""


@dataclass(kw_only=True)
class GpuRun:
    """What a run left: the trace, and per rank what the program returned or raised.

    Attributes:
        report: the watchdog's, when it ended the run; else None.
        exit_codes: of the ranks' processes; negative: the signal that ended it.
        processes: ids of the ranks' processes and, last, of the watchdog's.
        marks: by rank, when it came how far (`gpu.watch.flight_recorder.MARKS`), in seconds since the call of `launch`.
        reported_s: when the watchdog's report was written, on the same clock; None: there is none.
        device: "cpu" or "cuda". shared: all ranks used one device, so nothing about speed follows.
    """

    trace: Trace
    values: list[Any] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=list)
    deadlocked: bool = False
    report: dict[str, Any] | None = None
    exit_codes: list[int] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    marks: list[dict[str, float]] = field(default_factory=list)
    reported_s: float | None = None
    device: str = "cpu"
    shared: bool = False


def launch(
    program: Callable[[Any], Any],
    *,
    ranks: int,
    mode: str = "numeric",
    device: str = "auto",
    share_device: bool = False,
    timeout_s: float = 600.0,
    patience: Patience = PATIENCE,
    trace: bool = True,
    vehicle: str = "auto",
) -> GpuRun:
    """Run `program(world)` on every rank, to the end or until the watchdog ends it.

    Args:
        device: "cpu", "cuda", or "auto": cuda where there are devices enough.
        share_device: all ranks on the first device; for correctness only, and only for backends that allow it.
        timeout_s: of the whole run. patience: of the watchdog, see `gpu.watch.watchdog.watch`.
        trace: record; a long run may do without.
        vehicle: ubatches are threads ("thread"), or greenlets on the rank's main thread ("greenlet": a hand-over costs a
            third to a tenth). "auto": greenlets where they are installed.

    Raises:
        UsageError: another mode than "numeric", or a program that cannot be sent to a process.
        NotAvailable: there are fewer devices than ranks.
    """
    begun_s = time.monotonic()
    chosen = _device(device, ranks, share_device, mode)
    if vehicle not in VEHICLES:
        raise UsageError.of("ubatches are threads or greenlets", fix="use one of them, or auto", vehicle=vehicle)
    if vehicle == "auto":
        vehicle = "thread" if importlib.util.find_spec("greenlet") is None else "greenlet"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from gpu.launch.torchrun import launch_here

        return launch_here(
            program,
            ranks=ranks,
            device=chosen,
            share_device=share_device,
            trace=trace,
            timeout_s=timeout_s,
            patience=patience,
            vehicle=vehicle,
        )
    start_server()
    from gpu.launch.process import RankSpec

    try:
        packed = pickle.dumps(program)
    except Exception as error:
        rule = "a program for world gpu can be sent to a process of its own"
        raise UsageError.of(rule, fix="define it at the top of a module", program=repr(program)) from error
    with _uninterrupted():
        folder = Path(tempfile.mkdtemp(prefix="dbo-run-"))
        # An interrupt may also end the removal below, or come before it.
        remove = atexit.register(partial(shutil.rmtree, folder, ignore_errors=True))
    try:
        specs = [
            RankSpec(
                rank=rank,
                ranks=ranks,
                folder=folder,
                program=packed,
                device=chosen,
                share_device=share_device,
                trace=trace,
                vehicle=vehicle,
                timeout_s=timeout_s,
            )
            for rank in range(ranks)
        ]
        ended = _run(specs, folder, timeout_s=timeout_s, patience=patience)
        return _collect(specs, folder, ended, chosen, begun_s)
    finally:
        with _uninterrupted():
            remove()
            atexit.unregister(remove)


def _device(device: str, ranks: int, share_device: bool, mode: str) -> str:
    if mode != "numeric":
        rule = "world gpu computes with numbers"
        raise UsageError.of(rule, fix="use --mode numeric, or --world sim", mode=mode)
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError.of("a device is auto, cpu or cuda", fix="use one of them", device=device)
    found = device_count()
    if device == "cpu":
        return "cpu"
    if found < (1 if share_device else ranks):
        rule = "world gpu needs one visible device a rank"
        fix = "use --device cpu (gloo, CPU tensors), --share-device with a backend that allows it, or --world sim"
        raise NotAvailable.of(rule, fix=fix, num_devices=found, ranks=ranks)
    return "cuda"


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """What is known of processes that have ended."""

    codes: list[int]
    processes: list[int]
    marks: list[dict[str, float]]


def _run(specs: list[Any], folder: Path, *, timeout_s: float, patience: Patience) -> _Ended:
    """Start the ranks and the watchdog, wait for all of them, leave nothing running."""
    from gpu.launch import process

    kept = board.Board.create(folder / "board", len(specs))
    for spec in specs:
        os.mkfifo(spec.left_at("ask"))
    context: Any = multiprocessing.get_context("forkserver")
    here = dict(os.environ)
    processes = [
        context.Process(target=_as_from, args=(here, process.main, spec), name=f"rank{spec.rank}") for spec in specs
    ]
    watchdog = context.Process(target=_as_from, args=(here, watch, folder, patience), name="watchdog", daemon=True)
    deadline = time.monotonic() + timeout_s
    try:
        _await_server(context)
        with _uninterrupted():  # a process that is started by half has no id to end it by
            for rank, started in enumerate(processes):
                started.start()
                kept.rank(rank).set_state(board.RUNNING, started.pid)
            watchdog.start()
        for started in processes:
            started.join(max(0.0, deadline - time.monotonic()))
        if not any(started.is_alive() for started in processes):  # else time is up, and the watchdog goes on watching
            watchdog.join(10.0)
            if watchdog.exitcode != 0 and not (folder / "report.json").exists():
                raise DBOError(
                    f"the watchdog ended without a report: exit code {watchdog.exitcode}; the run was not watched"
                )
    finally:
        with _uninterrupted():
            left = [p for p in (*processes, watchdog) if p.pid is not None and p.is_alive()]
            for started in left:
                os.kill(started.pid, signal.SIGKILL)
            for started in left:
                started.join()
    return _Ended(
        codes=[-signal.SIGKILL if p.exitcode is None else p.exitcode for p in processes],
        processes=[p.pid for p in (*processes, watchdog)],
        marks=[part.marks() for _, part in kept.parts()],
    )


def _as_from(environment: dict[str, str], program: Callable[..., None], *args: Any) -> None:
    """Run `program` under the environment of the caller of `launch`; the server knows its own, an older one."""
    os.environ.clear()
    os.environ.update(environment)
    program(*args)


def start_server() -> None:
    """Start the process that ranks are forked from, without waiting for it to have loaded what they need.

    Ranks are never forked from the caller: it may hold threads, a CUDA context, a communicator. Nor do they load torch
    each: that takes seconds. The server holds modules and nothing else, no device either; a rank makes its own context.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    resource_tracker.ensure_running()  # before the signal is blocked: it unblocks it
    # The server and all that it forks inherit this, so that an interrupt of the terminal reaches the launcher alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_SERVED = False


def _await_server(context: Any) -> None:
    """Wait until the server forks, which takes seconds the first time: an interrupt ends this, and no rank is there yet."""
    global _SERVED
    if not _SERVED:
        first = context.Process(target=_nothing, daemon=True)
        first.start()
        first.join()
        _SERVED = True


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold an interrupt back until the end of the block. Python runs handlers on the main thread, so only there."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *at: came.append(at))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def _collect(specs: list[Any], folder: Path, ended: _Ended, device: str, begun_s: float) -> GpuRun:
    left = [transport.read(spec.left_at("out")) for spec in specs]
    partial = [found or transport.read(spec.left_at("part")) for found, spec in zip(left, specs, strict=True)]
    path = folder / "report.json"
    report = json.loads(path.read_text()) if path.exists() else None
    complete = all(found is not None and found.error is None for found in left)
    meta = {"world": "gpu", "ranks": len(specs), "mode": "numeric", "complete": complete, "device": device}
    trace = merge(partial, meta)
    errors = [
        _error(rank, found, code, report) for rank, (found, code) in enumerate(zip(left, ended.codes, strict=True))
    ]
    if report is not None and report["reason"] != "failed":
        _add_blocked(trace, report["waiters"])
    return GpuRun(
        trace=trace,
        values=[found.value if found else None for found in left],
        errors=errors,
        deadlocked=report is not None and report["reason"] != "failed",
        report=report,
        exit_codes=ended.codes,
        processes=ended.processes,
        marks=[{name: t - begun_s for name, t in of_rank.items()} for of_rank in ended.marks],
        reported_s=None if report is None else report["reported_s"] - begun_s,
        device=device,
        shared=specs[0].share_device and len(specs) > 1,
    )


def _error(rank: int, found: Any, code: int, report: dict[str, Any] | None) -> BaseException | None:
    """What ended a rank. One that left nothing was ended from outside."""
    if found is not None:
        error: BaseException | None = found.error
        return error
    if report is None:
        return DBOError(f"rank {rank} ended with exit code {code} and left nothing: it was killed, or ran out of time")
    if report["rank"] == rank or report["reason"] not in ("died", "failed"):
        return DBOError(f"rank {rank} was ended by the watchdog: {report['text']}")
    return PeerFailed(report["rank"], report["text"].partition("\n")[0])


def _add_blocked(trace: Trace, waiters: list[dict[str, Any]]) -> None:
    """What every line waited for when the run was ended, as the deadlock detector reads it."""
    number = 1 + max((r.id for r in trace.records), default=0)
    for at, waiter in enumerate(waiters):
        waits_for = {name: value for name, value in waiter.items() if name not in ("rank", "line")}
        trace.records.append(
            Record(
                number + at,
                waiter["rank"],
                waiter["line"],
                kinds.BLOCKED,
                waiter["what"],
                step=waiter["step"],
                layer=waiter["layer"],
                ubatch=waiter["ubatch"],
                point=waiter["point"],
                attrs={"waits_for": waits_for},
            )
        )
