"""Needs torch, Triton and one CUDA device. `python -m gpu.check.dcp_kernels`: the DCP kernels and the direct path on a device.

Every section runs in a process of its own with a time limit, because a protocol error hangs a device. The last lines
are a table; the exit code is 1 if any row of it failed.

    kernels    pack and unpack + merge against plain torch (bits) and float64, eager and captured
    workspace  staging under real capture: the graph's own, untouched by later growth
    speed      bandwidth of pack and merge at B 8192, H 64, D 512, bf16, against a device copy; a small sweep
    virtual2   two virtual ranks on two streams: the direct path, eager and replayed in any order, with random delays
    virtual4   four of them
    ipc        two processes that share the device through CUDA IPC
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dbo.dcp import empty_rows, lse_pack_dim
from dbo.dcp.exchange import TORCH_KERNELS
from dbo.dcp.oracle import merge_float64
from dbo.dcp.workspace import Slot, WorkspaceManager
from dbo.errors import PeerFailed, WorkspaceError
from gpu.check.virtual_rank import (
    DEVICE,
    LIMITS,
    VirtualRank,
    direct_layout,
    mask_of,
    random_parts,
    rounds_of,
    wrong_rows,
)
from gpu.kernels.exchange import DirectExchange, ExchangeTuning, default_tuning, new_region
from gpu.kernels.packed import TritonKernels
from gpu.kernels.rows import RAW

SECTION_LIMIT_S = 240.0
COPY_SHARE_WANTED = 0.8
MARK = "dcp-check-row "


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(what: str, ok: bool, detail: str) -> None:
    say(MARK + json.dumps([what, bool(ok), detail]))


# ---- kernels


def section_kernels(_: argparse.Namespace) -> None:
    kernels = TritonKernels()
    shapes = ((2, 37, 3, 80), (4, 5, 1, 96), (2, 130, 5, 192), (4, 33, 2, 576), (2, 1, 1, 7))
    tally = {"pack bits": [0, 0], "merge": [0, 0], "merge vs float64": [0, 0], "captured": [0, 0]}

    def count(what: str, ok: bool) -> None:
        tally[what][0] += ok
        tally[what][1] += 1

    cases = itertools.product(shapes, LIMITS, (False, True), (False, True), (False, True))
    for number, ((world, rows, heads, dim), dtype, masked, strided, base_e) in enumerate(cases):
        outs, lses = random_parts(world, rows, heads, dim, dtype, seed=number, strided=strided)
        out, lse = outs[0], lses[0]
        mask: tuple[Any, Any] = mask_of(rows, 0) if masked else (None, None)
        if masked:
            out[empty_rows(rows, *mask)] = math.nan
        shape = (world, rows, heads, dim + lse_pack_dim(dtype))
        got, want = (torch.full(shape, fill, dtype=dtype, device=DEVICE) for fill in (1, 2))
        kernels.pack(out, lse, got, *mask)
        TORCH_KERNELS.pack(out, lse, want, *mask)
        count("pack bits", torch.equal(got.view(RAW[dtype]), want.view(RAW[dtype])))
        # Read as a received payload it is as good as any: chunk c plays the part of source c.
        merged, whole = kernels.unpack_merge(want, dim, base_e)
        limit = LIMITS[dtype]
        right = TORCH_KERNELS.unpack_merge(want, dim, base_e)
        count("merge", int(wrong_rows(merged, whole, *right, limit)) == 0)
        parts = (want[..., :dim], lse_of(want, dim))
        exact, exact_lse = merge_float64(*parts, base_e)
        count("merge vs float64", int(wrong_rows(merged, whole, exact, exact_lse.float(), limit)) == 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.pack(out, lse, got, *mask)
            captured = kernels.unpack_merge(got, dim, base_e)
        got.fill_(3), captured[0].fill_(3), captured[1].fill_(3)
        lse.mul_(-0.5)
        graph.replay()
        TORCH_KERNELS.pack(out, lse, want, *mask)
        right = TORCH_KERNELS.unpack_merge(want, dim, base_e)
        same = torch.equal(got.view(RAW[dtype]), want.view(RAW[dtype]))
        count("captured", same and int(wrong_rows(*captured, *right, limit)) == 0)
    for what, (passed, of) in tally.items():
        report(f"kernels: {what}", passed == of > 0, f"{passed} of {of} cases")


def lse_of(payload: torch.Tensor, dim: int) -> torch.Tensor:
    return payload[..., dim:].contiguous().view(torch.float32).squeeze(-1)


# ---- workspace


def section_workspace(_: argparse.Namespace) -> None:
    workspace, slot = WorkspaceManager(DEVICE), Slot(0, "dcp")
    kernels = TritonKernels()
    (out, *_rest), (lse, *_more) = random_parts(2, 64, 4, 192, torch.bfloat16, seed=1)
    spec = ((2, 64, 4, 194), torch.bfloat16)

    def exchange() -> torch.Tensor:
        send, recv = workspace.get_simultaneous(spec, spec, slot=slot, caller="check")
        kernels.pack(out, lse, send, None, None)
        recv.copy_(send)
        return kernels.unpack_merge(recv, 192, True)[0]

    want = exchange().clone()
    graph = torch.cuda.CUDAGraph()
    with workspace.capturing("graph"), torch.cuda.graph(graph):
        captured = exchange()
    workspace.get_simultaneous(((1 << 26,), torch.uint8), slot=slot)[0].fill_(7)
    torch.empty(1 << 20, device=DEVICE).fill_(7)
    workspace.lock()
    captured.fill_(0)
    workspace.check_replay("graph")
    graph.replay()
    counts = f"{workspace.allocations} slot, {workspace.graph_allocations} graph allocations"
    report("workspace: replay after growth", torch.equal(captured, want), counts)
    refused = False
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            exchange()
    except WorkspaceError:
        refused = True
    report("workspace: capture outside of the scope", refused, "refused" if refused else "accepted")


# ---- speed


def milliseconds(run: Callable[[], object], *, repeats: int = 30, inner: int = 20) -> float:
    """Median device time of `run`: several in a row a sample, so that the host's launches lie under the device's work."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / inner)
    return statistics.median(times)


def section_speed(arguments: argparse.Namespace) -> None:
    world, rows, heads, dim, dtype = 2, 8192, 32, 512, torch.bfloat16
    (out,), (lse,) = (parts[:1] for parts in random_parts(world, rows, heads, dim, dtype, seed=3))
    send = torch.empty(world, rows, heads, dim + 2, dtype=dtype, device=DEVICE)
    copied = torch.empty_like(out)
    out_bytes, lse_bytes, payload_bytes = (t.numel() * t.element_size() for t in (out, lse, send))
    copy_gbs = 2 * out_bytes / milliseconds(lambda: copied.copy_(out)) / 1e6
    report("speed: device copy", True, f"{copy_gbs:.0f} GB/s")
    mask = (torch.full((rows,), 5, dtype=torch.int32, device=DEVICE), torch.arange(rows + 1, device=DEVICE))
    pack_bytes = out_bytes + lse_bytes + payload_bytes
    merge_bytes = payload_bytes + out_bytes // world + lse_bytes // world

    def measured(name: str, nbytes: int, run: Callable[[], object]) -> float:
        taken = milliseconds(run)
        share = nbytes / taken / 1e6 / copy_gbs
        say(f"  {name}: {taken:.3f} ms, {nbytes / taken / 1e6:.0f} GB/s, {share:.0%} of the copy")
        return share

    default = TritonKernels()
    packs: dict[str, float] = {}
    merges: dict[str, float] = {}
    for kib, warps in itertools.product((4, 8, 16, 32), (4, 8)):
        tried = TritonKernels(pack_bytes=kib << 10, merge_elements=kib << 9, num_warps=warps)
        name = f"{kib} KiB, {warps} warps"
        packs[name] = measured(f"pack, {name}", pack_bytes, lambda: tried.pack(out, lse, send, None, None))  # noqa: B023
        merges[name] = measured(
            f"merge, {name}",
            merge_bytes,
            lambda: tried.unpack_merge(send, dim, True),  # noqa: B023
        )
    for what, table, nbytes, run in (
        ("pack", packs, pack_bytes, lambda: default.pack(out, lse, send, None, None)),
        ("pack, masked", packs, pack_bytes, lambda: default.pack(out, lse, send, *mask)),
        ("merge", merges, merge_bytes, lambda: default.unpack_merge(send, dim, True)),
    ):
        share = measured(f"{what}, default", nbytes, run)
        best = max(table, key=lambda name: table[name])
        detail = (
            f"{share:.0%} of the copy, wanted {COPY_SHARE_WANTED:.0%}; best of the sweep {table[best]:.0%} ({best})"
        )
        report(f"speed: {what}", share >= COPY_SHARE_WANTED, detail)
    direct_speed(arguments)


def direct_speed(arguments: argparse.Namespace) -> None:
    """The bench of the direct path between virtual ranks: no link is crossed, so no share of one is promised."""
    from dbo.bench.dcp import DEVICE_DIM, DEVICE_HEADS, DCPBench, text
    from gpu.bench.dcp import virtual_ranks

    bench = DCPBench(device="cuda", ranks=2, heads=DEVICE_HEADS, head_dim=DEVICE_DIM, seed=arguments.seed)
    rows = virtual_ranks(bench)
    say(text(bench, rows, "2 VIRTUAL ranks on one device"))
    report(
        "speed: direct path between virtual ranks", all(r.correct and r.samples_ms for r in rows), f"{len(rows)} rows"
    )


# ---- the direct path


def section_virtual(world: int, arguments: argparse.Namespace) -> None:
    layout = direct_layout(world)
    regions = [new_region(layout, DEVICE) for _ in range(world)]
    addresses = [region.data_ptr() for region in regions]
    programs = default_tuning(DEVICE, ranks_on_device=world, programs_per_sm=1).programs
    ranks = []
    for rank in range(world):
        tuning = ExchangeTuning(programs=programs, lag_tiles=1 + rank % 2, spin_limit=1 << 22)
        end = DirectExchange(layout=layout, rank=rank, region=regions[rank], peer_addresses=addresses, tuning=tuning)
        ranks.append(VirtualRank(end, world, arguments.seed + rank))
    torch.cuda.synchronize()
    for each in ranks:
        each.capture()
        each.warm_up()
    order = random.Random(arguments.seed + 99)
    started = time.monotonic()
    for number, (shape, inputs) in enumerate(rounds_of(arguments.seed, arguments.rounds)):
        for each in order.sample(ranks, world):
            each.round(shape, inputs)
        if number % 16 == 15:
            torch.cuda.synchronize()
            for each in ranks:
                each.end.check()
    torch.cuda.synchronize()
    taken = time.monotonic() - started
    judge(f"direct: {world} virtual ranks", ranks, arguments.rounds, taken)
    for each in ranks:
        each.round(0, 0, compare_with=1 if each is ranks[0] else None)
    torch.cuda.synchronize()
    report(f"direct: {world} ranks, control, wrong rows are seen", int(ranks[0].bad) > 0, f"{int(ranks[0].bad)} rows")
    for each in ranks[:-1]:
        each.round(0, 0)
    torch.cuda.synchronize()
    blamed = -1
    try:
        ranks[0].end.check()
    except PeerFailed as failed:
        blamed = failed.rank
    report(f"direct: {world} ranks, control, missing signal is found", blamed == world - 1, f"blames rank {blamed}")


def judge(what: str, ranks: list[VirtualRank], rounds: int, taken_s: float) -> None:
    bad = sum(int(rank.bad) for rank in ranks)
    trouble = ""
    for rank in ranks:
        try:
            rank.end.check()
        except PeerFailed as failed:
            trouble = f"; {failed}"
    epochs = [rank.end.epoch() for rank in ranks]
    replays = sum(rank.replays for rank in ranks)
    ok = bad == 0 and not trouble and epochs == [rounds] * len(ranks) and 0 < replays < rounds * len(ranks)
    detail = f"{rounds} rounds in {taken_s:.1f} s, {replays} replays, {bad} wrong rows, epochs {epochs}{trouble}"
    report(what, ok, detail)


def ipc_main(rank: int, mine: Any, theirs: Any, barrier: Any, seed: int, rounds: int) -> None:
    """One of two processes on one device. `mine` and `theirs` are queues that carry the regions."""
    layout = direct_layout(2)
    region = new_region(layout, DEVICE)
    torch.cuda.synchronize()
    mine.put(region)
    other = theirs.get(timeout=60)
    addresses = [region.data_ptr(), other.data_ptr()] if rank == 0 else [other.data_ptr(), region.data_ptr()]
    tuning = ExchangeTuning(programs=default_tuning(DEVICE, programs_per_sm=1).programs, spin_limit=1 << 26)
    end = DirectExchange(layout=layout, rank=rank, region=region, peer_addresses=addresses, tuning=tuning)
    me = VirtualRank(end, 2, seed + rank)
    me.capture()
    me.warm_up()
    torch.cuda.synchronize()
    barrier.wait(timeout=120)
    started = time.monotonic()
    for number, (shape, inputs) in enumerate(rounds_of(seed, rounds)):
        me.round(shape, inputs)
        if number % 16 == 15:
            me.stream.synchronize()
            end.check()
    torch.cuda.synchronize()
    judge(f"direct: IPC, process {rank}", [me], rounds, time.monotonic() - started)
    barrier.wait(timeout=120)  # a region is unmapped only after both are through
    del other


def section_ipc(arguments: argparse.Namespace) -> None:
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queues = [context.Queue(), context.Queue()]
    barrier = context.Barrier(2)
    processes = []
    for rank in range(2):
        given = (rank, queues[rank], queues[1 - rank], barrier, arguments.seed, arguments.rounds)
        processes.append(context.Process(target=ipc_main, args=given, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + SECTION_LIMIT_S - 20
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
            report(f"direct: IPC, process {rank}", False, "did not end in time")
        elif process.exitcode:
            report(f"direct: IPC, process {rank}", False, f"exit code {process.exitcode}")


# ---- sections in processes

SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "kernels": section_kernels,
    "workspace": section_workspace,
    "speed": section_speed,
    "virtual2": lambda arguments: section_virtual(2, arguments),
    "virtual4": lambda arguments: section_virtual(4, arguments),
    "ipc": section_ipc,
}


def run_section(name: str, arguments: argparse.Namespace) -> list[tuple[str, bool, str]]:
    """Run a section in a process group of its own; its rows, and one that failed if it crashed or hung."""
    command = [sys.executable, "-m", "gpu.check.dcp_kernels", "--section", name]
    command += ["--rounds", str(arguments.rounds), "--seed", str(arguments.seed)]
    # One hardware queue for each stream: two streams in one queue would make a spinning kernel wait for itself.
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    started, trouble = time.monotonic(), ""
    try:
        output, _ = child.communicate(timeout=SECTION_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        trouble = f"took longer than {SECTION_LIMIT_S:.0f} s"
    if not trouble and child.returncode:
        trouble = f"exit code {child.returncode}"
    rows = []
    for line in output.splitlines():
        if line.startswith(MARK):
            what, ok, detail = json.loads(line[len(MARK) :])
            rows.append((what, ok, detail))
        else:
            say(f"[{name}] {line}")
    if trouble or not rows:
        rows.append((name, False, trouble or "reported nothing"))
    say(f"[{name}] {time.monotonic() - started:.0f} s")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpu.check.dcp_kernels", description="DCP kernels and the direct path"
    )
    parser.add_argument("--rounds", type=int, default=1000, help="exchanges of the direct path in each section")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        say("gpu.check.dcp_kernels needs a CUDA device: device_count=0; run it where there is one")
        return 3
    if arguments.section:
        SECTIONS[arguments.section](arguments)
        return 0
    rows = [row for name in arguments.only for row in run_section(name, arguments)]
    say(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, seed {arguments.seed}")
    width = max(len(what) for what, *_ in rows)
    for what, ok, detail in rows:
        say(f"{'ok  ' if ok else 'FAIL'}  {what:<{width}}  {detail}")
    return 0 if all(ok for _, ok, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
