"""Needs torch. Operations with indices: boolean masks (their count is a host read), host indices, declared rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sim.tensors import shapes
from sim.tensors.hostread import read_on_host, refuse_in_capture
from sim.tensors.kernels import to_sim
from sim.tensors.launch import submit
from sim.tensors.operands import Operands, refuse_mix
from sim.tensors.queued import allocate, functional, in_place, reads_of
from sim.tensors.rows import checker, declared_for, first_index
from sim.tensors.tensor import SimTensor

MASKS = (torch.bool, torch.uint8)

READERS = frozenset(("index", "_unsafe_index", "index_select", "gather", "embedding"))
ACCUMULATE = frozenset(("index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_"))
WRITERS = ACCUMULATE | {"index_put_", "_index_put_impl_", "index_copy_", "index_fill_", "scatter_"}


def dynamic(func: Any, name: str, operands: Operands) -> Any:
    """An operation whose result has a shape that depends on data: the host waits for it, then allocates the result."""
    device = operands.tensors[0]._storage.device
    reads = reads_of(operands.tensors)
    values = read_on_host(
        device, f"shape:{name}", f"{name}.count", reads, lambda: func(*operands.args, **operands.kwargs)
    )
    made: list[SimTensor] = []
    outs = allocate(shapes.as_layouts(values), operands.tensors[0]._storage.rank, name, made)
    pairs = list(zip((t._raw for t in made), [values] if isinstance(values, torch.Tensor) else values, strict=True))

    def run() -> None:
        for out, value in pairs:
            out.copy_(value)

    submit(device, name, reads, reads_of(made), run)
    return outs


def host_indices(name: str, target: SimTensor, indices: Any) -> list[Any]:
    """`indices` with CPU tensors copied to the device of `target`; a CPU mask becomes index tensors first."""
    if not isinstance(target, SimTensor):
        refuse_mix(name, None, target.device)
    moved: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or isinstance(index, SimTensor):
            moved.append(index)
            continue
        refuse_in_capture(target._storage.device, f"{name} with host indices", "copy the indices to the device before")
        parts = index.nonzero(as_tuple=True) if index.dtype in MASKS else (index,)
        moved.extend(to_sim(part, target._storage.rank, name="indices") for part in parts)
    return moved


def index(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """``self[indices]``."""
    indices = host_indices(name, args[0], args[1])
    operands = Operands(func, (args[0], indices, *args[2:]), kwargs)
    if any(isinstance(i, SimTensor) and i.dtype in MASKS for i in indices):
        return dynamic(func, name, operands)
    return read_rows(func, name, operands, args[0])


def index_put(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """``self[indices] = values``; with a mask and more than one value the host waits for the count, as on CUDA."""
    target, indices, values = args[0], host_indices(name, args[0], args[1]), args[2]
    masks = [i for i in indices if isinstance(i, SimTensor) and i.dtype in MASKS]
    if masks and not (len(indices) == 1 and values.numel() == 1):
        data = [m._raw for m in masks]
        read_on_host(
            target._storage.device,
            f"shape:{name}",
            f"{name}.count",
            reads_of(masks),
            lambda: [m.count_nonzero() for m in data],
        )
    operands = Operands(func, (target, indices, *args[2:]), kwargs)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    write_rows(func, name, operands, target, blind=not accumulate)
    return target


def gather_rows(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`index_select`, `gather`, `embedding`: reads of rows chosen on the device."""
    return read_rows(func, name, Operands(func, args, kwargs), args[0])


def scatter_rows(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`index_copy_`, `index_add_`, `scatter_`, …: writes to rows chosen on the device."""
    blind = name not in ACCUMULATE and "reduce" not in func._overloadname and "reduce" not in kwargs
    write_rows(func, name, Operands(func, args, kwargs), args[0], blind=blind)
    return args[0]


def read_rows(func: Any, name: str, operands: Operands, source: SimTensor) -> Any:
    """Queue a read of `source` that touches the declared rows, or all of it."""
    declaration = declared_for(source)
    chosen = first_index(name, operands.args) if declaration else None
    if declaration is None or chosen is None:
        return functional(func, name, operands)
    reads = (*declaration.accesses, *reads_of(operands.tensors[1:]))
    check = checker(name, source, chosen, declaration)
    return functional(func, name, operands, reads=reads, kernel=_after(check, func))


def write_rows(func: Any, name: str, operands: Operands, target: SimTensor, *, blind: bool) -> None:
    """Queue a write to `target` that touches the declared rows, or all of it."""
    shapes.outputs(func, operands)
    declaration = declared_for(target)
    chosen = first_index(name, operands.args) if declaration else None
    if declaration is None or chosen is None:
        in_place(func, name, operands, [target], blind=blind)
        return
    others = reads_of(operands.tensors[1:])
    reads = others if blind else (*declaration.accesses, *others)
    check = checker(name, target, chosen, declaration)
    in_place(_after(check, func), name, operands, [target], blind=blind, reads=reads, writes=declaration.accesses)


def _after(check: Callable[[], None], func: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        check()
        return func(*args, **kwargs)

    return kernel
