"""Needs torch. `SimTensor`: a tensor on `sim`, which keeps its bytes in a CPU tensor that queued work fills."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dbo.errors import DeviceTensorError, HostAccessError, NotAvailable
from dbo.trace import Access
from sim.tensors.hostread import copy_to_host
from sim.tensors.layout import Layout, layout_of
from sim.tensors.poison import poison_value
from sim.tensors.protocol import RecordsStreams, TensorDevice
from sim.tensors.registry import device_of

_torch_devices: dict[int, torch.device] = {}


def torch_device(rank: int) -> torch.device:
    """``torch.device("sim", rank)``."""
    found = _torch_devices.get(rank)
    if found is None:
        found = _torch_devices[rank] = torch.device("sim", rank)
    return found


class Storage:
    """One buffer of one device; shared by a tensor and its views, and gone with the last of them."""

    __slots__ = ("device", "rank", "buffer", "nbytes", "name", "__weakref__")

    def __init__(self, rank: int, nbytes: int, name: str) -> None:
        self.device: TensorDevice = device_of(rank)
        self.rank = rank
        self.nbytes = nbytes
        self.name = name
        self.buffer = self.device.new_buffer(nbytes, name)

    def grow(self, nbytes: int) -> None:
        """The storage moved to a larger buffer (`Tensor.resize_`)."""
        old, self.buffer, self.nbytes = self.buffer, self.device.new_buffer(nbytes, self.name), nbytes
        self.device.free_buffer(old)

    def __del__(self) -> None:
        if hasattr(self, "buffer"):  # not when new_buffer refused
            self.device.free_buffer(self.buffer)


class SimTensor(torch.Tensor):
    """A tensor on ``sim:rank``. Made by torch's own functions with ``device="sim"``, or by `sim.tensors.wrap`.

    Every operation is queued by `sim.tensors.dispatch`; metadata (shape, dtype, device, strides) is known at once.
    """

    __slots__ = ("_raw", "_storage", "_layout", "_offset_bytes")
    _raw: torch.Tensor
    _storage: Storage
    _layout: Layout
    _offset_bytes: int

    # Methods are not wrapped: overriding them in this class is enough, and an operation costs 3 µs less.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def _access(self) -> Access:
        return self._layout.access(self._storage.buffer, self._offset_bytes)

    # -- host access: allowed by way of a copy, refused otherwise ------------------------------------------------------

    def _refuse(self, what: str, fix: str = "copy it to the host first: tensor.cpu()") -> NoReturn:
        raise HostAccessError.of(f"{what} needs host memory", fix=fix, device=self.device, shape=tuple(self.shape))

    def numpy(self, *, force: bool = False) -> Any:
        """Refused as for any device tensor, unless ``force=True`` asks for the copy."""
        if force:
            return self.detach().cpu().numpy()
        self._refuse("Tensor.numpy()", "copy it to the host first: tensor.cpu().numpy()")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self._refuse("numpy.asarray(tensor)", "copy it to the host first: tensor.cpu().numpy()")

    def data_ptr(self) -> int:
        self._refuse("Tensor.data_ptr()", "there is no address; sim.tensors.accesses(tensor) names buffer and bytes")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("Tensor.__dlpack__()")

    def __dlpack_device__(self) -> Any:
        self._refuse("Tensor.__dlpack__()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickling")

    def share_memory_(self) -> Any:
        self._refuse("Tensor.share_memory_()")

    def tolist(self) -> Any:
        return copy_to_host(self, "tolist").tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        where = f"device='{self.device}'"
        if self._storage.device.capturing:  # a debugger must not break a capture
            return f"SimTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {where}, unreadable during a capture)"
        shown = repr(copy_to_host(self, "repr"))
        return f"{shown[:-1]}, {where})"

    # -- what torch.Tensor does through addresses ----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            twin: torch.Tensor = self.clone()
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=self.requires_grad)
        elif self.is_leaf:
            twin.requires_grad_(self.requires_grad)
        memo[id(self)] = twin
        return twin

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, SimTensor):
            raise DeviceTensorError.of(
                "tensor.data = other keeps the device", fix="move it first: other.to(tensor.device)", device=new.device
            )
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        adopt(self, new)

    def record_stream(self, stream: Any) -> None:
        """Keep the storage from being reused before what is queued on `stream` now has run."""
        device = self._storage.device
        if not isinstance(device, RecordsStreams):
            raise NotAvailable.of(
                "record_stream needs a device whose allocator knows it",
                fix="keep a reference to the tensor instead",
                device=self.device,
            )
        device.record_stream(self._storage.buffer, stream)


def adopt(tensor: SimTensor, other: SimTensor) -> None:
    """Make `tensor` stand for the bytes of `other`; torch's own metadata must be equal already."""
    tensor._raw, tensor._storage = other._raw, other._storage
    tensor._layout, tensor._offset_bytes = other._layout, other._offset_bytes


def view_on(storage: Storage, data: torch.Tensor) -> SimTensor:
    """A tensor over `data`, a CPU tensor that lies in `storage`'s bytes."""
    lay = layout_of(data)
    offset = data.storage_offset()
    made = torch.Tensor._make_wrapper_subclass(
        SimTensor, lay.shape, lay.strides, offset, None, lay.dtype, torch.strided, torch_device(storage.rank)
    )
    made._raw, made._storage, made._layout, made._offset_bytes = data, storage, lay, offset * lay.itemsize
    return made


def fresh(lay: Layout, rank: int, name: str) -> SimTensor:
    """A new, poisoned tensor in a buffer of its own."""
    data = torch.empty_strided(lay.shape, lay.strides, dtype=lay.dtype, device="cpu")
    data.fill_(poison_value(lay.dtype))
    made = torch.Tensor._make_wrapper_subclass(
        SimTensor, lay.shape, lay.strides, 0, None, lay.dtype, torch.strided, torch_device(rank)
    )
    made._storage = Storage(rank, lay.nbytes, name)
    made._raw, made._layout, made._offset_bytes = data, lay, 0
    return made
