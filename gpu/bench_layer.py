"""Needs torch, Triton and a device. How far each part of a layer is from the best that torch can do for its shape.

    python -m gpu.bench_layer [--json PATH] [--tokens N]... [--shape NAME] [--tune]

`share` is the best candidate's time over ours: 0.87 and more is within 15 %. `floor` is the time in which the measured
product and copy rates would do the part's operations or move its bytes, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.bench_layer_parts import LITE, LOADS, WIDE, Bench, Load, Part, Shape
from gpu.bench_timing import Limits, Stopwatch
from gpu.kernels import mla_decode

WITHIN = 1 / 1.15
"""The least share that counts as within 15 %."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One part's figures; `others` are all candidates' milliseconds, `refused` why some have none."""

    shape: str
    tokens: int
    part: str
    ms: float
    best_ms: float
    best: str
    floor_ms: float
    tflops: float
    gbytes_per_s: float
    others: dict[str, float]
    refused: dict[str, str]

    @property
    def share(self) -> float:
        return self.best_ms / self.ms

    @property
    def reached(self) -> bool:
        return self.share >= WITHIN


def measure(part: Part, shape: Shape, load: Load, watch: Stopwatch, limits: Limits) -> Row:
    """Time a part and its candidates in turns."""
    found, refused = watch.medians({"ours": part.ours, **part.best, **part.also})
    ms = found.pop("ours")
    best = min((name for name in part.best if name in found), key=found.__getitem__)
    return Row(
        shape=shape.name, tokens=load.tokens, part=part.name, ms=ms, best_ms=found[best], best=best,
        floor_ms=limits.floor_ms(part.flops, part.nbytes), tflops=part.flops / ms / 1e9, gbytes_per_s=part.nbytes / ms / 1e6,
        others=found, refused=refused,
    )  # fmt: skip


def measure_layer(bench: Bench, rows: list[Row], watch: Stopwatch) -> Row:
    """The whole layer as one graph, against the sum of its parts' best."""
    found, refused = watch.medians({"ours": bench.layer})
    best, floor = sum(row.best_ms for row in rows), sum(row.floor_ms for row in rows)
    ms = found.get("ours", float("nan"))
    return Row(
        shape=bench.shape.name, tokens=bench.load.tokens, part="whole layer", ms=ms, best_ms=best, best="sum of the best",
        floor_ms=floor, tflops=sum(r.tflops * r.ms for r in rows) / ms, gbytes_per_s=0.0,
        others={"sum of ours": sum(row.ms for row in rows)}, refused=refused,
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """One line a part."""
    lines = [
        "| part | ms | best ms | best | share | floor ms | TFLOP/s | GB/s | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        work = f"{row.tflops:.0f}" if row.tflops >= 1 else "", f"{row.gbytes_per_s:.0f}" if row.gbytes_per_s else ""
        lines.append(
            f"| {row.part} | {row.ms:.4f} | {row.best_ms:.4f} | {row.best} | {row.share:.2f} | {row.floor_ms:.4f} | "
            f"{work[0]} | {work[1]} | {'' if row.reached else 'beyond 15 %'} |"
        )
    notes = [
        f"{row.part}: " + ", ".join(
            [f"{name} {ms:.4f}" for name, ms in row.others.items() if name != row.best]
            + [f"{name} refused ({why})" for name, why in row.refused.items()]
        )
        for row in rows if len(row.others) > 1 or row.refused or row.part == "whole layer"
    ]  # fmt: skip
    return "\n".join([*lines, "", *notes])


def tune(bench: Bench, watch: Stopwatch) -> dict[str, float]:
    """Milliseconds of the decode kernel by its knobs."""
    core = next(part for part in bench.parts() if part.name.startswith("attention core")).ours
    works = {}
    for keys in (16, 32, 64):
        for warps in (4, 8):
            for stages in (1, 2, 3):
                for programs in (264, 528, 1056):
                    tuning = mla_decode.Tuning(block_keys=keys, num_warps=warps, num_stages=stages, programs=programs)
                    works[f"{keys} keys, {warps} warps, {stages} stages, {programs}"] = lambda t=tuning: core(tuning=t)
    found, _ = watch.medians(works)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; returns 0 whatever they say: the machine decides."""
    parser = argparse.ArgumentParser(prog="python -m gpu.bench_layer", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--tokens", type=int, action="append", help="only batches of so many tokens")
    parser.add_argument("--shape", choices=("lite", "wide"), help="only this shape")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="also the decode kernel by its knobs")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("this bench needs a CUDA device: cuda.is_available()=False; run it on one\n")
        return 3
    with torch.inference_mode():
        data = run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(data, indent=1))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what `options` choose, telling each table as soon as it is complete."""
    watch = Stopwatch(repeats=options.repeats)
    limits = watch.limits()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    say(f"{device}: product {limits.flops_per_s / 1e12:.0f} TFLOP/s, copy {limits.bytes_per_s / 1e12:.2f} TB/s")
    everything: list[Row] = []
    tuned: dict[str, dict[str, float]] = {}
    for shape in (s for name, s in (("lite", LITE), ("wide", WIDE)) if options.shape in (None, name)):
        for load in (load for load in LOADS if not options.tokens or load.tokens in options.tokens):
            bench = Bench(shape, load)
            rows = [measure(part, shape, load, watch, limits) for part in bench.parts()]
            rows.append(measure_layer(bench, rows, watch))
            kind = "decode" if load.queries == 1 else "prefill"
            say(
                f"\n{shape.name}, {load.tokens} tokens ({kind}, {load.requests} requests, {load.keys} keys)\n{table(rows)}"
            )
            everything += rows
            if options.tune and kind == "decode" and shape is LITE:
                tuned[str(load.tokens)] = found = tune(bench, watch)
                say("; ".join(f"{name}: {ms:.4f}" for name, ms in list(found.items())[:12]))
            del bench
            torch.cuda.empty_cache()
    missed = [row for row in everything if not row.reached]
    say(
        f"\n{len(missed)} of {len(everything)} beyond 15 %: "
        + ", ".join(f"{r.part} {r.shape} {r.tokens}" for r in missed)
    )
    return {
        "device": device, "limits": asdict(limits), "rows": [asdict(row) | {"share": row.share} for row in everything],
        "tuned": tuned,
    }  # fmt: skip


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
