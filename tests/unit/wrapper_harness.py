"""`UBatchWrapper` around any function, on one simulated rank: what the wrapper's and the player's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from dbo.batch.slicing import UBatchSlice
from dbo.engine.components import Components
from dbo.schedule import Schedule, load_schedule, parse_schedule
from dbo.ubatching.forward_context import ForwardContext, override_forward_context
from dbo.ubatching.wrapper import UBatchWrapper
from sim.world import SimRun, SimWorld, launch


class ArrayTensors:
    """Row operations on numpy arrays, done when they are called: what flows through the model has values, no device."""

    def rows(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        return array[start:stop]

    def cat(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)


def schedule_of(text: str, backend: str = "nccl") -> Schedule:
    """A preset by name, or the schedule whose layer is `text`."""
    if "|" not in text:
        return load_schedule(text)
    return parse_schedule(f"schedule under_test\nbackends {backend}\nlayer {text}\n")


def wrapper_of(
    world: SimWorld,
    model: Callable[..., Any],
    *,
    schedule: str = "mlp_shared_overlap",
    backend: str = "nccl",
    moe_layers: Sequence[int] = (),
    program: Components | None = None,
) -> UBatchWrapper:
    return UBatchWrapper(
        model,
        world=world,
        schedule=schedule_of(schedule, backend),
        backend=backend,
        moe_layers=moe_layers,
        program=program,
    )


def step_context(bounds: Sequence[int] | None, *, num_tokens: int = 0, real: int | None = None, step: int = 0) -> Any:
    """A forward context that is cut at `bounds` (first 0, last the number of tokens), or not at all."""
    if bounds is None:
        return ForwardContext(attn_metadata="whole", num_tokens=num_tokens, num_real_tokens=num_tokens, step=step)
    real = bounds[-1] if real is None else real
    pairs = list(zip(bounds, bounds[1:], strict=False))
    return ForwardContext(
        attn_metadata=None,
        kv_caches=("cache",),
        num_tokens=bounds[-1],
        num_real_tokens=real,
        ubatch_slices=[UBatchSlice(slice(0, 1), slice(a, b)) for a, b in pairs],
        ubatch_metadata=[SimpleNamespace(num_actual_tokens=max(min(b, real) - a, 0)) for a, b in pairs],
        step=step,
    )


def in_world(program: Callable[[SimWorld], Any], *, vehicle: str = "greenlet", arrays: bool = True) -> SimRun:
    """Run `program` on one rank; an error of it fails the test that did not ask for it."""

    def main(world: SimWorld) -> Any:
        if arrays:
            world.tensors = ArrayTensors()
        return program(world)

    launched = launch(main, ranks=1, mode="ordering", vehicle=vehicle)
    for error in launched.errors:
        if error is not None:
            raise error
    return launched


def call(wrapper: UBatchWrapper, context: ForwardContext, **kwargs: Any) -> Any:
    with override_forward_context(context):
        return wrapper(**kwargs)
