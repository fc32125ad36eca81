"""Needs torch. Values: poison until the stream has run, bit for bit the CPU's afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from sim.tensors import SimTensor, is_poison, raw, register_device, unregister_all
from tests.sim.fifo_device import FifoDevice


@pytest.fixture
def device() -> Iterator[FifoDevice]:
    made = FifoDevice(0)
    register_device(0, made)
    yield made
    unregister_all()


def _scatter(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out.scatter_(0, i[:, None].expand(-1, x.shape[1]), x[: i.shape[0]])
    return out


def _kv_write(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    cache = torch.zeros(4, 3, x.shape[1], dtype=x.dtype, device=x.device)
    cache.view(-1, x.shape[1])[i] = x[: i.shape[0]]
    return cache[torch.tensor([2, 0], device=x.device)]


def _in_place_chain(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:3].mul_(2).add_(x[0])
    y.t_()
    y.unsqueeze_(0).sub_(1)
    y[..., ::2].zero_()
    return y


def _rope(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(x.shape[0], device=x.device)[:, None] * torch.ones(4, device=x.device)
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.float().reshape(x.shape[0], 4, 2)) * turn).flatten(1)


def _accumulate(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out.index_add_(0, i, x[: i.shape[0]])
    out.index_put_((i,), x[: i.shape[0]], accumulate=True)
    return out


def _out(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, dtype=x.dtype, device=x.device)
    torch.add(x, x, out=out)
    torch.mul(out, x, out=out)
    return out


Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, Program] = {
    "scalar arithmetic": lambda x, i: (x * 2 + 1.5) / 3 - x**2,
    "promotion": lambda x, i: x * i[:, None].to(torch.int32)[:1] + torch.tensor(2.0),
    "promotion of integers": lambda x, i: (i * 2.5 + (i + 1) / 2 + 2.0**i) * torch.tensor(2.0, dtype=torch.float64),
    "matmul": lambda x, i: x @ x.t() @ x,
    "batched matmul": lambda x, i: torch.matmul(x.expand(3, -1, -1), x.t().contiguous().expand(3, -1, -1)),
    "einsum": lambda x, i: torch.einsum("th,uh->tu", x, x),
    "linear": lambda x, i: F.linear(x, x, x[:, 0]),
    "softmax": lambda x, i: x.softmax(-1) + x.log_softmax(0),
    "rms norm": lambda x, i: F.rms_norm(x, (x.shape[1],), x[0], 1e-6),
    "layer norm": lambda x, i: F.layer_norm(x, (x.shape[1],)),
    "silu": lambda x, i: F.silu(x) * F.gelu(x).tanh(),
    "attention": lambda x, i: F.scaled_dot_product_attention(*[x.view(1, 2, -1, x.shape[1])] * 3, is_causal=True),
    "attention with a mask": lambda x, i: F.scaled_dot_product_attention(
        *[x.view(1, 2, -1, x.shape[1])] * 3, attn_mask=torch.ones(3, 3, dtype=torch.bool, device=x.device).tril()
    ),
    "top-k": lambda x, i: x.topk(2, dim=-1)[0] + x.sort(dim=-1)[0][:, :2],
    "top-k indices": lambda x, i: x.topk(2, dim=-1)[1],
    "argmax": lambda x, i: x.argmax(-1),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, x.shape[1])),
    "index": lambda x, i: x[i] + x[i, 1:2] + x[..., None][i, :, 0],
    "index select": lambda x, i: x.index_select(0, i) + F.embedding(i, x),
    "scatter": _scatter,
    "KV write": _kv_write,
    "accumulate": _accumulate,
    "in place": _in_place_chain,
    "out=": _out,
    "cat, stack, split": lambda x, i: torch.cat([torch.stack(x.split(4, -1)).sum(0), x[:, :2]], dim=-1),
    "where, masked_fill": lambda x, i: torch.where(x > 0, x, -x).masked_fill(x > 1, float("-inf")),
    "masked assignment": lambda x, i: x.clone().index_put_((x > 0,), torch.tensor(0.5, dtype=x.dtype)),
    "cumsum, one_hot": lambda x, i: F.one_hot(i, 8).cumsum(0),
    "bincount by comparison": lambda x, i: (i[:, None] == torch.arange(6, device=x.device)).sum(0),
    "factories": lambda x, i: torch.full_like(x, 3) + torch.ones_like(x) + x.new_zeros(x.shape) + x.new_full((1,), 2),
    "triangle": lambda x, i: torch.tril(x) + torch.triu(x, 1),
    "rotary": _rope,
    "dtype round trip": lambda x, i: x.to(torch.float16).double().to(torch.float32),
    "view as dtype": lambda x, i: (x + 1).view(torch.uint8),
    "logical": lambda x, i: (x > 0) & ~(x > 1) | (x == 0),
    "reductions": lambda x, i: torch.stack([x.mean(), x.amax(), x.std(), x.logsumexp(0).sum(), x.norm()]),
    "flip, roll, repeat": lambda x, i: x.flip(0).roll(1, 1).repeat(2, 1),
    "repeat_interleave": lambda x, i: x[:4].repeat_interleave(i, dim=0, output_size=9),
    "searchsorted": lambda x, i: torch.searchsorted(x[0].sort()[0], x[1]),
}


def _inputs(dtype: torch.dtype, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 8, generator=generator).to(dtype)
    return x.to(where), torch.tensor([5, 0, 3, 1]).to(where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_the_cpu(device: FifoDevice, name: str, mode: Callable[[], object], dtype: torch.dtype) -> None:
    program = PROGRAMS[name]
    with mode():
        wanted = program(*_inputs(dtype, "cpu"))
        x, i = _inputs(dtype, "sim")
        device.drain()
        got = program(x, i)
        assert isinstance(got, SimTensor)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert device.pending, "something was run at issue"
        if got.dtype not in (torch.bool, torch.uint8):
            before = is_poison(raw(got))
            fresh = before if name not in ("scatter", "KV write") else before[:1]
            assert bool(fresh.all())
        assert device.host_reads == [], "nothing here needs the host"
        device.drain()
        assert torch.equal(raw(got), wanted)
        assert got.stride() == wanted.stride()


def test_histc_of_integers_which_only_devices_have(device: FifoDevice) -> None:
    counts = torch.histc(torch.tensor([5, 0, 3, 3], dtype=torch.int32, device="sim"), bins=6, min=0, max=5)
    device.drain()
    assert raw(counts).tolist() == [1, 0, 0, 2, 0, 1]
    assert counts.dtype is torch.int32


def test_host_changes_after_the_copy_do_not_show(device: FifoDevice) -> None:
    source, scalar = torch.ones(4), torch.tensor(2.0)
    x = source.to("sim") * scalar
    source.zero_()
    scalar.zero_()
    assert x.tolist() == [2.0] * 4


@pytest.mark.parametrize("wait", [True, False], ids=["with the wait", "without"])
def test_a_missing_wait_yields_poison(device: FifoDevice, wait: bool) -> None:
    """Written on compute, read on comm, and comm runs first."""
    x = torch.ones(4, device="sim")
    y = x + 1
    done = device.record()
    with device.stream("comm"):
        if wait:
            device.wait(done)
        z = y * 10
    device.drain("comm", "compute")
    assert bool(is_poison(raw(z)).all()) is not wait
    if wait:
        assert raw(z).tolist() == [20.0] * 4


def test_random_numbers_are_drawn_in_the_order_of_issue(device: FifoDevice) -> None:
    def draw(where: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        own = torch.Generator().manual_seed(4)
        a = torch.rand(5, device=where)
        b = torch.randn(2, 3, device=where)
        c = torch.randperm(6, device=where)
        d = torch.empty(4, device=where).exponential_(generator=own)
        e = torch.randint(0, 9, (4,), device=where)
        f = torch.rand_like(a) + torch.randn_like(a)
        return [a, b, c, d, e, f]

    wanted = draw("cpu")
    got = draw("sim")
    device.drain()
    for left, right in zip(got, wanted, strict=True):
        assert torch.equal(raw(left), right)


def test_data_dependent_draws_do_not_depend_on_the_order_of_execution(device: FifoDevice) -> None:
    weights = torch.rand(16, device="sim")
    results = []
    for order in (("compute", "comm"), ("comm", "compute")):
        torch.manual_seed(5)
        device.drain()
        a = torch.multinomial(weights, 8)
        with device.stream("comm"):
            b = torch.multinomial(weights, 8)
        device.drain(*order)
        results.append((raw(a).tolist(), raw(b).tolist()))
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def test_an_operation_can_run_again(device: FifoDevice) -> None:
    """What a graph replay does: the same work on the same bytes, with new inputs."""
    x = torch.ones(3, device="sim")
    device.drain()
    already = len(device.log)
    y = (x + 1) * 2
    device.drain()
    raw(x).fill_(4)
    for operation in device.log[already:]:
        operation.run()
    assert raw(y).tolist() == [10.0] * 3


def test_shape_errors_come_at_issue(device: FifoDevice) -> None:
    x = torch.ones(2, 3, device="sim")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes|size mismatch|must have same"):
        x @ x
    with pytest.raises(RuntimeError):
        x.add_(torch.ones(4, 3, device="sim"))
    with pytest.raises(RuntimeError):
        x.copy_(torch.ones(5))


def test_an_error_of_queued_work_names_the_operation_and_the_line(device: FifoDevice) -> None:
    x = torch.ones(2, 3, device="sim")
    x.index_select(0, torch.tensor([7], device="sim"))
    with pytest.raises((IndexError, RuntimeError)) as caught:
        device.drain()
    assert any("index_select on sim, issued at" in n and "test_tensors_values.py:" in n for n in caught.value.__notes__)


def test_an_error_caused_by_poison_says_so(device: FifoDevice) -> None:
    x = torch.ones(2, 3, device="sim")
    with device.stream("comm"):
        at = torch.zeros(2, dtype=torch.int64, device="sim")
    x.index_select(0, at)
    with pytest.raises((IndexError, RuntimeError)) as caught:
        device.drain("compute", "comm")
    assert any("still holds poison" in note for note in caught.value.__notes__)


def test_the_default_dtype_is_part_of_what_is_cached(device: FifoDevice) -> None:
    x = torch.arange(3, device="sim")
    assert (x * 2.5).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x * 2.5).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
