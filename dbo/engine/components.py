"""The pieces of a rank's program that may be exchanged: the seams where a fault is planted and a policy is tried.

The shipped program is `Program()`. A fault (`sim.faults`, `dbo check --inject`) is a function from a program to another one;
nothing else in `dbo` knows that faults exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbo.batch.coordinate import decide, exchange
from dbo.batch.slicing import maybe_create_ubatch_slices, slice_plan
from dbo.config.capacity import profile_shapes
from dbo.moe.modular_kernel import FusedMoEModularKernel
from dbo.ubatching.player import SchedulePlayer
from dbo.ubatching.ring import UBatchContext


def _same(value: Any) -> Any:
    return value


def _never(step: int) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Components:
    """One rank's program.

    Attributes:
        exchange, decide: as in `dbo.batch.coordinate`: columns to the table, the table to the decision.
        make_slices, slice_plan: as in `dbo.batch.slicing`.
        context: the ubatch context's class. player: the schedule player's class. kernel: the modular kernel's class.
        prepare_finalize: wraps the all-to-all backend.
        context_parallel: wraps this rank's end of its DCP group.
        effective_config: changes what this rank says that it runs with.
        profile: as `dbo.config.profile_shapes`: the batches that memory is reserved for.
        before_ubatch: called in each ubatch thread before it enters the ring, with the ubatch's index.
        skips_step: step -> True when the rank leaves the step out altogether.
    """

    exchange: Callable[..., Any] = exchange
    decide: Callable[..., Any] = decide
    make_slices: Callable[..., Any] = maybe_create_ubatch_slices
    slice_plan: Callable[..., Any] = slice_plan
    context: type[UBatchContext] = UBatchContext
    player: type[SchedulePlayer] = SchedulePlayer
    kernel: type[FusedMoEModularKernel] = FusedMoEModularKernel
    prepare_finalize: Callable[[Any], Any] = _same
    context_parallel: Callable[[Any], Any] = _same
    effective_config: Callable[[dict[str, Any]], dict[str, Any]] = _same
    profile: Callable[..., Any] = profile_shapes
    before_ubatch: Callable[[int], None] = _same
    skips_step: Callable[[int], bool] = _never
