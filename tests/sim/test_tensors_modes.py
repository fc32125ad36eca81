"""Needs torch. Grad, inference, autocast and dispatch modes, and threads: captured at issue, whatever runs the work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sim.tensors import raw, register_device, submit_kernel, unregister_all, wrap
from tests.sim.fifo_device import FifoDevice

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.fixture
def device() -> Iterator[FifoDevice]:
    made = FifoDevice(0)
    register_device(0, made)
    yield made
    unregister_all()


@pytest.mark.parametrize("running", MODES)
@pytest.mark.parametrize("issuing", MODES)
def test_work_issued_in_one_mode_runs_in_another(device: FifoDevice, issuing: str, running: str) -> None:
    """A persistent cache made outside, written in the step: the case that version counters usually break."""
    cache = torch.zeros(4, 2, device="sim")
    with MODES[issuing]():
        x = torch.ones(2, 2, device="sim")
        cache[1:3].copy_(x)
        cache.view(2, 4)[0].add_(1)
        y = torch.nn.functional.linear(cache, x).t()
        y.unsqueeze_(0)
        y[..., 0].mul_(3)
    with MODES[running]():
        device.drain()
    wanted = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [0.0, 0.0]])
    assert torch.equal(raw(cache), wanted)
    scaled = (wanted @ torch.ones(2, 2)).t().unsqueeze(0)
    scaled[..., 0] *= 3
    assert torch.equal(raw(y), scaled)


def test_queued_work_sees_the_modes_of_its_issue(device: FifoDevice) -> None:
    seen: list[tuple[bool, bool]] = []
    x = torch.zeros(1, device="sim")

    def note() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    for mode in MODES.values():
        with mode():
            submit_kernel("note", reads=[x], writes=[], run=note)
    for mode in MODES.values():
        seen.clear()
        with mode():
            outside = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            for operation in device.log[-3:]:
                operation.run()
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == outside
        assert seen == [(True, False), (False, False), (False, True)]


def test_an_inference_tensor_is_one_outside_too(device: FifoDevice) -> None:
    with torch.inference_mode():
        x = torch.ones(2, device="sim")
        y = x + 1
    assert y.is_inference()
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        y.add_(1)
    normal = torch.ones(2, 2, device="sim")
    with torch.inference_mode():
        view = normal.t()
        view.mul_(2)
        assert not view.is_inference()
    view.add_(1)
    assert normal.tolist() == [[3.0, 3.0]] * 2


def test_composites_are_taken_apart_under_every_mode(device: FifoDevice) -> None:
    names = {}
    for mode in ("no_grad", "inference_mode"):
        with MODES[mode]():
            x = torch.ones(2, 3, 4, device="sim")
            device.log.clear()
            torch.nn.functional.linear(x, torch.ones(4, 4, device="sim"))
            torch.einsum("abc,abd->acd", x, x)
            x.transpose(0, 1).reshape(6, 4).flatten().contiguous()
            names[mode] = [op.name for op in device.log]
    assert names["no_grad"] == names["inference_mode"]
    assert "linear" not in names["no_grad"] and "mm" in names["no_grad"]


def test_autocast_is_decided_at_issue(device: FifoDevice) -> None:
    a = torch.randn(3, 3).to("sim")
    b = a @ a
    with torch.autocast("cpu", dtype=torch.bfloat16):
        device.drain()
    assert b.dtype is torch.float32
    with torch.no_grad():
        assert torch.equal(raw(b), raw(a) @ raw(a))


class Counter(TorchDispatchMode):
    """Counts operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_program_and_not_the_work(device: FifoDevice) -> None:
    with torch.no_grad():
        x = torch.ones(3, device="sim")
        with Counter() as counter:
            y = (x * 2).sum()
            device.drain()
        assert counter.seen == ["aten::mul", "aten::sum"]
        assert y.item() == 6.0


def test_forward_with_gradients_on(device: FifoDevice) -> None:
    module = torch.nn.Linear(2, 2).to("sim")
    wanted = torch.nn.Linear(2, 2)
    wanted.load_state_dict({k: v.cpu() for k, v in module.state_dict().items()})
    out = module(torch.ones(1, 2, device="sim"))
    assert out.requires_grad
    assert torch.equal(out.detach().cpu(), wanted(torch.ones(1, 2)).detach())


def test_threads_have_their_own_modes_and_streams(device: FifoDevice) -> None:
    """Two threads take turns, operation by operation, one in inference mode, one not."""
    turn, results, errors = [threading.Semaphore(1), threading.Semaphore(0)], {}, []
    weight = torch.randn(4, 4).to("sim")

    def program(me: int, mode: Callable[[], contextlib.AbstractContextManager[object]], stream: str) -> None:
        try:
            with mode(), device.stream(stream):
                x = None
                for step in range(20):
                    turn[me].acquire()
                    x = torch.full((2, 4), float(me + 1), device="sim") if x is None else x @ weight / 2
                    x.add_(step)
                    turn[1 - me].release()
                results[me] = x
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)
            turn[1 - me].release()

    threads = [
        threading.Thread(target=program, args=(0, torch.inference_mode, "compute")),
        threading.Thread(target=program, args=(1, torch.no_grad, "comm")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert errors == []
    assert (results[0].is_inference(), results[1].is_inference()) == (True, False)
    device.drain("compute", "comm")
    for me in (0, 1):
        with torch.no_grad():
            x = torch.full((2, 4), float(me + 1))
            for step in range(20):
                x = (x if step == 0 else x @ raw(weight) / 2).add_(step)
            assert torch.equal(raw(results[me]), x)
    assert {op.stream for op in device.log} == {"compute", "comm"}


def test_a_stream_drained_by_another_thread(device: FifoDevice) -> None:
    with torch.inference_mode():
        x = wrap(torch.ones(3), 0)
        x.add_(1)
    thread = threading.Thread(target=device.drain)
    thread.start()
    thread.join(timeout=30)
    assert raw(x).tolist() == [2.0] * 3
