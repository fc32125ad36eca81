"""The exchange of a DCP group alone, on the simulated machine: values, epochs, staging, graphs, and what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra `torch`)")

from dbo.check import judge  # noqa: E402
from dbo.dcp import empty_rows, merge  # noqa: E402
from dbo.dcp.interface import DCPShape  # noqa: E402
from dbo.errors import WorkspaceError  # noqa: E402
from dbo.ubatching.forward_context import ForwardContext, override_forward_context  # noqa: E402
from sim.faults import dcp_group as faults  # noqa: E402
from sim.world import SimRun, launch  # noqa: E402

EXCHANGES = ("ag_rs", "a2a", "a2a_direct")
ROWS, HEADS, DIM = 6, 4, 5
STARTS = (0, 1, 3, 5)  # the last row is padding


def part(rank: int, number: int, rows: int = ROWS) -> tuple[Any, Any, Any]:
    """Partial output with NaN where this rank has no key, its LSE with rubbish there, and local lengths."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    out = torch.randn(rows, HEADS, DIM, generator=generator)
    lse = torch.randn(rows, HEADS, generator=generator) * 3
    lens = torch.tensor([3, (rank + number) % 2, 0 if rank else 2], dtype=torch.int32)
    out[empty_rows(rows, lens, torch.tensor(STARTS))] = math.nan
    return out, lse, lens


def wanted(rank: int, size: int, number: int, rows: int = ROWS) -> Any:
    replica, peer = divmod(rank, size)
    parts = [part(replica * size + source, number, rows) for source in range(size)]
    lses = []
    for _, lse, lens in parts:
        lses.append(torch.where(empty_rows(rows, lens, torch.tensor(STARTS))[:, None], -math.inf, lse))
    mine = slice(peer * HEADS // size, (peer + 1) * HEADS // size)
    return merge(torch.stack([p[0] for p in parts])[:, :, mine], torch.stack(lses)[:, :, mine])[0]


def shape(exchange: str, size: int, **changes: Any) -> DCPShape:
    options = {"max_rows": ROWS, "num_ubatches": 1, "heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    return DCPShape(size=size, backend=exchange, **(options | changes))


def on_device(world: Any, number: int, rows: int = ROWS) -> list[Any]:
    return [world.tensors.from_torch(t) for t in (*part(world.rank, number, rows), torch.tensor(STARTS))]


def exchanges(
    exchange: str, size: int, *, ranks: int, rounds: int = 3, wrap: Callable[[Any], Any] | None = None
) -> SimRun:
    """Each rank makes `rounds` exchanges and no other collective."""

    def program(world: Any) -> list[Any]:
        with torch.inference_mode(), override_forward_context(ForwardContext(attn_metadata=None)):
            group = world.context_parallel(shape(exchange, size))
            group = wrap(group) if wrap is not None else group
            merged = [group.reduce_heads(*on_device(world, number)) for number in range(rounds)]
            return [torch.from_numpy(world.tensors.to_host(m, "compare")).clone() for m in merged]

    return launch(program, ranks=ranks)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("size", "ranks"), [(2, 2), (2, 4), (4, 4)])
def test_every_exchange_gives_the_merge_over_the_group(exchange: str, size: int, ranks: int) -> None:
    launched = exchanges(exchange, size, ranks=ranks)
    assert launched.errors == [None] * ranks
    for rank, results in enumerate(launched.values):
        for number, result in enumerate(results):
            torch.testing.assert_close(result, wanted(rank, size, number), rtol=1e-6, atol=1e-6)
    report = judge(launched.trace)
    assert str(report.verdict) == "proved", report.violations


@pytest.mark.parametrize(
    ("fault", "id"),
    [(faults.missing_flag, "deadlock"), (faults.stale_flag, "stream-race"), (faults.wrong_parity, "stream-race")],
    ids=["missing_flag", "stale_flag", "wrong_parity"],
)
def test_a_wrong_flag_or_region_is_found(fault: Callable[[Any], Any], id: str) -> None:
    launched = exchanges("a2a_direct", 2, ranks=2, wrap=lambda g: fault(g) if g.rank == 1 else g)
    report = judge(launched.trace)
    assert report.verdict.name == "violated" and id in {v.id for v in report.violations}, report.violations


def test_one_region_for_all_epochs_is_a_race() -> None:
    """In the model a sum over the group lies between two exchanges and hides it; here nothing does."""
    report = judge(exchanges("a2a_direct", 2, ranks=2, wrap=faults.one_parity).trace)
    assert "stream-race" in {v.id for v in report.violations}, report.violations
    assert "dcp.direct.push" in report.violations[0].sentence


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_eager_calls_and_replays_of_one_graph_mix(exchange: str) -> None:
    order = "egeeggge"

    def program(world: Any) -> list[Any]:
        with torch.inference_mode(), override_forward_context(ForwardContext(attn_metadata=None)):
            group = world.context_parallel(shape(exchange, 2))
            inputs = on_device(world, 0)
            group.reduce_heads(*inputs)
            graph = world.new_graph("exchange")
            with group.staging("exchange"), graph.capture():
                captured = group.reduce_heads(*inputs)
            found = []
            for number, kind in enumerate(order):
                for into, fresh in zip(inputs, on_device(world, number), strict=True):
                    world.tensors.copy_into(into, fresh)
                if kind == "g":
                    graph.replay()
                merged = captured.clone() if kind == "g" else group.reduce_heads(*inputs)
                found.append(torch.from_numpy(world.tensors.to_host(merged, "compare")).clone())
            return found

    launched = launch(program, ranks=2)
    assert launched.errors == [None, None]
    for rank, results in enumerate(launched.values):
        for number, result in enumerate(results):
            torch.testing.assert_close(result, wanted(rank, 2, number), rtol=1e-6, atol=1e-6)
    report = judge(launched.trace)
    assert str(report.verdict) == "proved", report.violations


def test_staging_is_reserved_once_and_does_not_grow() -> None:
    def program(world: Any) -> Any:
        with torch.inference_mode(), override_forward_context(ForwardContext(attn_metadata=None)):
            group = world.context_parallel(shape("a2a", 2, num_ubatches=2))
            before = group.workspace.allocations
            for number in range(3):
                group.reduce_heads(*on_device(world, number))
            with pytest.raises(WorkspaceError, match="locked after warm-up"):
                group.reduce_heads(*on_device(world, 0, rows=ROWS + 60))
            return before, group.workspace.allocations

    launched = launch(program, ranks=2)
    assert launched.errors == [None, None] and launched.values == [(2, 2), (2, 2)]


def test_sums_and_gathers_are_the_same_bits_on_every_peer() -> None:
    def program(world: Any) -> Any:
        with torch.inference_mode(), override_forward_context(ForwardContext(attn_metadata=None)):
            group = world.context_parallel(shape("ag_rs", 2))
            rows = world.tensors.from_torch(torch.full((3, 2), 0.1 * (world.rank + 1)))
            total, gathered = group.all_reduce(rows), group.all_gather_rows(rows)
            return [world.tensors.to_host(t, "compare").tolist() for t in (total, gathered)]

    launched = launch(program, ranks=4)
    assert launched.values[0] == launched.values[1] != launched.values[2] == launched.values[3]
    assert launched.values[2][1] == [[pytest.approx(0.3)] * 2] * 3 + [[pytest.approx(0.4)] * 2] * 3
