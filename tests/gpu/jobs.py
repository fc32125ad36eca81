"""Small jobs for real processes, and programs with a planted fault. Everything here can be sent to a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbo.config import DBOConfig
from dbo.engine.components import Components
from dbo.job.rank import CleanPrograms, FolderWeights, RankJob, RequestSpec
from dbo.model.config import load_model_config
from dbo.model.generator import generate_model_folder
from dbo.moe.interface import ExpertInputs
from dbo.schedule import Item, Yield, load_schedule
from dbo.ubatching.player import SchedulePlayer
from dbo.ubatching.ring import UBatchContext, dbo_current_ubatch_id

STALL_S = 3.0


def small_folder(path: Path) -> Path:
    """A DeepSeek-V2 of four layers that computes in no time."""
    generate_model_folder(
        path, seed=3, hidden_size=64, num_layers=4, n_routed_experts=8, moe_intermediate_size=32, intermediate_size=64
    )
    return path


def small_job(
    folder: Path,
    backend: str,
    *,
    ranks: int = 2,
    serial: bool = False,
    program_of: Callable[[int], Components] | None = None,
    schedule: str | None = None,
) -> RankJob:
    """Some steps split, some do not; one rank has less to do than the others and is idle at the end."""
    options: dict[str, Any] = {"low_latency_max_tokens_per_rank": 32} if backend == "deepep_low_latency" else {}
    config = DBOConfig(
        world="gpu",
        data_parallel_size=ranks,
        enable_expert_parallel=True,
        enable_dbo=True,
        all2all_backend=backend,
        dbo_decode_token_threshold=4,
        dbo_prefill_token_threshold=12,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=64,
        block_size=8,
        num_kv_blocks=64,
        dtype="float32",
        dbo_schedule=schedule,
        **options,
    )
    model = load_model_config(folder)
    requests = [
        [
            RequestSpec(
                id=f"{rank}.{i}",
                max_new_tokens=4,
                prompt_token_ids=tuple((7 * i + 11 * rank + k) % 250 for k in range(3 + 2 * i)),
            )
            for i in range(5 if rank else 4)
        ]
        for rank in range(ranks)
    ]
    return RankJob(
        config=config,
        model_config=model,
        schedule=load_schedule(config.dbo_schedule),
        requests=requests,
        weights_of=FolderWeights(folder=str(folder), config=model, dtype="float32"),
        keep_logits=True,
        serial=serial,
        program_of=program_of or CleanPrograms(),
    )


class Wrapped:
    """A backend around another one; what it does not do itself the other one does."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


class Skipping(Wrapped):
    """Leaves out the second dispatch of ubatch 1, and goes on as if it had received nothing."""

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Any:
        self.calls += dbo_current_ubatch_id() == 1
        if self.calls == 2 and dbo_current_ubatch_id() == 1:
            self.calls += 1
            rows = a1.new_zeros((a1.shape[0] * self.backend.group.size, a1.shape[1]))
            ids = topk_ids.new_full((rows.shape[0], topk_ids.shape[1]), -1)
            weights = topk_weights.new_zeros(ids.shape)
            return lambda: ExpertInputs(layout=self.backend.layout, x=rows, topk_ids=ids, topk_weights=weights)
        return self.backend.prepare_async(a1, topk_weights, topk_ids)


def skip_an_exchange() -> Components:
    return Components(prepare_finalize=Skipping)


class DropsAYield(UBatchContext):
    """Ubatch 0 keeps the baton once, where the schedule hands it on."""

    def yield_(self) -> None:
        if self.index == 0 and self.played_yields == 1:
            return
        super().yield_()


def drop_yield() -> Components:
    return Components(context=DropsAYield)


class Dying(Wrapped):
    """Its process is killed in the second combine of ubatch 0."""

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Any:
        self.calls += dbo_current_ubatch_id() == 0
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.backend.finalize_async(expert_out, topk_weights, topk_ids)


def killed() -> Components:
    return Components(prepare_finalize=Dying)


def raises_in_ubatch_1() -> Components:
    return Components(before_ubatch=_raise_in_1)


def _raise_in_1(index: int) -> None:
    if index == 1:
        raise ValueError("planted in ubatch 1")


class SkippingACall(Wrapped):
    """Leaves out one low-latency dispatch of ubatch 1: what the experts get is what an earlier call left."""

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Any:
        self.calls += dbo_current_ubatch_id() == 1
        if self.calls == 2 and dbo_current_ubatch_id() == 1:
            self.calls += 1
            own = self.backend
            rows = own.max_tokens_per_rank * own.buffer.world.size
            local = own.num_experts // own.buffer.world.size
            own._handles[1] = {"tokens": a1.shape[0], "most": own.max_tokens_per_rank, "layout": []}
            x = a1.new_zeros((local, rows, a1.shape[1]))
            return lambda: ExpertInputs(layout="batched", x=x, counts=None)
        return self.backend.prepare_async(a1, topk_weights, topk_ids)


def skip_a_call() -> Components:
    return Components(prepare_finalize=SkippingACall)


class WaitsForNothing(SchedulePlayer):
    """Exchanges and what uses them are launched without a wait for what they need."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._needs = dict.fromkeys(self._needs, ())


def miss_a_wait() -> Components:
    return Components(player=WaitsForNothing)


class RecordsLate(SchedulePlayer):
    """A point's event is recorded when the baton has come back, so that it covers the peer's work too."""

    def _next(self, layer: int) -> Item:
        opened = None
        if isinstance(self.items[self._position], Yield):
            opened, self._open = self._open, None
        item = super()._next(layer)
        if opened is not None:
            self._open = opened
        return item


def record_late() -> Components:
    return Components(player=RecordsLate)
