"""Torch tensors on the simulated device ``sim``: a GPU's asynchronous semantics on a CPU.

copies       `copy_` and `to`: between host and device (a stream write, or a host read), and on the device
device       the one place that touches torch's experimental Python backends
dispatch     where every operation on a `SimTensor` arrives, and the table of what becomes of it
factories    kernels for tensors that are born on sim
hostread     host reads: the host waits for a stream to learn a value, as its program declares or by accident
indexing     operations with indices: boolean masks (their count is a host read), host indices, declared rows
kernels      for code that writes its own device kernels (collectives, all-to-all)
launch       the work of a queued operation, run below autograd whatever the running thread is in the middle of
layout       layouts: one interned object for each (shape
metadata     operations that run at issue: views, and changes of metadata (`t_`, `unsqueeze_`, `resize_`)
opaque       composites that stay whole, because they choose their kernels by the device
operands     takes the arguments of an operation apart: CPU twins of the tensors, the rank, a key for caches
poison       what fresh memory holds until the operation that fills it has run
queued       the two ordinary kinds of queued operations
randomness   random operations: numbers come from CPU generators in the order of issue, not of execution
rows         declared rows: which rows of a tensor an indexed operation may touch, known to the host alone
shapes       what an operation will return, known before it runs
source       where in the user's code an operation was issued: ``dbo/model/attention.py:88``
substitutes  stand-ins for kernels that devices have and the CPU lacks
tensor       `SimTensor`: a tensor on `sim`, which keeps its bytes in a CPU tensor that queued work fills

Importing this package loads no torch; the first use of a name from torch's side does. `protocol` and `registry`
never do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sim.tensors.protocol import TensorDevice
from sim.tensors.registry import on_rank, register_device, unregister_all

if TYPE_CHECKING:
    from sim.tensors.hostread import declared_host_read
    from sim.tensors.kernels import accesses, poisoned_empty, raw, submit_kernel, to_sim, wrap
    from sim.tensors.poison import is_poison, poison_value
    from sim.tensors.rows import declared_rows
    from sim.tensors.tensor import SimTensor

_LAZY = {
    "SimTensor": "tensor",
    "accesses": "kernels",
    "poisoned_empty": "kernels",
    "raw": "kernels",
    "submit_kernel": "kernels",
    "to_sim": "kernels",
    "wrap": "kernels",
    "declared_host_read": "hostread",
    "declared_rows": "rows",
    "is_poison": "poison",
    "poison_value": "poison",
}

__all__ = [
    "SimTensor",
    "TensorDevice",
    "accesses",
    "declared_host_read",
    "declared_rows",
    "is_poison",
    "on_rank",
    "poison_value",
    "poisoned_empty",
    "raw",
    "register_device",
    "submit_kernel",
    "to_sim",
    "unregister_all",
    "wrap",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module("sim.tensors.dispatch")  # a tensor without its dispatcher would be a trap
    return getattr(importlib.import_module(f"sim.tensors.{module}"), name)
