"""`dbo bench dcp`: a DCP group's exchange by every path, checked first, then timed, on real processes. No torch here.

One process a rank: gloo on the CPU, NCCL on two devices or more. On a single device only the direct path can run,
between virtual ranks; it says so, since no link is crossed. Every row is compared with a float64 merge before it is
timed, and a wrong one is never timed.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dbo.errors import NotAvailable, UsageError
from dbo.registry import dcp_bench_device

NAME = "dcp"
ROWS = (1, 16, 128, 1024, 8192)
PATHS = ("two_collectives", "ag_rs", "a2a", "a2a_direct")
GLOO_HEADS, GLOO_DIM = 8, 64  # a CPU copies a thousandth of what a device does
DEVICE_HEADS, DEVICE_DIM = 64, 512
LINK_GBS = 450.0


@dataclass(frozen=True, kw_only=True)
class DCPBench:
    """What is measured; the same on all ranks.

    Attributes:
        device: "cpu" or "cuda". ranks: C. rows: B, one row of the table each.
        heads, head_dim: H and D. dtype: of the partial output.
        repeat: samples of each, each the mean over `inner` exchanges.
        link_gbs: what a rank can send at most, GB/s; 0: measure the bare all-to-all of the same bytes instead.
        seed: of the inputs.
    """

    device: str
    ranks: int
    rows: tuple[int, ...] = ROWS
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    repeat: int = 9
    inner: int = 4
    link_gbs: float = 0.0
    seed: int = 0

    @property
    def command(self) -> str:
        """The line that measures the same again."""
        words = ["dbo", "bench", NAME, "--device", self.device, "--ranks", self.ranks, "--rows", *self.rows]
        words += ["--heads", self.heads, "--head-dim", self.head_dim, "--dtype", self.dtype, "--repeat", self.repeat]
        words += ["--link-gbs", f"{self.link_gbs:g}", "--seed", self.seed]
        return shlex.join(map(str, words))

    def payload_bytes(self, rows: int, item_bytes: int) -> int:
        """What a rank has to send, whatever the path: outputs and fp32 LSE of the heads that its peers keep."""
        return (self.ranks - 1) * rows * (self.heads // self.ranks) * (self.head_dim * item_bytes + 4)


@dataclass(frozen=True, kw_only=True)
class DCPRow:
    """One path, one B, eager or in a graph.

    Attributes:
        error: largest error against float64, relative to 1 + |value|; limit: above it the row counts as wrong. Both 0
            where the path cannot run.
        samples_ms: by repetition, of the slowest rank; empty when wrong or not run.
        limit_ms: the payload at the link's limit, or the bare all-to-all of the same bytes.
        note: why there are no samples, or what to know about them.
    """

    path: str
    mode: str
    rows: int
    payload_bytes: int
    error: float = 0.0
    limit: float = 0.0
    samples_ms: tuple[float, ...] = ()
    limit_ms: float = 0.0
    note: str = ""

    @property
    def correct(self) -> bool:
        return self.error <= self.limit

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


def add_arguments(parser: argparse.ArgumentParser, integer: Callable[[int], Callable[[str], int]]) -> None:
    """Declare the flags that only this benchmark reads."""
    group = parser.add_argument_group("dcp")
    group.add_argument("--rows", type=integer(0), nargs="+", default=list(ROWS), metavar="B", help="batch rows")
    group.add_argument("--heads", type=integer(1), help="query heads over all ranks")
    group.add_argument("--head-dim", type=integer(1), help="head dimension of the partial output")
    group.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    group.add_argument("--link-gbs", type=float, help="what a rank can send; 0: compare with a bare all-to-all")


def options(args: argparse.Namespace, *, devices: int) -> DCPBench:
    """The benchmark that the flags ask for, on a machine with so many CUDA devices.

    Raises:
        UsageError: heads that the ranks do not divide.
        NotAvailable: a device that is not there.
    """
    device = ("cuda" if devices else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not devices:
        raise NotAvailable.of("a CUDA device is there", fix="pass --device cpu", device="cuda", devices=0)
    small = device == "cpu"
    heads = args.heads or (GLOO_HEADS if small else DEVICE_HEADS)
    if heads % args.ranks:
        rule = "the ranks of a DCP group divide the query heads"
        raise UsageError.of(rule, fix="choose --heads that they divide", heads=heads, ranks=args.ranks)
    link = args.link_gbs if args.link_gbs is not None else (0.0 if small else LINK_GBS)
    return DCPBench(
        device=device,
        ranks=args.ranks,
        rows=tuple(args.rows),
        heads=heads,
        head_dim=args.head_dim or (GLOO_DIM if small else DEVICE_DIM),
        dtype=args.dtype,
        repeat=args.repeat,
        inner=1 if small else 10,
        link_gbs=link,
        seed=args.seed,
    )


def run(args: argparse.Namespace, stage: Callable[[str], None]) -> tuple[str, dict[str, Any], bool]:
    """Measure. Returns the text, the JSON object, and whether every row that ran was right."""
    from dbo.bench.dcp_processes import cuda_devices, measure_processes

    devices = cuda_devices()
    bench = options(args, devices=devices)
    stage(f"{bench.ranks} ranks on {bench.device}")
    if bench.device == "cpu" or devices >= bench.ranks:
        rows, what = measure_processes(bench), f"{bench.ranks} processes, {'gloo' if bench.device == 'cpu' else 'NCCL'}"
    else:
        rows = dcp_bench_device().virtual_ranks(bench)
        what = f"{bench.ranks} VIRTUAL ranks on one device: a2a_direct only, and no link is crossed"
    return text(bench, rows, what), to_json(bench, rows, what), all(row.correct for row in rows)


def text(bench: DCPBench, rows: Sequence[DCPRow], what: str) -> str:
    """The table: median and spread, GB/s of payload, share of the limit."""
    head = ("B", "path", "mode", "error", "median ms", "spread", "GB/s", "of limit", "note")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    limit = f"the payload at {bench.link_gbs:g} GB/s" if bench.link_gbs else "a bare all-to-all of as many bytes"
    title = f"DCP exchange: {what}; H {bench.heads}, D {bench.head_dim}, {bench.dtype}; limit: {limit}"
    return "\n".join([title, "", *lines, "", f"again: {bench.command}"])


def _cells(row: DCPRow) -> tuple[str, ...]:
    error = "-" if not row.limit else f"{row.error:.1e}{'' if row.correct else ' WRONG'}"
    shown = (str(row.rows), row.path, row.mode, error)
    if not row.samples_ms:
        return (*shown, "-", "-", "-", "-", row.note)
    spread = f"{min(row.samples_ms):.3f} … {max(row.samples_ms):.3f}"
    rate = row.payload_bytes / row.median_ms / 1e6
    return (*shown, f"{row.median_ms:.3f}", spread, f"{rate:.2f}", f"{row.limit_ms / row.median_ms:.0%}", row.note)


def to_json(bench: DCPBench, rows: Sequence[DCPRow], what: str) -> dict[str, Any]:
    """Everything measured, and how to repeat it."""
    return {"bench": asdict(bench), "what": what, "command": bench.command, "rows": [_row_json(row) for row in rows]}


def _row_json(row: DCPRow) -> Mapping[str, Any]:
    timed = {"median_ms": row.median_ms} if row.samples_ms else {}
    return asdict(row) | timed | {"correct": row.correct}
