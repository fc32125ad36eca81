"""What a ubatch thread has from the thread that called the step, for that step only: torch's per-thread modes.

Context variables, device, grad and inference mode, autocast, dispatch and function modes, stream.
`tests/unit/test_wrapper.py` has context variables and streams, which need no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dbo.ubatching.ring import dbo_current_ubatch_id, dbo_yield
from sim.world import SimWorld, launch
from tests.unit.wrapper_harness import call, step_context, wrapper_of


class CountsCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CountsDispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def in_ubatches(ask: Callable[[], Any], *around: Callable[[], AbstractContextManager[Any]]) -> dict[str, list[Any]]:
    """What `ask` answers in both ubatches during a step that is called inside `around`, and in their threads later."""
    answers: dict[str, list[Any]] = {"during": [], "after": [], "caller": []}

    def program(world: SimWorld) -> None:
        def model(*, input_ids: torch.Tensor) -> torch.Tensor:
            dbo_yield()
            answers["during"].append((dbo_current_ubatch_id(), ask()))
            dbo_yield()
            return input_ids

        wrapper = wrapper_of(world, model)
        with ExitStack() as stack:
            for manager in around:
                stack.enter_context(manager())
            call(wrapper, step_context((0, 2, 4)), input_ids=torch.arange(4))
        answers["caller"].append(ask())
        for worker in wrapper._workers:
            worker.submit(lambda: answers["after"].append(ask()))
            worker.join()

    launched = launch(program, ranks=1, mode="numeric")
    assert launched.errors == [None], launched.errors
    assert [ubatch for ubatch, _ in answers["during"]] == [0, 1]
    answers["during"] = [answer for _, answer in answers["during"]]
    return answers


@pytest.mark.parametrize(
    ("ask", "around", "inside"),
    [
        (torch.is_grad_enabled, torch.no_grad, False),
        (torch.is_inference_mode_enabled, torch.inference_mode, True),
        (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", dtype=torch.bfloat16), True),
        (lambda: torch.get_autocast_dtype("cpu"), lambda: torch.autocast("cpu", dtype=torch.float16), torch.float16),
        (lambda: torch.empty(0).device.type, lambda: torch.device("meta"), "meta"),
    ],
    ids=["grad mode", "inference mode", "autocast", "autocast dtype", "default device"],
)
def test_a_mode_of_the_caller_holds_in_every_ubatch_and_ends_with_the_step(
    ask: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]], inside: Any
) -> None:
    outside = in_ubatches(ask, nullcontext)
    assert outside["during"] == outside["after"] and outside["during"][0] != inside
    answers = in_ubatches(ask, around)
    assert answers["during"] == [inside, inside]
    assert answers["after"] == outside["after"] and answers["caller"] == outside["caller"]


@pytest.mark.parametrize("mode_class", [CountsCalls, CountsDispatches])
def test_function_and_dispatch_modes_see_what_every_ubatch_does(mode_class: type[Any]) -> None:
    mode = mode_class()

    def ask() -> int:
        before = mode.calls
        torch.ones(2) + 1
        return mode.calls - before

    answers = in_ubatches(ask, lambda: mode)
    assert all(seen > 0 for seen in answers["during"])
    assert answers["after"] == [0, 0] and answers["caller"] == [0]


def test_modes_nest_in_the_callers_order() -> None:
    seen: list[str] = []

    class Named(TorchFunctionMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(self.name)
            return func(*args, **(kwargs or {}))

    def ask() -> list[str]:
        seen.clear()
        torch.zeros(1)
        return list(seen)

    answers = in_ubatches(ask, lambda: Named("outer"), lambda: Named("inner"))
    assert answers["during"] == [["inner", "outer"]] * 2
