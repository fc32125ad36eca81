"""Torch tensors on the simulated device ``sim``: a GPU's asynchronous semantics on a CPU.

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
