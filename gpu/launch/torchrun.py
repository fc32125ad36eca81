"""World `gpu` under torchrun (needs torch): this process is one of the ranks, and every rank gets the whole result."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dbo.contract.patience import Patience
from dbo.errors import UsageError
from gpu.launch.process import RankOutput, RankSpec, pick_device, run
from gpu.launch.transport import dumps, sendable_left
from gpu.watch import flight_recorder as board

_RUNS = 0


def launch_here(
    program: Callable[[Any], Any],
    *,
    ranks: int,
    device: str,
    share_device: bool,
    trace: bool,
    timeout_s: float,
    patience: Patience,
    vehicle: str,
) -> Any:
    """Run `program(world)` on this rank and gather what all ranks left.

    Raises:
        UsageError: torchrun started another number of processes, or on several machines.
    """
    started, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if started != ranks or local != started:
        rule = "one process a rank, all on this machine"
        raise UsageError.of(rule, fix=f"start torchrun with --nproc-per-node={ranks}", started=started, local=local)
    rank = int(os.environ["RANK"])
    folder = _folder(rank)
    spec = RankSpec(
        rank=rank,
        ranks=ranks,
        folder=folder,
        program=dumps(program),
        device=device,
        share_device=share_device,
        trace=trace,
        vehicle=vehicle,
        timeout_s=timeout_s,
    )
    pick_device(spec)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    watchdog = _prepare(folder, rank, ranks, patience)
    dist.barrier()
    watched = board.Board.open(folder / "board")
    watched.rank(rank).set_state(board.RUNNING, os.getpid())
    dist.barrier()
    left = sendable_left(run(spec, watched, store=None))
    watched.rank(rank).set_state(board.ENDED if left.error is None else board.FAILED, os.getpid())
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, dumps(left))
    if watchdog is not None:
        watchdog.join(10.0)
        if watchdog.is_alive():
            os.kill(watchdog.pid, signal.SIGKILL)
    return _collect([_loads(part) for part in gathered], device, share_device)


def _folder(rank: int) -> Path:
    """A folder that all ranks of this run name alike."""
    global _RUNS
    _RUNS += 1
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    folder = Path(tempfile.gettempdir()) / f"dbo-torchrun-{os.environ['MASTER_PORT']}-{run_id}-{os.getppid()}-{_RUNS}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _prepare(folder: Path, rank: int, ranks: int, patience: Patience) -> Any:
    """Rank 0 makes the board and starts the watchdog."""
    if rank != 0:
        return None
    import multiprocessing

    from gpu.watch.watchdog import watch

    board.Board.create(folder / "board", ranks)
    watchdog = multiprocessing.get_context("spawn").Process(target=watch, args=(folder, patience), daemon=True)
    watchdog.start()
    return watchdog


def _loads(part: bytes) -> RankOutput:
    import pickle

    left: RankOutput = pickle.loads(part)
    return left


def _collect(parts: list[RankOutput], device: str, share_device: bool) -> Any:
    from gpu.launch.merge import merge
    from gpu.world import GpuRun

    complete = all(part.error is None for part in parts)
    meta = {"world": "gpu", "ranks": len(parts), "mode": "numeric", "complete": complete, "device": device}
    return GpuRun(
        trace=merge(parts, meta),
        values=[part.value for part in parts],
        errors=[part.error for part in parts],
        exit_codes=[0 if part.error is None else 1 for part in parts],
        device=device,
        shared=share_device,
    )
