"""Needs torch. The two ordinary kinds of queued operations: those that make tensors, and those that work in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dbo.trace import Access
from sim.tensors import shapes
from sim.tensors.launch import submit
from sim.tensors.layout import Layout
from sim.tensors.operands import Operands
from sim.tensors.registry import device_of
from sim.tensors.tensor import SimTensor, fresh


def allocate(result: shapes.Result, rank: int, name: str, made: list[SimTensor]) -> Any:
    """The tree `result` with fresh poisoned tensors in place of layouts; they are appended to `made`, in order."""
    if isinstance(result, Layout):
        out = fresh(result, rank, name)
        made.append(out)
        return out
    if isinstance(result, (list, tuple)):
        return type(result)([allocate(r, rank, name, made) for r in result])
    return result


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a tree, in the order of `allocate`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat_tensors(v)]
    return []


def reads_of(tensors: list[SimTensor]) -> tuple[Access, ...]:
    """What an operation reads that looks at all of these tensors."""
    return tuple([t._access for t in tensors if t._layout.nbytes])


def functional(
    func: Any,
    name: str,
    operands: Operands,
    *,
    reads: tuple[Access, ...] | None = None,
    kernel: Callable[..., Any] | None = None,
) -> Any:
    """Queue an operation that makes new tensors, and return them, poisoned.

    Args:
        func: tells the shapes of the results.
        reads: where the operation touches less than all bytes of its operands.
        kernel: does the work; `func` itself unless given.
    """
    result = shapes.outputs(func, operands)
    kernel = kernel or func
    args, kwargs, rank = operands.args, operands.kwargs, operands.rank
    if rank == -1:  # ``zeros_like(x, device="cpu")``: a host tensor, made without a look at the data
        return kernel(*args, **kwargs)
    device = device_of(rank)  # type: ignore[arg-type]
    if reads is None:
        reads = reads_of(operands.tensors)
    if isinstance(result, Layout):
        out = fresh(result, rank, name)  # type: ignore[arg-type]
        into = out._raw

        def run_one() -> None:
            into.copy_(kernel(*args, **kwargs))

        submit(device, name, reads, (out._access,) if result.nbytes else (), run_one, args)
        return out
    if not func._schema.returns:

        def run_none() -> None:
            kernel(*args, **kwargs)

        submit(device, name, reads, (), run_none, args)
        return None
    made: list[SimTensor] = []
    outs = allocate(result, rank, name, made)  # type: ignore[arg-type]
    if not made:  # a question about metadata
        return outs
    fill = [t._raw for t in made]

    def run_all() -> None:
        for old, new in zip(fill, flat_tensors(kernel(*args, **kwargs)), strict=True):
            old.copy_(new)

    submit(device, name, reads, reads_of(made), run_all, args)
    return outs


def in_place(
    func: Any,
    name: str,
    operands: Operands,
    mutated: list[SimTensor],
    *,
    blind: bool,
    reads: tuple[Access, ...] | None = None,
    writes: tuple[Access, ...] | None = None,
) -> None:
    """Queue an operation that changes `mutated`, which are among its operands.

    Args:
        func: does the work.
        blind: it does not look at what the changed tensors held before.
        reads, writes: where the operation touches less than all bytes of its operands.
    """
    if reads is None:
        looked_at = list(operands.tensors)
        if blind:
            for changed in mutated:  # once each: in ``torch.add(x, y, out=x)`` the other x is read
                at = max(i for i, t in enumerate(looked_at) if t is changed)
                del looked_at[at]
        reads = reads_of(looked_at)
    args, kwargs = operands.args, operands.kwargs

    def run() -> None:
        func(*args, **kwargs)

    submit(mutated[0]._storage.device, name, reads, reads_of(mutated) if writes is None else writes, run, args)
