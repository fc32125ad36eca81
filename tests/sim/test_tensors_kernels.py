"""Needs torch. Opaque kernels, and declared rows of indexed reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from dbo.errors import DeviceTensorError, UsageError
from dbo.trace.accesses import any_overlap
from sim.tensors import (
    accesses,
    declared_rows,
    is_poison,
    poisoned_empty,
    raw,
    register_device,
    submit_kernel,
    to_sim,
    unregister_all,
    wrap,
)
from tests.sim.fifo_device import FifoDevice, Operation


@pytest.fixture
def devices() -> Iterator[list[FifoDevice]]:
    made = [FifoDevice(0), FifoDevice(1)]
    for device in made:
        register_device(device.rank, device)
    yield made
    unregister_all()


def last(device: FifoDevice) -> Operation:
    return device.log[-1]


def test_a_kernel_is_one_operation(devices: list[FifoDevice]) -> None:
    x = to_sim(np.arange(6, dtype=np.float32).reshape(2, 3), 0)
    out = poisoned_empty((3, 2), torch.float32, 0, "receive")
    x_raw, out_raw = raw(x), raw(out)
    submit_kernel("transpose", reads=[x], writes=[out[:2]], run=lambda: out_raw[:2].copy_(x_raw.t()[:2]))
    op = last(devices[0])
    assert (op.name, op.reads, op.writes) == ("transpose", (accesses(x),), (accesses(out[:2]),))
    assert op.src.startswith("test_tensors_kernels.py:") or "/test_tensors_kernels.py:" in op.src
    assert bool(is_poison(out_raw).all())
    devices[0].drain()
    assert out_raw[:2].tolist() == [[0, 3], [1, 4]]
    assert bool(is_poison(out_raw[2]).all())


def test_kernels_refuse_nonsense(devices: list[FifoDevice]) -> None:
    a, b = poisoned_empty((1,), torch.float32, 0), poisoned_empty((1,), torch.float32, 1)
    with pytest.raises(DeviceTensorError, match="same device"):
        submit_kernel("mix", reads=[a], writes=[b], run=lambda: None)
    with pytest.raises(DeviceTensorError, match="names what it touches"):
        submit_kernel("nothing", reads=[], writes=[], run=lambda: None)
    for call in (raw, accesses):
        with pytest.raises(UsageError, match="tensor on sim"):
            call(torch.ones(1))
    with pytest.raises(UsageError, match="CPU tensor"):
        wrap(a, 0)
    with pytest.raises(UsageError, match="from the host"):
        to_sim(a, 0)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    ],
    ids=str,
)
def test_poison(devices: list[FifoDevice], dtype: torch.dtype) -> None:
    assert bool(is_poison(raw(poisoned_empty((2, 3), dtype, 0))).all())
    zeros = torch.zeros(2, dtype=torch.float32).to(dtype)
    assert not bool(is_poison(zeros).any())


Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
WRITES: dict[str, Write] = {
    "index_copy_": lambda cache, at, new: cache.index_copy_(0, at, new),
    "index_put_": lambda cache, at, new: cache.index_put_((at,), new),
    "assignment": lambda cache, at, new: cache.__setitem__(at, new),
    "scatter_": lambda cache, at, new: cache.scatter_(0, at[:, None].expand_as(new), new),
    "index_add_": lambda cache, at, new: cache.index_add_(0, at, new),
    "index_fill_": lambda cache, at, new: cache.index_fill_(0, at, 7.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_indexed_write_covers_everything_unless_rows_are_declared(devices: list[FifoDevice], name: str) -> None:
    device = devices[0]
    blocks = torch.zeros(4, 2, 3, device="sim:0")  # 4 blocks of 2 rows
    cache = blocks.view(8, 3)
    at, new = torch.tensor([5, 4], device="sim:0"), torch.ones(2, 3, device="sim:0")
    WRITES[name](cache, at, new)
    assert last(device).writes == (accesses(cache),)
    with declared_rows(blocks, [(2, 3)]):  # block 2 holds rows 4 and 5
        WRITES[name](cache, at, new)
        narrow = last(device)
        assert narrow.writes == (accesses(blocks[2:3]),)
        assert (accesses(cache) in narrow.reads) is False
        assert (accesses(blocks[2:3]) in narrow.reads) is (name == "index_add_")
    with declared_rows(blocks, [(0, 1), (3, 4)]):
        WRITES[name](cache, torch.tensor([0, 7], device="sim:0"), new)
        assert any_overlap(last(device).writes, narrow.writes) is None
    with declared_rows(blocks, [(3, 4)]):
        cache[torch.tensor([-1], device="sim:0")] = new[:1]  # counted from the end, where torch allows it
    device.drain()
    assert bool((raw(cache)[[0, 4, 5, 7]] != 0).all())
    assert bool((raw(cache)[[1, 2, 3, 6]] == 0).all())


@pytest.mark.parametrize("name", WRITES)
def test_a_false_declaration_is_found_when_the_work_runs(devices: list[FifoDevice], name: str) -> None:
    cache = torch.zeros(8, 3, device="sim:0")
    with declared_rows(cache, [(4, 5)]):
        WRITES[name](cache, torch.tensor([4, 5], device="sim:0"), torch.ones(2, 3, device="sim:0"))
    with pytest.raises(DeviceTensorError, match=r"declared rows only.*indices=\[5\]"):
        devices[0].drain()


@pytest.mark.parametrize(
    "read",
    [
        lambda cache, at: cache[at],
        lambda cache, at: cache.index_select(0, at),
        lambda cache, at: cache.gather(0, at[:, None].expand(2, 3)),
        lambda cache, at: torch.nn.functional.embedding(at, cache),
    ],
    ids=["index", "index_select", "gather", "embedding"],
)
def test_indexed_reads_can_be_declared_too(devices: list[FifoDevice], read) -> None:
    device = devices[0]
    cache = to_sim(torch.arange(24.0).view(8, 3), 0)
    at = torch.tensor([6, 1], device="sim:0")
    read(cache, at)
    assert accesses(cache) in last(device).reads
    with declared_rows(cache, [(1, 2), (6, 8)]):
        got = read(cache, at)
    reads = last(device).reads
    assert accesses(cache) not in reads
    assert {accesses(cache[1:2]), accesses(cache[6:8])} <= set(reads)
    assert accesses(at)[:1] in {r[:1] for r in reads}
    assert got.cpu().tolist() == [[18, 19, 20], [3, 4, 5]]
    with declared_rows(cache, [(0, 2)]):
        read(cache, at)
    with pytest.raises(DeviceTensorError, match="declared rows only"):
        device.drain()


def test_a_declaration_is_about_one_tensor_and_one_dimension(devices: list[FifoDevice]) -> None:
    device = devices[0]
    cache, other = torch.zeros(4, 4, device="sim:0"), torch.zeros(4, 4, device="sim:0")
    at, new = torch.tensor([0], device="sim:0"), torch.ones(1, 4, device="sim:0")
    with declared_rows(cache, [(0, 1)]):
        other.index_copy_(0, at, new)
        assert last(device).writes == (accesses(other),)
        cache.index_copy_(1, at, new.t())  # columns: rows say nothing about them
        assert last(device).writes == (accesses(cache),)
        cache[:2].index_copy_(0, at, new)  # a part of the tensor
        assert last(device).writes == (accesses(cache[:2]),)
    with pytest.raises(UsageError, match="rows lie in the tensor"), declared_rows(cache, [(2, 5)]):
        pass
    with pytest.raises(UsageError, match="0-dim"), declared_rows(cache[0, 0], []):
        pass


def test_a_mask_needs_the_host_unless_one_value_fills_it(devices: list[FifoDevice]) -> None:
    device = devices[0]
    x = to_sim(torch.arange(4.0), 0)
    x[x > 2] = 0.0
    assert device.host_reads == []
    x[x > 0] = torch.tensor([5.0, 6.0], device="sim:0")
    assert device.host_reads == [("shape:index_put_", False)]
    assert x.tolist() == [0, 5, 6, 0]
