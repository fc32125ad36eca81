"""Needs torch. The one place that touches torch's experimental Python backends: registers the device type ``sim``."""

from __future__ import annotations

from typing import Any

import torch

from dbo.errors import NotAvailable
from sim.tensors import registry

NAME = "sim"
BACKEND_KEY = "PrivateUse1"


class SimModule:
    """What ``torch.sim`` offers: the questions that torch asks of every backend module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return registry.device_count()

    def current_device(self) -> int:
        return registry.current_rank()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Nothing to seed: random numbers on sim come from CPU generators, in the order of issue."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def resolve_rank(device: Any) -> int:
    """The rank that a ``sim`` device names."""
    index = torch.device(device).index
    return registry.current_rank() if index is None else index


def setup() -> None:
    """Register ``sim`` with torch; a second call does nothing.

    Raises:
        NotAvailable: this torch has no Python backends, or another package has taken the one slot.
    """
    taken = torch._C._get_privateuse1_backend_name()
    if taken == NAME and isinstance(getattr(torch, NAME, None), SimModule):
        return
    if taken not in (NAME, "privateuseone"):
        raise NotAvailable.of(
            "torch has one slot for a device type of one's own", fix="run it in another process", taken_by=taken
        )
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
    except ImportError as error:
        raise NotAvailable.of(
            "the device sim needs torch's Python backends", fix="install torch 2.10 or newer", torch=torch.__version__
        ) from error
    register(rename=NAME, backend_module=SimModule())
