"""What the parts of the check are told, and the jobs that they run. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.config import DBOConfig
from dbo.job.defaults import DEFAULTS
from dbo.job.inputs import generated_folder
from dbo.job.rank import FolderWeights, RankJob, RequestSpec
from dbo.job.types import CheckRequest
from dbo.model.config import load_model_config
from dbo.schedule import load_schedule

Found = tuple[bool, str]
"""Whether a part has passed, and what it says."""


class Quiet:
    """Progress that nobody watches."""

    def stage(self, text: str) -> None:
        return None

    def step(self, report: Any) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every part is told.

    Attributes:
        run: `gpu.world.launch` with this machine's options.
        ranks: how many.
        device: "cpu" or "cuda". asked_device: as the caller named it.
        share_device: all ranks use the first device.
        backends: all-to-all backends that run here.
        model: a DeepSeek-V2 folder; None: a generated one.
        in_place: this process is one of the ranks, so none of them can be ended on purpose.
        soak_steps: of the long run; 0: none.
    """

    run: Callable[..., Any]
    ranks: int
    device: str
    asked_device: str
    share_device: bool = False
    backends: tuple[str, ...] = ()
    model: Path | None = None
    in_place: bool = False
    soak_steps: int = 0

    @property
    def on_device(self) -> bool:
        return self.device == "cuda"

    def flags(self, backend: str) -> dict[str, Any]:
        """Flags of a configuration for a backend; the dtype is one that it carries."""
        carries_any = backend in ("nccl", "symm_copy") or not self.on_device
        return {
            "world": "gpu",
            "data_parallel_size": self.ranks,
            "all2all_backend": backend,
            "dtype": "float32" if carries_any else "bfloat16",
        }

    def job(self, backend: str, *, flags: dict[str, Any] | None = None, requests: int = 6, **changes: Any) -> RankJob:
        """A job on the model: requests of many lengths, the last rank with the fewest."""
        folder = self.model or generated_folder(CheckRequest(), Quiet())
        all_flags = DEFAULTS | self.flags(backend) | (flags or {})
        if backend == "deepep_low_latency":
            all_flags["low_latency_max_tokens_per_rank"] = all_flags["max_num_batched_tokens"]
        config = DBOConfig(**all_flags)
        model = load_model_config(folder)
        many = [self._requests(rank, requests) for rank in range(self.ranks)]
        return RankJob(
            config=config,
            model_config=model,
            schedule=load_schedule(config.dbo_schedule),
            requests=many,
            weights_of=FolderWeights(folder=str(folder), config=model, dtype=config.dtype),
            **({"keep_logits": True} | changes),
        )

    def _requests(self, rank: int, count: int) -> Sequence[RequestSpec]:
        count -= (count // 5) * (rank == self.ranks - 1)
        return [
            RequestSpec(
                id=f"{rank}.{i}",
                max_new_tokens=4 + (5 * i + rank) % 9,
                prompt_token_ids=tuple((13 * i + 5 * rank + 3 * k) % 250 for k in range(2 + (7 * i) % 23)),
            )
            for i in range(count)
        ]


def temporary(name: str) -> Path:
    """A file of this process's rank in the folder for such files."""
    return Path(f"{os.environ.get('TMPDIR', '/tmp')}/gpu-check-{name}-{os.environ.get('RANK', 0)}.json")
