"""Needs torch, Triton and a device. How far each part of a layer is from the best that torch can do for its shape.

    python -m gpu.bench.layer [--json PATH] [--tokens N]... [--shape NAME] [--tune]

`share` is the best candidate's time over ours: 0.87 and more is within 15 %. `floor` is the time in which the measured
product and copy rates would do the part's operations or move its bytes, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.bench.layer_parts import LITE, LOADS, THIN, WIDE, Bench, Load, Part, Shape
from gpu.bench.stopwatch import Limits, Stopwatch
from gpu.kernels import grouped_gemm, mla_decode
from gpu.kernels.expert_rows import TRITON_ROWS

WITHIN = 1 / 1.15
"""The least share that counts as within 15 %."""


@dataclass(frozen=True, kw_only=True)
class LayerRow:
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


def measure(part: Part, shape: Shape, load: Load, watch: Stopwatch, limits: Limits) -> LayerRow:
    """Time a part and its candidates in turns."""
    found, refused = watch.medians({"ours": part.ours, **part.best, **part.also})
    ms = found.pop("ours")
    best = min((name for name in part.best if name in found), key=found.__getitem__)
    return LayerRow(
        shape=shape.name,
        tokens=load.tokens,
        part=part.name,
        ms=ms,
        best_ms=found[best],
        best=best,
        floor_ms=limits.floor_ms(part.flops, part.nbytes),
        tflops=part.flops / ms / 1e9,
        gbytes_per_s=part.nbytes / ms / 1e6,
        others=found,
        refused=refused,
    )


def measure_layer(bench: Bench, rows: list[LayerRow], watch: Stopwatch) -> LayerRow:
    """The whole layer as one graph, its caches warm from part to part, against the sum of its parts' best."""
    found, refused = watch.medians({"ours": bench.layer})
    # Where a part is faster than all its candidates, it is itself the best that is known.
    best, floor = sum(min(row.ms, row.best_ms) for row in rows), sum(row.floor_ms for row in rows)
    ms = found.get("ours", float("nan"))
    return LayerRow(
        shape=bench.shape.name,
        tokens=bench.load.tokens,
        part="whole layer",
        ms=ms,
        best_ms=best,
        best="sum of the best",
        floor_ms=floor,
        tflops=sum(r.tflops * r.ms for r in rows) / ms,
        gbytes_per_s=0.0,
        others={"sum of ours": sum(row.ms for row in rows)},
        refused=refused,
    )


def table(rows: list[LayerRow]) -> str:
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
        f"{row.part}: "
        + ", ".join(
            [f"{name} {ms:.4f}" for name, ms in row.others.items() if name != row.best]
            + [f"{name} refused ({why})" for name, why in row.refused.items()]
        )
        for row in rows
        if len(row.others) > 1 or row.refused or row.part == "whole layer"
    ]
    return "\n".join([*lines, "", *notes])


def tune(bench: Bench, watch: Stopwatch) -> dict[str, float]:
    """Milliseconds of this load's kernels by their knobs."""
    works: dict[str, Any] = {}
    if bench.load.queries == 1:
        core: Any = next(part for part in bench.parts() if part.name.startswith("attention core")).ours
        for keys, stages, programs in ((64, 3, 132), (64, 3, 264), (32, 5, 264), (32, 4, 528)):
            tuning = mla_decode.AttentionTuning(block_keys=keys, num_stages=stages, programs=programs)
            works[f"core {keys} keys, {stages} stages, {programs} programs"] = partial(core, tuning=tuning)
    moves, ids = TRITON_ROWS, bench.routing[1]
    places, ends = moves.order(ids, bench.shape.experts)
    rows = moves.spread(bench.x, places)
    active = moves.gate_up(rows, bench.gate_up, ends)
    high = grouped_gemm.tile_rows(len(rows), bench.shape.experts)
    for name, work, choices in (
        ("gate up", partial(grouped_gemm.gate_up, rows, bench.gate_up, ends), GATE_UP_CHOICES),
        ("down", partial(grouped_gemm.down, active, bench.down, ends), DOWN_CHOICES),
    ):
        for choice in choices[high]:
            tile = grouped_gemm.Tile(
                **dict(zip(("rows", "columns", "depth", "num_warps", "num_stages"), choice, strict=True))
            )
            works[f"{name} {choice}"] = partial(work, tile=tile)
    sources = moves.sources(places)
    works["spread"] = lambda: moves.spread(bench.x, places)
    for choice in GATHERED_CHOICES[high]:
        tile = grouped_gemm.Tile(
            **dict(zip(("rows", "columns", "depth", "num_warps", "num_stages"), choice, strict=True))
        )
        works[f"gathered gate up {choice}"] = partial(
            grouped_gemm.gathered_gate_up, bench.x, sources, bench.gate_up, ends, tile=tile
        )
    works["gate up torch"] = lambda: TRITON_ROWS.activate(
        torch._grouped_mm(rows, bench.gate_up.transpose(1, 2), offs=ends), ends
    )
    works["down torch"] = lambda: torch._grouped_mm(active, bench.down, offs=ends)
    found, refused = watch.medians(works)
    if refused:
        say("; ".join(f"{name} refused: {why}" for name, why in refused.items()))
    return dict(sorted(found.items(), key=lambda item: item[1]))


Choice = tuple[int, int, int, int, int]
GATE_UP_CHOICES: dict[int, list[Choice]] = {
    16: [(16, 64, 128, 4, 3), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 32, 256, 4, 3)],
    64: [(64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 64, 128, 4, 3), (64, 64, 64, 4, 4)],
    128: [(128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 3)],
}
GATHERED_CHOICES: dict[int, list[Choice]] = {
    16: [(16, 64, 128, 4, 3), (16, 128, 64, 4, 4)],
    64: [(64, 128, 64, 4, 3), (64, 128, 64, 8, 4), (64, 64, 64, 4, 4)],
    128: [
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 64, 64, 4, 4),
        (128, 64, 64, 4, 3),
        (128, 64, 128, 4, 2),
        (64, 64, 64, 4, 3),
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 128, 64, 4, 4),
    ],
}
DOWN_CHOICES: dict[int, list[Choice]] = {
    16: [(16, 128, 128, 4, 3), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 256, 64, 4, 3)],
    64: [(64, 256, 64, 4, 4), (64, 256, 64, 8, 4), (64, 128, 64, 4, 4), (64, 128, 128, 4, 3)],
    128: [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4)],
}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; returns 0 whatever they say: the machine decides."""
    parser = argparse.ArgumentParser(prog="python -m gpu.bench.layer", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--tokens", type=int, action="append", help="only batches of so many tokens")
    parser.add_argument("--shape", choices=("lite", "wide", "thin"), help="only this shape")
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
    everything: list[LayerRow] = []
    tuned: dict[str, dict[str, float]] = {}
    for shape in (s for name, s in (("lite", LITE), ("wide", WIDE), ("thin", THIN)) if options.shape in (None, name)):
        for load in (load for load in LOADS if not options.tokens or load.tokens in options.tokens):
            bench = Bench(shape, load)
            rows = [measure(part, shape, load, watch, limits) for part in bench.parts()]
            rows.append(measure_layer(bench, rows, watch))
            kind = "decode" if load.queries == 1 else "prefill"
            say(
                f"\n{shape.name}, {load.tokens} tokens ({kind}, {load.requests} requests, {load.keys} keys)\n{table(rows)}"
            )
            everything += rows
            if options.tune:
                tuned[f"{shape.name} {load.tokens}"] = found = tune(bench, watch)
                say("; ".join(f"{name}: {ms:.4f}" for name, ms in found.items()))
            del bench
            torch.cuda.empty_cache()
    missed = [row for row in everything if not row.reached]
    say(
        f"\n{len(missed)} of {len(everything)} beyond 15 %: "
        + ", ".join(f"{r.part} {r.shape} {r.tokens}" for r in missed)
    )
    return {
        "device": device,
        "limits": asdict(limits),
        "rows": [asdict(row) | {"share": row.share} for row in everything],
        "tuned": tuned,
    }


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
