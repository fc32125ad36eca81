"""One rank's process (needs torch): groups, device, board, then the program, then what it leaves for the launcher."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbo.errors import NotAvailable
from dbo.trace import BufferInfo, Record
from gpu.device import GpuWorld
from gpu.launch import transport
from gpu.watch import flight_recorder as board


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a process is told.

    Attributes:
        rank, ranks: this rank among all.
        folder: of the run: its board, its store, what ranks leave.
        program: pickled `program(world)`.
        device: "cpu" or "cuda".
        share_device: all ranks use the first device.
        trace: record.
        vehicle: what ubatches are, "thread" or "greenlet".
        timeout_s: of the communicators; the watchdog is faster.
    """

    rank: int
    ranks: int
    folder: Path
    program: bytes
    device: str
    share_device: bool = False
    trace: bool = True
    vehicle: str = "thread"
    timeout_s: float = 600.0

    def left_at(self, ending: str) -> Path:
        return self.folder / f"rank{self.rank}.{ending}"


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Process groups of a rank. `data` is None where no communicator serves the device (ranks that share one)."""

    control: Any
    data: Any
    low_latency: Any
    timeout: timedelta = timedelta(seconds=600)

    def make(self, ranks: Sequence[int], device: torch.device) -> Any:
        """A group of some ranks that moves the device's data; every rank of the run calls this, in the same order."""
        if device.type == "cpu":
            return dist.new_group(list(ranks), backend="gloo", timeout=self.timeout)
        return dist.new_group(list(ranks), backend="nccl", timeout=self.timeout, device_id=device)


@dataclass(kw_only=True)
class RankOutput:
    """What a rank leaves: its records as far as it came, and its value or its error."""

    value: Any = None
    error: BaseException | None = None
    records: list[Record] = field(default_factory=list)
    buffers: dict[int, BufferInfo] = field(default_factory=dict)
    meets: list[tuple[str, int]] = field(default_factory=list)


def main(spec: RankSpec) -> None:
    """Run one rank and end its process: 0 when the program returned, 1 when it raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what an interrupt means
    # All ranks are on this machine: what its name resolves to is nothing that gloo needs to know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    watched = board.Board.open(spec.folder / "board")
    rows = watched.rank(spec.rank)
    rows.set_state(board.RUNNING, os.getpid())
    rows.mark("started")
    left = transport.sendable_left(run(spec, watched, store=dist.FileStore(str(spec.folder / "store"), spec.ranks)))
    transport.write(spec.left_at("out"), left)
    rows.set_state(board.ENDED if left.error is None else board.FAILED, os.getpid())
    if left.error is None:
        # A rank that goes closes its connections, and peers that still wait for it would see an error, not an absence.
        _wait_for_the_others(watched, spec.timeout_s)
    # Not through the interpreter's end: destructors of communication libraries wait for peers that may be gone.
    os._exit(0 if left.error is None else 1)


def _wait_for_the_others(watched: board.Board, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(p.state == board.RUNNING and board.is_alive(p.pid) for _, p in watched.parts()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def run(spec: RankSpec, watched: board.Board | None, store: Any) -> RankOutput:
    """Run the program on this rank, in this process; an error ends up in what it leaves."""
    left = RankOutput()
    try:
        device = pick_device(spec)
        world = GpuWorld(
            rank=spec.rank,
            size=spec.ranks,
            device=device,
            groups=make_groups(spec, device, store),
            board=watched,
            keep_trace=spec.trace,
            shared=spec.share_device and spec.ranks > 1,
            vehicle=spec.vehicle,
        )
        left.records, left.buffers, left.meets = world.trace.records, world.trace.buffers, world.trace.meets
        _answer_dump_requests(spec, left)
        if watched is not None:
            watched.rank(spec.rank).mark("connected")
        left.value = pickle.loads(spec.program)(world)
        world.close()
    except BaseException as error:
        left.error = transport.sendable(error)
        left.error.add_note("".join(traceback.format_exception(error)))
    return left


def pick_device(spec: RankSpec) -> torch.device:
    """This rank's device, made current.

    Raises:
        NotAvailable: there are too few devices.
    """
    if spec.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    index = 0 if spec.share_device else int(os.environ.get("LOCAL_RANK", spec.rank))
    if index >= torch.cuda.device_count():
        rule = "world gpu needs one visible device a rank"
        fix = "show more devices, share one (--share-device) or use --device cpu"
        raise NotAvailable.of(rule, fix=fix, num_devices=torch.cuda.device_count(), rank=spec.rank)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def make_groups(spec: RankSpec, device: torch.device, store: Any) -> Groups:
    """All process groups of a run; every rank calls this once."""
    timeout = timedelta(seconds=spec.timeout_s)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=spec.rank, world_size=spec.ranks, store=store, timeout=timeout)
    data = None
    if device.type == "cpu":
        data = dist.new_group(backend="gloo", timeout=timeout)
    elif not spec.share_device:
        data = dist.new_group(backend="nccl", timeout=timeout, device_id=device)
    control, low_latency = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    dist.barrier(group=control)  # nobody begins, and fails, while a peer still connects
    return Groups(control=control, data=data, low_latency=low_latency, timeout=timeout)


def _answer_dump_requests(spec: RankSpec, left: RankOutput) -> None:
    """Have a thread that writes what there is of the trace when the watchdog asks, just before it ends this process."""
    fifo = spec.left_at("ask")
    if not fifo.exists():
        return

    def answer() -> None:
        # Read-write, so that opening does not wait for a writer.
        handle = os.open(fifo, os.O_RDWR)
        while os.read(handle, 1):
            spec.left_at("heard").touch()
            kept = RankOutput(records=list(left.records), buffers=dict(left.buffers), meets=list(left.meets))
            transport.write(spec.left_at("part"), kept)

    threading.Thread(target=answer, name="dump", daemon=True).start()
