"""Needs torch. Buffers and bytes: when a storage ends, what views share, which bytes an operation says it touches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.errors import NotAvailable
from dbo.trace import Access
from dbo.trace.accesses import overlaps
from sim.tensors import accesses, poisoned_empty, raw, register_device, unregister_all, wrap
from tests.sim.fifo_device import FifoDevice, Operation


@pytest.fixture
def device() -> Iterator[FifoDevice]:
    made = FifoDevice(0)
    register_device(0, made)
    yield made
    unregister_all()


def last(device: FifoDevice) -> Operation:
    return device.log[-1]


# -- lifetime ----------------------------------------------------------------------------------------------------------


def test_a_buffer_ends_with_its_last_tensor_not_with_its_last_work(device: FifoDevice) -> None:
    x = torch.ones(4, device="sim")
    buffer = accesses(x).buffer
    y = x + 1
    view = x[1:]
    del x
    assert buffer in device.buffers
    del view
    assert device.freed == [buffer]
    assert device.pending == 2, "the queued work still holds the data"
    assert y.tolist() == [2.0] * 4


def test_frees_follow_reference_counts(device: FifoDevice) -> None:
    def scratch() -> torch.Tensor:
        a = torch.ones(4, device="sim")
        b = a * 2
        return b.view(2, 2)

    kept = scratch()
    assert list(device.buffers) == [accesses(kept).buffer]
    with torch.inference_mode():
        del kept
        kept = scratch()
        kept = kept.t().reshape(-1)
    assert list(device.buffers) == [accesses(kept).buffer]


def test_names_and_sizes_of_buffers(device: FifoDevice) -> None:
    x = torch.zeros(3, 5, dtype=torch.bfloat16, device="sim")
    y = x @ x.t()
    named = poisoned_empty((2, 2), torch.int64, 0, "receive")
    assert device.buffers[accesses(x).buffer] == ("empty", 30)
    assert device.buffers[accesses(y).buffer] == ("mm", 18)
    assert device.buffers[accesses(named).buffer] == ("receive", 32)


def test_views_share_a_buffer_and_copies_do_not(device: FifoDevice) -> None:
    x = torch.zeros(4, 6, device="sim")
    buffer = accesses(x).buffer
    views = [x[1], x.t(), x.view(-1), x[:, ::2], x.expand(2, 4, 6), x.unflatten(1, (2, 3)), x.detach(), x.data]
    views += [*x.split(2), *x.unbind(1), x.diagonal(), x.narrow(0, 1, 2), x.contiguous(), x.to(torch.float32)]
    assert {accesses(v).buffer for v in views} == {buffer}
    assert len(device.log) == 1
    copies = [x.clone(), x.t().contiguous(), x.t().reshape(-1), x.to(torch.float64)]
    assert buffer not in {accesses(c).buffer for c in copies}


def test_writes_through_a_view_are_seen_in_the_base(device: FifoDevice) -> None:
    x = torch.zeros(3, 4, device="sim")
    x[1, ::2] = 5
    x.t()[3].add_(1)
    wanted = torch.zeros(3, 4)
    wanted[1, ::2] = 5
    wanted.t()[3].add_(1)
    assert torch.equal(x.cpu(), wanted)


# -- metadata in place -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(1),
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(0).squeeze_(0),
        lambda t: t.as_strided_((2, 2), (3, 1), 1),
        lambda t: t.resize_(3, 2),
        lambda t: t.resize_(1, 2),
    ],
    ids=["t_", "unsqueeze_", "transpose_", "squeeze_", "as_strided_", "resize_", "resize_ smaller"],
)
def test_metadata_changes_at_issue(device: FifoDevice, mode, change) -> None:
    before = torch.arange(6.0).view(2, 3)
    for inside in (True, False):
        x = before.to("sim")
        with mode():
            if inside:
                x = before.to("sim")
            x.add_(1)  # queued under the old shape
            queued = len(device.log)
            changed = change(x)
            assert changed is x
            assert len(device.log) == queued
            wanted = change(before + 1)
            assert (x.shape, x.stride(), x.storage_offset()) == (wanted.shape, wanted.stride(), wanted.storage_offset())
            x.mul_(2)
            assert torch.equal(x.cpu(), wanted * 2)


def test_growing_moves_to_another_buffer(device: FifoDevice) -> None:
    x = torch.ones(4, device="sim")
    view = x[:2]
    old = accesses(x).buffer
    x.resize_(3, 5)
    assert device.freed == [old]
    assert accesses(x).buffer == accesses(view).buffer != old
    assert device.buffers[accesses(x).buffer][1] == 60
    values = x.flatten().cpu()
    assert values[:4].tolist() == [1.0] * 4
    assert torch.isnan(values[4:]).all()


def test_set_is_refused(device: FifoDevice) -> None:
    x, y = torch.ones(2, device="sim"), torch.ones(3, device="sim")
    with pytest.raises(NotAvailable, match="copy_ or a view"):
        x.set_(y)


# -- bytes -------------------------------------------------------------------------------------------------------------


def marks(storage_bytes: int, view: torch.Tensor) -> set[int]:
    """The bytes of a CPU view, found by writing into it."""
    whole = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    whole.zero_()
    view.view(torch.uint8).fill_(1) if view.stride()[-1:] == (1,) else _fill_bytes(view)
    return set(whole.nonzero().flatten().tolist())


def _fill_bytes(view: torch.Tensor) -> None:
    view.fill_(torch.tensor([0x01010101], dtype=torch.int32).view(view.dtype)[0] if view.itemsize == 4 else 0x0101)


def byte_set(access: Access) -> set[int]:
    out = {access.offset}
    for n, s in zip(access.sizes, access.strides, strict=True):
        out = {b + i * s for b in out for i in range(n)}
    return out if 0 not in access.sizes else set()


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A random view of a fresh CPU tensor of 4 x 6 x 4 int32."""
    view = torch.zeros(4, 6, 4, dtype=torch.int32)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "step", "select", "transpose", "unsqueeze", "diagonal"]))
        dims = view.dim()
        dim = draw(st.integers(0, dims - 1)) if dims else 0
        if not dims:
            break
        size = view.shape[dim]
        if kind == "slice":
            start = draw(st.integers(0, max(size - 1, 0)))
            view = view.narrow(dim, start, draw(st.integers(0, size - start)))
        elif kind == "step":
            view = view[(slice(None),) * dim + (slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 3))),)]
        elif kind == "select" and size:
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, dims - 1)))
        elif kind == "unsqueeze":
            view = view.unsqueeze(dim)
        elif kind == "diagonal" and dims >= 2:
            view = view.diagonal(dim1=0, dim2=1)
    return view


@settings(max_examples=100, deadline=None)
@given(views(), views())
def test_accesses_are_exact(left: torch.Tensor, right: torch.Tensor) -> None:
    device = FifoDevice(0)
    register_device(0, device)
    base = wrap(torch.zeros(4, 6, 4, dtype=torch.int32), 0)
    found = []
    for view in (left, right):
        twin = base.as_strided(view.shape, view.stride(), view.storage_offset())
        touched = marks(4 * 96, view)
        assert byte_set(accesses(twin)) == touched
        found.append((accesses(twin), touched))
    (a, in_a), (b, in_b) = found
    assert overlaps(a, b) is bool(in_a & in_b)


def test_reads_and_writes_of_operations(device: FifoDevice) -> None:
    x, y = torch.zeros(4, 8, device="sim"), torch.zeros(4, 8, device="sim")
    z = x[:, :4] + y[:, 4:]
    assert last(device).reads == (accesses(x[:, :4]), accesses(y[:, 4:]))
    assert last(device).writes == (accesses(z),)
    x[1:3].add_(y[1:3])
    assert last(device).reads == (accesses(x[1:3]), accesses(y[1:3]))
    assert last(device).writes == (accesses(x[1:3]),)
    x[0].copy_(y[0])
    assert (last(device).reads, last(device).writes) == ((accesses(y[0]),), (accesses(x[0]),))
    x.zero_()
    assert (last(device).reads, last(device).writes) == ((), (accesses(x),))
    torch.add(x, y, out=x)
    assert (last(device).reads, last(device).writes) == ((accesses(x), accesses(y)), (accesses(x),))
    values, indices = y.topk(2)
    assert last(device).writes == (accesses(values), accesses(indices))
    out = torch.cat([x, y])
    assert (last(device).reads, last(device).writes) == ((accesses(x), accesses(y)), (accesses(out),))
    x.expand(3, 4, 8).sum()
    assert last(device).reads == (accesses(x),)


def test_an_empty_tensor_touches_nothing(device: FifoDevice) -> None:
    x, empty = torch.ones(2, 3, device="sim"), torch.ones(0, 3, device="sim")
    out = torch.cat([x, empty])
    assert last(device).reads == (accesses(x),)
    (empty + 1).mul_(2)
    assert (last(device).reads, last(device).writes) == ((), ())
    assert torch.equal(out.cpu(), torch.ones(2, 3))


def test_wrap_shares_memory_and_is_valid_at_once(device: FifoDevice) -> None:
    host = torch.arange(6.0).view(2, 3)
    x = wrap(host[:, 1:], 0, "cache")
    assert (x.shape, x.stride(), x.storage_offset()) == ((2, 2), (3, 1), 1)
    assert device.buffers[accesses(x).buffer] == ("cache", 24)
    x.add_(10)
    assert host[0, 1] == 1
    device.drain()
    assert host.tolist() == [[0, 11, 12], [3, 14, 15]]
    assert raw(x).data_ptr() == host[:, 1:].data_ptr()
