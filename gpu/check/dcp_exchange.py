"""Needs torch, Triton and two or more devices with a direct link. Checks and times the DCP exchange over NCCL.

    python -m gpu.check.dcp_exchange [--rows 1 16 128 1024 8192] [--repeat 30]

One process a device. First the correctness of every path over a matrix of shapes, dtypes and options, against a float64
merge; then, for each B (H 64, D 512, bf16, LSE returned), medians of two collectives, `ag_rs`, `a2a` and `a2a_direct`, eager
and in a CUDA graph, all in one run; eager calls and replays of one captured graph are mixed at the end. The table comes
last. Exit code 1 on any wrong result, 3 where there are not two devices.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dbo.bench.dcp_processes import GlooDCPGroup, sample_ms
from dbo.dcp.collectives import ag_rs, two_collectives
from dbo.dcp.direct import DirectLayout
from dbo.dcp.exchange import TORCH_KERNELS, dcp_a2a_lse_reduce
from dbo.dcp.merging import merge
from dbo.dcp.oracle import merge_float64
from dbo.dcp.packing import lse_pack_dim
from dbo.errors import NotAvailable
from gpu.alltoall.symm import symmetric_region
from gpu.kernels.exchange import DirectExchange, ExchangeTuning, dcp_direct_lse_reduce, default_tuning
from gpu.kernels.packed import TRITON_KERNELS

HEADS, DIM = 64, 512
LINK_GB_PER_S = 450.0
LIMIT_S = 540


@dataclass
class ExchangeRow:
    """One line of the table."""

    rows: int
    path: str
    mode: str
    median_ms: float
    low_ms: float
    high_ms: float


def say(group: GlooDCPGroup, *words: object) -> None:
    if group.rank == 0:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()


# ---- correctness


def inputs_of(
    source: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial output and LSE of one source rank; every rank can make everybody's."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + source)
    out = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
    lse = 3 * torch.randn(shape[:2], generator=generator, device="cuda", dtype=torch.float32)
    return out, lse


def expected(
    group: GlooDCPGroup,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    base_e: bool,
    lens: list[list[int]] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 merge of all ranks' partials for this rank's heads. `lens[r]`: local KV length of each row on rank r."""
    mine = shape[1] // group.world_size
    heads = slice(group.rank * mine, (group.rank + 1) * mine)
    outs, lses = [], []
    for source in range(group.world_size):
        out, lse = inputs_of(source, shape, dtype, seed)
        if lens is not None:
            empty = torch.tensor(lens[source], device="cuda") == 0
            lse = lse.masked_fill(empty[:, None], -torch.inf)
        outs.append(out[:, heads])
        lses.append(lse[:, heads])
    return merge_float64(torch.stack(outs), torch.stack(lses), base_e)


def check_matrix(group: GlooDCPGroup, exchange: DirectExchange) -> int:
    """Every path over the matrix; the number of wrong results on this rank."""
    wrong = cases = 0
    shapes = [(1, 8, 80), (3, 8, 96), (7, 4, 192), (33, 16, 576), (0, 8, 80)]
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    # Two of the eight combinations of base, mask and strides for each shape and dtype: every option both ways.
    options = ((True, False, False), (False, True, True))
    for case, (shape, dtype, (base_e, masked, strided)) in enumerate(itertools.product(shapes, dtypes, options)):
        out, lse = inputs_of(group.rank, shape, dtype, case)
        if strided:
            out = torch.cat((out, out), dim=-1)[..., : shape[2]]
        lens = None
        mask: tuple[Any, Any] = (None, None)
        if masked:
            lens = [[(row + source) % 3 for row in range(shape[0])] for source in range(group.world_size)]
            starts = list(range(shape[0] + 1))
            mask = (
                torch.tensor(lens[group.rank], dtype=torch.int32, device="cuda"),
                torch.tensor(starts, dtype=torch.int32, device="cuda"),
            )
        want, want_lse = expected(group, shape, dtype, case, base_e, lens)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}[dtype]
        paths: dict[str, Callable[..., Any]] = {
            "two": lambda *a: two_collectives(*a),
            "ag_rs": lambda *a: ag_rs(*a),
            "a2a": lambda *a: dcp_a2a_lse_reduce(*a, kernels=TRITON_KERNELS),
            "a2a torch": lambda *a: dcp_a2a_lse_reduce(*a, kernels=TORCH_KERNELS),
            "direct": lambda *a: dcp_direct_lse_reduce(*a, exchange=exchange),
        }
        for name, path in paths.items():
            got, got_lse = path(out, lse, group, True, base_e, *mask)
            alone = path(out, lse, group, False, base_e, *mask)
            cases += 1
            close = torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance)
            same = torch.allclose(got_lse.double(), want_lse, rtol=1e-5, atol=1e-5)
            if not (close and same and torch.equal(got.view(torch.uint8), alone.view(torch.uint8))):
                wrong += 1
                sys.stdout.write(f"WRONG rank {group.rank} {name} {shape} {dtype} e={base_e} {masked} {strided}\n")
    say(group, f"matrix: {cases} results a rank, {wrong} wrong on rank 0")
    return wrong


def check_bits(group: GlooDCPGroup) -> int:
    """LSE bits through pack, NCCL and unpack: exact for minus infinity, denormals, NaN payloads, large values."""
    wrong = 0
    special = torch.tensor([float("-inf"), 1e-42, 1e4, 70000.0, 5.2578125, 0.0], device="cuda")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        out = torch.randn((len(special), group.world_size * 2, 80), device="cuda").to(dtype)
        lse = special[:, None].expand(-1, group.world_size * 2).contiguous()
        shape = (group.world_size, len(special), 2, 80 + lse_pack_dim(dtype))
        send, recv = (torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(2))
        TRITON_KERNELS.pack(out, lse, send, None, None)
        dist.all_to_all_single(recv, send, group=group.device_group)
        bits = recv[..., 80:].contiguous().view(torch.int32).squeeze(-1)
        want = lse[:, :2].contiguous().view(torch.int32)
        wrong += sum(not torch.equal(bits[source], want) for source in range(group.world_size))
    say(group, f"bits: {wrong} wrong")
    return wrong


# ---- speed


def timed(run: Callable[[], Any], repeat: int, inner: int) -> tuple[float, float, float]:
    """(median, 10 %, 90 %) in ms of the slowest rank; ranks start together and run `inner` exchanges a sample."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    values = sorted(sample_ms(run, inner, "cuda") for _ in range(repeat))
    return statistics.median(values), values[repeat // 10], values[-1 - repeat // 10]


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def baseline(group: GlooDCPGroup, out: torch.Tensor, lse: torch.Tensor, compiled_merge: Callable[..., Any]) -> Any:
    """Two collectives and a compiled merge: what production did before the packed exchange."""
    size = group.world_size
    send_out = out.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    send_lse = lse.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    recv_out, recv_lse = torch.empty_like(send_out), torch.empty_like(send_lse)
    dist.all_to_all_single(recv_out, send_out, group=group.device_group)
    dist.all_to_all_single(recv_lse, send_lse, group=group.device_group)
    return compiled_merge(recv_out, recv_lse, True)


def measure(
    group: GlooDCPGroup,
    exchange_of: Callable[[ExchangeTuning], DirectExchange],
    rows: int,
    *,
    repeat: int,
    sweeps: bool,
) -> list[ExchangeRow]:
    out, lse = inputs_of(group.rank, (rows, HEADS, DIM), torch.bfloat16, rows)
    compiled_merge = torch.compile(merge, dynamic=False)
    paths: dict[str, Callable[[], Any]] = {
        "two collectives": lambda: baseline(group, out, lse, compiled_merge),
        "ag_rs": lambda: ag_rs(out, lse, group, True, reduce_dtype=torch.bfloat16),
        "a2a": lambda: dcp_a2a_lse_reduce(out, lse, group, True, kernels=TRITON_KERNELS),
    }
    for name, tuning in (sweep() if sweeps else tunings()).items():
        end = exchange_of(tuning)
        try:
            end.prepare(out, lse)
        except NotAvailable:  # more programs than the device holds at once
            continue
        paths[name] = partial(end.launch, out, lse)
    table = []
    # One exchange of a small batch is shorter than the ranks' skew at the start: several a sample there.
    # As in a model, where other work keeps the device busy while the host launches the next exchange.
    inner = 8 if rows >= 4096 else 20
    for name, run in paths.items():
        if not sweeps or name == "two collectives":
            table.append(ExchangeRow(rows, name, "eager", *timed(run, repeat, inner)))
        graph = captured(run)
        table.append(ExchangeRow(rows, name, "graph", *timed(graph.replay, repeat, inner)))
    return table


def tunings() -> dict[str, ExchangeTuning]:
    """The default and a few around it, so that one lease tells which is best."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "a2a_direct": default_tuning("cuda"),
        "a2a_direct 6/SM tile 8": ExchangeTuning(programs=6 * sms, tile_rows=8),
        "a2a_direct 6/SM tile 4": ExchangeTuning(programs=6 * sms, tile_rows=4),
        "a2a_direct 3/SM tile 8, 8 warps": ExchangeTuning(programs=3 * sms, tile_rows=8, num_warps=8),
        "a2a_direct 3/SM tile 16 lag 3": ExchangeTuning(programs=3 * sms, tile_rows=16, lag_tiles=3),
    }


def sweep() -> dict[str, ExchangeTuning]:
    """Grids, tiles and lags: what the defaults were chosen from."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = {}
    for per_sm, rows, lag, warps in itertools.product((2, 3, 4, 6), (4, 8, 16), (1, 3), (4, 8)):
        name = f"direct {per_sm}/SM tile {rows} lag {lag} warps {warps}"
        found[name] = ExchangeTuning(programs=per_sm * sms, lag_tiles=lag, num_warps=warps, tile_rows=rows)
    return found


def check_mixture(group: GlooDCPGroup, end: DirectExchange, rounds: int) -> int:
    """Eager calls and replays of one graph in any order, with random delays: wrong results on this rank."""
    shape = (64, HEADS, DIM)
    out, lse = (torch.empty(shape, dtype=torch.bfloat16, device="cuda"), torch.empty(shape[:2], device="cuda"))
    merged = torch.empty((64, HEADS // group.world_size, DIM), dtype=torch.bfloat16, device="cuda")
    merged_lse = torch.empty((64, HEADS // group.world_size), device="cuda")

    def run() -> None:
        end.launch(out, lse, merged_BND=merged, merged_lse_BN=merged_lse)

    for each, new in zip((out, lse), inputs_of(group.rank, shape, torch.bfloat16, 1), strict=True):
        each.copy_(new)
    graph = captured(run)
    choose = random.Random(7 + group.rank)
    wrong = 0
    for number in range(rounds):
        for each, new in zip((out, lse), inputs_of(group.rank, shape, torch.bfloat16, number), strict=True):
            each.copy_(new)
        if choose.random() < 0.3:
            time.sleep(choose.random() * 2e-3)
        graph.replay() if choose.random() < 0.5 else run()
        want, _ = expected(group, shape, torch.bfloat16, number, True, None)
        wrong += not torch.allclose(merged.double(), want, rtol=1.6e-2, atol=1.6e-2)
    end.check()
    return wrong


# ---- processes


def worker(rank: int, world: int, arguments: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(arguments.port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = GlooDCPGroup()
    layout = DirectLayout(world_size=world, max_rows=max([*arguments.rows, 64]) * HEADS // world, row_bytes=DIM * 4)
    region, addresses = symmetric_region(layout, dist.group.WORLD)

    def exchange_of(tuning: ExchangeTuning) -> DirectExchange:
        """Ends share the region one after another, so each begins with zeroed flags and a new epoch count."""
        torch.cuda.synchronize()
        dist.barrier()
        region.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        return DirectExchange(layout=layout, rank=rank, region=region, peer_addresses=addresses, tuning=tuning)

    wrong = 0
    if not arguments.only_speed:
        wrong += check_matrix(group, exchange_of(default_tuning("cuda"))) + check_bits(group)
        wrong += (mixed := check_mixture(group, exchange_of(default_tuning("cuda")), 200))
        say(group, f"mixture of eager calls and replays: {mixed} of 200 wrong")
    total = torch.tensor([wrong], device="cuda")
    dist.all_reduce(total)
    table = [
        row
        for rows in arguments.rows
        for row in measure(group, exchange_of, rows, repeat=arguments.repeat, sweeps=arguments.sweep)
    ]
    if rank == 0:
        show(table, world)
    say(group, f"wrong results over all ranks: {int(total)}")
    dist.barrier()
    os._exit(1 if int(total) else 0)


def show(table: list[ExchangeRow], world: int) -> None:
    say_line = sys.stdout.write
    say_line(
        f"\n{torch.cuda.get_device_name(0)} x{world}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, "
        f"H {HEADS}, D {DIM}, bf16, LSE returned\n"
    )
    base = {(row.rows, row.mode): row.median_ms for row in table if row.path == "two collectives"}
    for row in sorted(table, key=lambda r: (r.rows, r.median_ms)) if len(table) > 200 else table:
        sent = row.rows * HEADS * DIM * 2 * (world - 1) / world
        rate = sent / row.median_ms / 1e6
        say_line(
            f"B {row.rows:<5} {row.path:<32} {row.mode:<6} {row.median_ms:7.4f} ms ({row.low_ms:.4f} … {row.high_ms:.4f}) "
            f"{rate:6.1f} GB/s {rate / LINK_GB_PER_S:5.0%} of the link, {base[row.rows, row.mode] / row.median_ms:5.2f}x\n"
        )
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="check and time the DCP exchange over several devices")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 1024, 8192], help="batch sizes B")
    parser.add_argument("--repeat", type=int, default=30, help="samples of each")
    parser.add_argument("--only-speed", action="store_true", help="leave the checks out")
    parser.add_argument("--sweep", action="store_true", help="time the direct path over grids, tiles and lags")
    parser.add_argument("--port", type=int, default=29541)
    arguments = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        sys.stderr.write(f"the exchange needs two devices: num_devices={world}; run it where there are two\n")
        return 3
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=worker, args=(rank, world, arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
    return max(abs(process.exitcode or 0) if process.exitcode is not None else 124 for process in processes)


if __name__ == "__main__":
    sys.exit(main())
