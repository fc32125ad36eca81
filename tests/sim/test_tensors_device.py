"""Needs torch. The device type ``sim``: how tensors get there, what they tell, what the host may not do."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dbo.errors import CaptureError, DeviceTensorError, HostAccessError, NotAvailable
from sim.tensors import (
    SimTensor,
    declared_host_read,
    on_rank,
    raw,
    register_device,
    to_sim,
    unregister_all,
)
from tests.sim.fifo_device import FifoDevice


@pytest.fixture
def devices() -> Iterator[list[FifoDevice]]:
    made = [FifoDevice(0), FifoDevice(1)]
    for device in made:
        register_device(device.rank, device)
    yield made
    unregister_all()


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, sim, sim.tensors, sim.tensors.protocol, sim.tensors.registry, dbo.trace.accesses;"
        "heavy = {'torch', 'hypothesis'} & set(sys.modules); sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_metadata_is_torchs(devices: list[FifoDevice]) -> None:
    x = torch.zeros(2, 3, 4, device="sim:1", dtype=torch.bfloat16)
    y = x.transpose(0, 2)[1:]
    assert isinstance(y, SimTensor)
    assert y.device == torch.device("sim", 1)
    assert (y.shape, y.stride(), y.storage_offset()) == ((3, 3, 2), (1, 4, 12), 1)
    assert (y.dtype, y.element_size(), y.numel(), y.is_contiguous()) == (torch.bfloat16, 2, 18, False)
    assert devices[0].log == []


def test_every_way_to_the_device_is_a_stream_write(devices: list[FifoDevice]) -> None:
    device = devices[0]
    made = [
        torch.zeros(3, device="sim:0"),
        torch.ones(3, device="sim:0"),
        torch.full((3,), 2, device="sim:0"),
        torch.arange(3, device="sim:0"),
        torch.tensor([1, 2, 3], device="sim:0"),
        torch.eye(3, device="sim:0"),
        torch.linspace(0, 1, 3, device="sim:0"),
        torch.scalar_tensor(3.0, device="sim:0"),
        torch.as_tensor([1.0], device="sim:0"),
        torch.ones(3).to("sim:0"),
        torch.ones(3).to("sim:0", torch.float16),
        to_sim(np.arange(3, dtype=np.int32), 0),
    ]
    for tensor in made:
        written = {access.buffer for op in device.log for access in op.writes}
        assert tensor._storage.buffer in written
    assert device.pending == len(device.log)
    assert device.host_reads == []
    assert made[3].tolist() == [0, 1, 2]
    assert made[11].dtype is torch.int32


def test_empty_is_not_an_operation(devices: list[FifoDevice]) -> None:
    x = torch.empty(3, 2, device="sim:0")
    torch.empty_like(x)
    x.new_empty(4)
    torch.empty_strided((2, 2), (1, 2), device="sim:0")
    assert devices[0].log == []
    assert len(devices[0].buffers) == 1


def test_plain_sim_means_the_tasks_own_rank(devices: list[FifoDevice]) -> None:
    with pytest.raises(DeviceTensorError, match="without an index"):
        torch.empty(1, device="sim")
    with on_rank(1):
        assert torch.empty(1, device="sim").device == torch.device("sim:1")
        assert torch.zeros(1).to("sim:1").device == torch.device("sim:1")
        with pytest.raises(DeviceTensorError, match='write "sim:1"'):
            torch.zeros(1).to("sim")
    assert torch.zeros(1).to("sim").device == torch.device("sim:0")


def test_no_device_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DeviceTensorError, match="register_device"):
        torch.empty(1, device="sim:5")


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b, host: a + b,
        lambda a, b, host: a + host,
        lambda a, b, host: host + a,
        lambda a, b, host: host.add_(a),
        lambda a, b, host: a.copy_(b),
        lambda a, b, host: a.to("sim:1"),
        lambda a, b, host: torch.cat([a, host]),
        lambda a, b, host: torch.add(a, a, out=host),
        lambda a, b, host: host[a.long()],
        lambda a, b, host: torch.nn.functional.linear(a, host),
        lambda a, b, host: torch.zeros_like(a, device="sim:1"),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_two_devices_in_one_operation_are_refused(devices: list[FifoDevice], mix, mode) -> None:
    with mode():
        a, b, host = torch.zeros(3, device="sim:0"), torch.zeros(3, device="sim:1"), torch.zeros(3)
        with pytest.raises((DeviceTensorError, RuntimeError), match=r"same device.*(copy it first|collectives)"):
            mix(a, b, host)


def test_host_scalars_and_host_indices_are_allowed(devices: list[FifoDevice]) -> None:
    x = torch.arange(4.0, device="sim:0")
    y = x * torch.tensor(2.0) + 1
    z = y[torch.tensor([3, 0])] + y[torch.tensor([True, False, False, True])].flip(0)
    assert devices[0].host_reads == []
    assert z.tolist() == [14.0, 2.0]


@pytest.mark.parametrize(
    ("read", "why", "value"),
    [
        (lambda x: x.cpu().tolist(), "cpu", [1.0, 2.0]),
        (lambda x: x.to("cpu", torch.int64).tolist(), "cpu", [1, 2]),
        (lambda x: x[1].item(), "item", 2.0),
        (lambda x: float(x[0]), "item", 1.0),
        (lambda x: bool(x[0] > 0), "item", True),
        (lambda x: x.tolist(), "tolist", [1.0, 2.0]),
        (lambda x: torch.zeros(2).copy_(x).tolist(), "copy_", [1.0, 2.0]),
        (lambda x: x.numpy(force=True).tolist(), "cpu", [1.0, 2.0]),
        (lambda x: torch.equal(x, x.clone()), "equal", True),
        (lambda x: repr(x), "repr", "tensor([1., 2.], device='sim:0')"),
        (lambda x: f"{x[0]}", "item", "1.0"),
        (lambda x: x.nonzero().shape[0], "shape:nonzero", 2),
        (lambda x: x[x > 1].shape[0], "shape:index", 1),
        (lambda x: x.masked_select(x > 5).shape[0], "shape:masked_select", 0),
        (lambda x: x.unique().shape[0], "shape:_unique2", 2),
        (lambda x: x.repeat_interleave(x.long()).shape[0], "shape:repeat_interleave", 3),
    ],
)
def test_a_host_read_is_counted_and_gets_the_value(devices: list[FifoDevice], read, why: str, value: object) -> None:
    device = devices[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.ones(2, device="sim:0") + torch.arange(2, device="sim:0")
            device.host_reads.clear()
            assert read(x) == value
            assert device.host_reads == [(why, False)]
            with declared_host_read("sampled tokens"):
                assert read(x) == value
            assert device.host_reads[1:] == [("sampled tokens", True)]


def test_a_host_read_waits_for_its_own_stream_only(devices: list[FifoDevice]) -> None:
    device = devices[0]
    x = torch.ones(1, device="sim:0")
    with device.stream("comm"):
        y = torch.ones(1, device="sim:0")
        assert y.item() == 1.0
    assert device.pending == 1
    assert torch.isnan(raw(x)).all()


def test_a_host_read_is_an_operation_that_reads(devices: list[FifoDevice]) -> None:
    x = torch.ones(2, 4, device="sim:0")
    x[:, 1].cpu()
    last = devices[0].log[-1]
    assert (last.name, last.reads, last.writes) == ("copy_d2h", (x[:, 1]._access,), ())


@pytest.mark.parametrize(
    "touch",
    [
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.data_ptr(),
        lambda x: torch.from_dlpack(x),
        lambda x: pickle.dumps(x),
        lambda x: x.share_memory_(),
    ],
    ids=["numpy", "asarray", "data_ptr", "dlpack", "pickle", "share_memory"],
)
def test_host_memory_is_refused(devices: list[FifoDevice], touch) -> None:
    x = torch.ones(2, device="sim:0")
    with pytest.raises(HostAccessError, match="copy it to the host first|there is no address"):
        touch(x)
    assert devices[0].host_reads == []


def test_the_refusal_says_the_fix(devices: list[FifoDevice]) -> None:
    with pytest.raises(TypeError, match=r"tensor\.cpu\(\)\.numpy\(\)"):
        torch.ones(2, device="sim:0").numpy()


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: torch.ones(2).to("sim:0"),
        lambda x: x.copy_(torch.ones(2)),
        lambda x: x[torch.tensor([0])],
    ],
)
def test_a_capture_forbids_it(devices: list[FifoDevice], act) -> None:
    device = devices[0]
    x = torch.ones(2, device="sim:0")
    device.drain()
    device.capturing = True
    with pytest.raises(CaptureError, match="capture"):
        act(x)
    assert device.host_reads == []
    assert "unreadable" in repr(x)
    (x + 1).mul_(2)
    assert device.pending


def test_generators_live_on_the_host(devices: list[FifoDevice]) -> None:
    with pytest.raises(RuntimeError):
        torch.Generator(device="sim:0")
    with pytest.raises(NotAvailable, match="order of issue"):
        torch.nn.functional.dropout(torch.ones(2, device="sim:0"), 0.5, training=True)


def test_modules_move(devices: list[FifoDevice]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    x = torch.randn(2, 3)
    wanted = module(x)
    moved = copy.deepcopy(module).to("sim:0")
    assert {p.device for p in moved.parameters()} == {torch.device("sim:0")}
    assert all(isinstance(p, torch.nn.Parameter) for p in moved.parameters())
    with torch.no_grad():
        assert torch.equal(moved(x.to("sim:0")).cpu(), wanted)
    half = moved.to(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(half[0].weight.cpu(), module[0].weight.to(torch.bfloat16))
    twin = copy.deepcopy(half)
    assert twin[0].weight._storage is not half[0].weight._storage
    back = half.to("cpu")
    assert torch.equal(back[0].bias, module[0].bias.to(torch.bfloat16))
    with torch.device("sim:1"):
        born = torch.nn.Linear(2, 2)
    assert born.weight.device == torch.device("sim:1")


def test_state_dicts_load(devices: list[FifoDevice]) -> None:
    module, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).to("sim:0")
    before = target.weight._storage
    target.load_state_dict(module.state_dict())
    assert target.weight._storage is before
    assert torch.equal(target.weight.detach().cpu(), module.weight)


def test_data_assignment_moves_the_bytes(devices: list[FifoDevice]) -> None:
    x, y = torch.zeros(2, device="sim:0"), torch.ones(3, 2, device="sim:0")
    x.data = y
    assert x.shape == (3, 2)
    assert x.tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(DeviceTensorError, match="move it first"):
        x.data = torch.ones(2)


def test_where_an_operation_was_issued(devices: list[FifoDevice]) -> None:
    x = torch.ones(2, device="sim:0")
    torch.nn.functional.silu(x)
    torch.nn.Softmax(dim=0)(x)
    x.new_zeros(3)
    lines = [op.src for op in devices[0].log]
    assert all(line.rpartition(":")[0].endswith("test_tensors_device.py") for line in lines)
    assert all(not line.startswith("/") for line in lines)
    first = int(lines[0].rpartition(":")[2])
    assert [int(line.rpartition(":")[2]) - first for line in lines] == [0, 1, 2, 3]
