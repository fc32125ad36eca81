"""A run under `torch.profiler`, all of its threads, and its overlap as the profiler saw it (needs torch).

    python -m gpu.bench.profiled FOLDER                        a profile a rank of the main job, and what it says
    python -m gpu.bench.profiled FOLDER --device cpu
    dbo show FOLDER/rank0.json FOLDER/rank1.json         the same layer as rows, as a picture

`gpu.device` opens a range for every point while a profiler is on; `dbo.export.profile` reads them back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from dbo.check.overlap import measure
from dbo.config import facts
from dbo.errors import NotAvailable
from dbo.export.profile import read_profile
from dbo.job.rank import RankMain
from gpu import probe
from gpu.check.setup import Setup
from gpu.world import launch


@dataclass(frozen=True)
class Profiled:
    """The program `program`, profiled: each rank leaves `folder/rank<r>.json` and returns what the program returns."""

    program: Callable[[Any], Any]
    folder: Path

    def __call__(self, world: Any) -> Any:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.asynchronous else [])]
        # Ubatch threads are older than the profile or younger; and an edge needs to know which event was waited for.
        config = _ExperimentalConfig(profile_all_threads=True, enable_cuda_sync_events=world.asynchronous)
        with profile(activities=activities, experimental_config=config) as profiler:
            value = self.program(world)
        profiler.export_chrome_trace(str(profile_path(self.folder, world.rank)))
        return value


def profile_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its profile."""
    return folder / f"rank{rank}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the generated model's run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu.bench.profiled", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where profiles are left")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--share-device", action="store_true", help="all ranks on the first device")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--backend", choices=sorted(facts.BACKENDS), help="all-to-all backend (default: the first that runs here)"
    )
    parser.add_argument("--model", type=Path, help="a DeepSeek-V2 folder (default: a generated one)")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(argv)
    try:
        machine = probe.machine(device=options.device, ranks=options.ranks, share_device=options.share_device)
    except NotAvailable as error:
        sys.stderr.write(f"{error}\n")
        return 3
    backend = options.backend or next(iter(machine.backends), None)
    if backend is None:
        sys.stderr.write("no all-to-all backend can run here: `dbo doctor` says what to install\n")
        return 3
    setup = Setup(
        run=partial(launch, ranks=options.ranks, vehicle="thread", **machine.options),
        ranks=options.ranks,
        device="cpu" if machine.options["device"] == "cpu" else "cuda",
        asked_device=options.device,
        share_device=options.share_device,
        model=options.model,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    job = setup.job(backend, keep_logits=False, max_steps=options.steps)
    launched = setup.run(Profiled(RankMain(job), options.folder))
    if any(launched.errors):
        sys.stderr.write(f"{launched.errors}\n")
        return 1
    trace = read_profile([profile_path(options.folder, rank) for rank in range(options.ranks)])
    for name, found in (("profiler", trace), ("recorder", launched.trace)):
        said = measure(found)
        share = "no communication" if said.hidden_share is None else f"{said.hidden_share:.0%} hidden"
        sys.stdout.write(f"{name}: {share}, {said.exposed_us:.0f} of {said.comm_us:.0f} us exposed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
