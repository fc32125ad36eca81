"""Which simulated device stands behind ``torch.device("sim", rank)``. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dbo.errors import DeviceTensorError
from sim.tensors.protocol import TensorDevice

_devices: dict[int, TensorDevice] = {}
_current_rank: ContextVar[int | None] = ContextVar("sim_current_rank", default=None)


def register_device(rank: int, device: TensorDevice) -> None:
    """Let ``torch.device("sim", rank)`` mean `device` from now on; a tensor keeps the device that it was made on."""
    _devices[rank] = device


def unregister_all() -> None:
    """Forget every device. Tensors that are still alive stay readable, but new ones need a new device."""
    _devices.clear()


def device_count() -> int:
    """One more than the largest registered rank."""
    return max(_devices, default=-1) + 1


def device_of(rank: int) -> TensorDevice:
    """The device of `rank`.

    Raises:
        DeviceTensorError: no device was registered for it, or the calling task belongs to another rank (`on_rank`).
    """
    mine = _current_rank.get()
    if mine is not None and mine != rank:
        raise DeviceTensorError.of(
            "a rank makes tensors on its own device only",
            fix=f'write "sim:{mine}" (Tensor.to("sim") without an index is always sim:0, torch fills it in)',
            task_of_rank=mine,
            device=f"sim:{rank}",
        )
    device = _devices.get(rank)
    if device is None:
        known = sorted(_devices)
        raise DeviceTensorError.of(
            "a tensor on sim needs the simulator's device of its rank",
            fix="call sim.tensors.register_device(rank, device), which a simulated world does for its ranks",
            rank=rank,
            registered=known,
        )
    return device


@contextmanager
def on_rank(rank: int) -> Iterator[None]:
    """The calling task is `rank`'s: plain ``"sim"`` means ``sim:rank`` to torch's factories, and others are refused.

    ``Tensor.to("sim")`` stays ``sim:0``, because torch itself fills in the index; on another rank that is refused, too.
    """
    token = _current_rank.set(rank)
    try:
        yield
    finally:
        _current_rank.reset(token)


def current_rank() -> int:
    """The rank that plain ``"sim"`` means: the one of `on_rank`, or the only one registered.

    Raises:
        DeviceTensorError: several devices are registered and the task has not said which is its own.
    """
    rank = _current_rank.get()
    if rank is not None:
        return rank
    if len(_devices) == 1:
        return next(iter(_devices))
    raise DeviceTensorError.of(
        'device "sim" without an index is legal only where one rank is meant',
        fix='write "sim:0", or enter sim.tensors.on_rank(rank)',
        registered=sorted(_devices),
    )
