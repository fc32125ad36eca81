"""Needs torch. Where every operation on a `SimTensor` arrives, and the table of what becomes of it.

The first call of an operation makes its plan from its schema: decompose a composite, take a view now, change metadata
now, wait for a value, or queue the work. Importing this module registers the device ``sim``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sim.tensors import copies, device, factories, indexing, metadata, opaque, randomness, shapes
from sim.tensors.hostread import read_on_host
from sim.tensors.operands import Operands, refuse_mix
from sim.tensors.queued import allocate, functional, in_place, reads_of
from sim.tensors.substitutes import kernel_of
from sim.tensors.tensor import SimTensor

Plan = Callable[[Any, dict[str, Any]], Any]
Handler = Callable[[Any, str, Any, dict[str, Any]], Any]

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EMPTY = frozenset("empty_like new_empty new_empty_strided empty_strided empty".split())
_BLIND = frozenset("fill_ zero_ eye_ masked_fill_ masked_scatter_".split())  # they do not look at what they overwrite

_HANDLERS: dict[str, Handler] = {
    "copy_": copies.copy_,
    "_to_copy": copies.to_copy,
    "index": indexing.index,
    "_unsafe_index": indexing.index,
    "index_put_": indexing.index_put,
    "_index_put_impl_": indexing.index_put,
    **dict.fromkeys(opaque.NAMES, opaque.whole),
    **dict.fromkeys(indexing.READERS - {"index", "_unsafe_index"}, indexing.gather_rows),
    **dict.fromkeys(indexing.WRITERS - {"index_put_", "_index_put_impl_"}, indexing.scatter_rows),
}

_plans: dict[Any, Plan] = {}


def dispatch(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """torch's entry point: one operation below autograd, at least one of whose arguments is a `SimTensor`."""
    plan = _plans.get(func)
    if plan is None:
        plan = _plans[func] = _make_plan(func)
    return plan(args, kwargs or {})


def _make_plan(func: Any) -> Plan:
    schema = func._schema
    name = schema.name.split("::")[-1]
    tags = func.tags
    if func.namespace == "aten" and name in _HANDLERS and "out" not in func._overloadname:
        handler = _HANDLERS[name]
        return lambda args, kwargs: handler(func, name, args, kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
        return lambda args, kwargs: func._op_dk(_COMPOSITE, *args, **kwargs)
    if torch.Tag.inplace_view in tags or name in ("resize_", "set_"):
        return lambda args, kwargs: metadata.change_in_place(func, name, args, kwargs)
    if torch.Tag.nondeterministic_seeded in tags and name != "_fused_sdp_choice":
        return lambda args, kwargs: randomness.random(func, name, args, kwargs)
    if schema.is_mutable:
        return _mutating(func, name)
    if name == "_unsafe_view" or any(r.alias_info is not None for r in schema.returns):
        return lambda args, kwargs: metadata.view(func, args, kwargs)
    if name in _EMPTY:
        return lambda args, kwargs: _empty(func, name, Operands(func, args, kwargs))
    if torch.Tag.data_dependent_output in tags:
        return lambda args, kwargs: _value(func, name, Operands(func, args, kwargs))
    if torch.Tag.dynamic_output_shape in tags:
        return lambda args, kwargs: _dynamic(func, name, Operands(func, args, kwargs))
    kernel = kernel_of(func)
    return lambda args, kwargs: functional(func, name, Operands(func, args, kwargs), kernel=kernel)


def _mutating(func: Any, name: str) -> Plan:
    arguments = func._schema.arguments
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    is_out = all(a.is_out for i, a in enumerate(arguments) if (i, a.name) in written)
    blind = is_out or name in _BLIND
    returns = len(func._schema.returns)

    def plan(args: Any, kwargs: dict[str, Any]) -> Any:
        changed = [kwargs[n] if n in kwargs else args[i] for i, n in written]
        targets = [t for c in changed for t in (c if isinstance(c, (list, tuple)) else [c])]
        for target in targets:
            if not isinstance(target, SimTensor):
                refuse_mix(func, None, target.device)
        operands = Operands(func, args, kwargs)
        result = shapes.outputs(func, operands)
        if is_out:
            _fit(func, targets, result)
            operands = Operands(func, args, kwargs)
        in_place(func, name, operands, targets, blind=blind)
        if returns == 0:
            return None
        return changed[0] if returns == 1 else tuple(changed)

    return plan


def _fit(func: Any, outs: list[SimTensor], result: Any) -> None:
    """Resize ``out=`` tensors that are empty to what the operation makes, as torch does."""
    layouts = list(result) if isinstance(result, (list, tuple)) else [result]
    for out, wanted in zip(outs, layouts, strict=True):
        if out._layout.shape != wanted.shape:
            out.resize_(wanted.shape)


def _empty(func: Any, name: str, operands: Operands) -> Any:
    if operands.rank == -1:
        return func(*operands.args, **operands.kwargs)
    return allocate(shapes.outputs(func, operands), operands.rank, "empty", [])  # type: ignore[arg-type]


def _value(func: Any, name: str, operands: Operands) -> Any:
    """An operation that returns a Python value: the host waits for it."""
    why = "item" if name == "_local_scalar_dense" else name
    return read_on_host(
        operands.tensors[0]._storage.device,
        why,
        why,
        reads_of(operands.tensors),
        lambda: func(*operands.args, **operands.kwargs),
    )


def _dynamic(func: Any, name: str, operands: Operands) -> Any:
    rule = shapes.RULES.get(func._schema.name)
    if rule is not None and rule(operands) is not None:
        return functional(func, name, operands)
    return indexing.dynamic(func, name, operands)


device.setup()
SimTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[method-assign,assignment]
factories.install()
opaque.install()
