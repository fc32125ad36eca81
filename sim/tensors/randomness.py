"""Needs torch. Random operations: numbers come from CPU generators in the order of issue, not of execution.

Where the numbers do not depend on the tensor's data they are drawn at issue, and the operation writes them later: the
values equal the CPU's for the same seed. Where they do (`multinomial`, `bernoulli` of probabilities), the operation
gets a generator of its own, seeded at issue from the one in use.
"""

from __future__ import annotations

from typing import Any

import torch

from dbo.errors import NotAvailable
from sim.tensors.operands import Operands
from sim.tensors.queued import functional, in_place
from sim.tensors.tensor import SimTensor

DRAWN_IN_PLACE = frozenset("uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_".split())
DRAWN_LIKE = frozenset("rand_like randn_like randint_like rand randn randint randperm".split())


def random(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Issue one operation that uses random numbers.

    Raises:
        NotAvailable: it takes no generator, so that its numbers cannot be fixed at issue (dropout in training mode).
    """
    operands = Operands(func, args, kwargs)
    if len(operands.tensors) == 1 and name in DRAWN_IN_PLACE:
        target: SimTensor = args[0]
        drawn = func(torch.empty_like(target._raw), *operands.args[1:], **operands.kwargs)
        in_place(_write(drawn), name, operands, [target], blind=True)
        return target
    if name in DRAWN_LIKE and not any(isinstance(t, torch.Tensor) for t in operands.args[1:]):
        drawn = func(*operands.args, **operands.kwargs)
        return functional(func, name, operands, reads=(), kernel=lambda *_, **__: drawn)
    if not any(a.name == "generator" for a in func._schema.arguments):
        raise NotAvailable.of(
            "a random operation on sim draws in the order of issue, which needs a generator argument",
            fix="use model.eval(), or draw a mask with torch.rand",
            op=name,
        )
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=kwargs.get("generator")))

    def kernel(*raw_args: Any, **raw_kwargs: Any) -> Any:
        raw_kwargs["generator"] = torch.Generator().manual_seed(seed)
        return func(*raw_args, **raw_kwargs)

    if func._schema.is_mutable:
        in_place(kernel, name, operands, [args[0]], blind=False)
        return args[0]
    return functional(func, name, operands, kernel=kernel)


def _write(drawn: torch.Tensor) -> Any:
    def kernel(target: torch.Tensor, *_: Any, **__: Any) -> None:
        target.copy_(drawn)

    return kernel
