"""`dbo bench moe`: what DBO gains on real devices, against its own ideal and the best run without it. No torch here.

A stack of equal MoE layers of the project's own model, DP attention and EP experts over the ranks, weights random in bf16.
For each backend, in turns within one run: without DBO, with DBO by every schedule, compute alone (the exchange replaced by
a recording) whole and in two halves, communication alone. Right first: a wrong result is told and not timed.

Routing: the gate is computed and its weights are used, but the experts are a uniform draw from the seed, by layer and row,
so that every variant, rank and backend does the same work. wide-* shapes are synthetic; lite is DeepSeek-V2-Lite's.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dbo.bench.moe_figures import verdicts
from dbo.bench.moe_shapes import GROUPS, SHAPES
from dbo.bench.moe_table import page
from dbo.config import facts
from dbo.errors import NotAvailable, UsageError
from dbo.registry import moe_bench
from dbo.schedule import HOOK_BACKENDS, Schedule, load_schedule, presets

NAME = "moe"
MODES = ("eager", "graph")
EVERY = "all"
DEFAULT_SCHEDULES = ("mlp_shared_overlap", "ascend_d0d1c0c1", "sglang_prefill")
DEFAULT_HOOK_SCHEDULES = ("mlp_shared_overlap", "lightllm_decode")
LOW_LATENCY_TOKENS = 511
"""Tokens a rank of one low-latency call, at most."""


@dataclass(frozen=True, kw_only=True)
class MoEBench:
    """What is measured; the same on all ranks.

    Attributes:
        device: "cpu" or "cuda". ranks: DP and EP.
        shapes: of `dbo.bench.moe_shapes`. tokens: of a rank in a step.
        backends, schedules, modes: each with each, where they fit; no schedules: those made for the backend.
        comm_sms: of the exchanges of backends that take some, with DBO and without; 0: the library's choice.
        layers: L; `steady`: also 2L.
        prompt_tokens: batches of at least so many tokens are prefills of prompts this long, smaller ones decode
            `context_tokens` keys a request.
        repeat: samples of each. vehicle: what ubatches are, "auto", "thread" or "greenlet".
        budget_s: what has not begun by then is skipped; None: all is measured.
        save: a file that gets the JSON after every table.
    """

    device: str
    ranks: int
    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    backends: tuple[str, ...]
    comm_sms: tuple[int, ...] = (0,)
    schedules: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager",)
    layers: int = 4
    steady: bool = True
    prompt_tokens: int = 2048
    context_tokens: int = 1024
    repeat: int = 15
    vehicle: str = "auto"
    budget_s: float | None = None
    save: str | None = None
    seed: int = 0

    @property
    def command(self) -> str:
        """The line that measures the same again."""
        words: list[Any] = ["dbo", "bench", NAME, "--device", self.device, "--ranks", self.ranks]
        words += ["--shape", *self.shapes, "--tokens", *self.tokens]
        words += [word for backend in self.backends for word in ("--backend", backend)]
        words += ["--comm-sms", *self.comm_sms, *(["--schedule", *self.schedules] if self.schedules else [])]
        words += ["--mode", *self.modes, "--layers", self.layers, *([] if self.steady else ["--no-steady"])]
        words += ["--prompt-tokens", self.prompt_tokens, "--context-tokens", self.context_tokens]
        words += ["--repeat", self.repeat, "--vehicle", self.vehicle, "--seed", self.seed]
        words += [] if self.budget_s is None else ["--budget", f"{self.budget_s:g}"]
        return shlex.join(map(str, words))

    def schedules_for(self, backend: str) -> list[Schedule]:
        """The schedules that suit a backend, in order."""
        if self.schedules == (EVERY,):
            asked = list(presets().values())
        else:
            hooks = DEFAULT_HOOK_SCHEDULES if backend in HOOK_BACKENDS else DEFAULT_SCHEDULES
            asked = [load_schedule(name) for name in self.schedules or hooks]
        return [schedule for schedule in asked if backend in schedule.backends]

    def sms_for(self, backend: str) -> tuple[int, ...]:
        return self.comm_sms if facts.BACKENDS[backend].takes_comm_sms else (0,)


def add_arguments(parser: argparse.ArgumentParser, integer: Callable[[int], Callable[[str], int]]) -> None:
    """Declare the flags that only this benchmark reads."""
    group = parser.add_argument_group("moe")
    group.add_argument("--shape", nargs="+", choices=(*SHAPES, *GROUPS), help="layers (default: wide lite; CPU: tiny)")
    group.add_argument(
        "--tokens", nargs="+", type=integer(2), metavar="N", help="a rank (default 8192 4096; CPU: 32 8)"
    )
    group.add_argument("--backend", action="append", choices=facts.BACKENDS, help="may be given again (default: all)")
    group.add_argument(
        "--comm-sms", nargs="+", type=integer(0), default=[0], metavar="N", help="SMs of exchanges, even"
    )
    group.add_argument("--schedule", nargs="+", default=[], metavar="NAME", help=f"presets or files, or {EVERY}")
    group.add_argument("--mode", nargs="+", choices=MODES, help="default: both; CPU: eager")
    group.add_argument("--layers", type=integer(1), default=4, metavar="L")
    group.add_argument("--no-steady", action="store_true", help="do not measure 2L layers too")
    group.add_argument("--prompt-tokens", type=integer(1), metavar="N", help="of a prefill's prompts (default 2048)")
    group.add_argument("--context-tokens", type=integer(1), metavar="N", help="keys of a decode (default 1024)")
    group.add_argument("--vehicle", choices=("auto", "thread", "greenlet"), default="auto", help="what ubatches are")
    group.add_argument("--budget", type=float, metavar="SECONDS", help="skip by name what has not begun by then")
    group.add_argument("--save", metavar="FILE", help="write the JSON there after every table")


def options(args: argparse.Namespace, *, devices: int) -> MoEBench:
    """The benchmark that the flags ask for, on a machine with so many CUDA devices.

    Raises:
        UsageError: flags that contradict each other. ScheduleError: no such schedule.
        NotAvailable: there are fewer devices than ranks, or graphs were asked for on the CPU.
    """
    device = ("cuda" if devices >= args.ranks else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and devices < args.ranks:
        fix = "pass --device cpu, or fewer --ranks"
        raise NotAvailable.of("speed is measured on a device a rank", fix=fix, devices=devices, ranks=args.ranks)
    small = device == "cpu"
    modes = tuple(args.mode or (("eager",) if small else MODES))
    if small and "graph" in modes:
        raise NotAvailable.of("graphs are CUDA graphs", fix="pass --mode eager, or use devices", device=device)
    odd = [sms for sms in args.comm_sms if sms % 2]
    if odd:
        raise UsageError.of("comm SMs come in pairs", fix="use even counts", comm_sms=odd)
    shapes = [
        name
        for asked in args.shape or (["tiny"] if small else ["wide", "lite"])
        for name in GROUPS.get(asked, (asked,))
    ]
    uneven = [name for name in shapes if SHAPES[name].experts % args.ranks]
    if uneven:
        rule = "routed experts are spread evenly over the ranks"
        raise UsageError.of(rule, fix="choose --ranks that divide them", shapes=uneven, ranks=args.ranks)
    bench = MoEBench(
        device=device,
        ranks=args.ranks,
        shapes=tuple(dict.fromkeys(shapes)),
        tokens=tuple(args.tokens or ((32, 8) if small else (8192, 4096))),
        backends=tuple(dict.fromkeys(args.backend or facts.BACKENDS)),
        comm_sms=tuple(dict.fromkeys(args.comm_sms)),
        schedules=tuple(args.schedule),
        modes=tuple(dict.fromkeys(modes)),
        layers=args.layers,
        steady=not args.no_steady,
        prompt_tokens=args.prompt_tokens or (16 if small else 2048),
        context_tokens=args.context_tokens or (24 if small else 1024),
        repeat=args.repeat,
        vehicle=args.vehicle,
        budget_s=args.budget,
        save=args.save,
        seed=args.seed,
    )
    if not any(bench.schedules_for(backend) for backend in bench.backends):
        rule = "a schedule suits one of the backends"
        raise UsageError.of(rule, fix="choose another --schedule", schedules=bench.schedules, backends=bench.backends)
    return bench


def run(args: argparse.Namespace, stage: Callable[[str], None]) -> tuple[str, dict[str, Any], bool]:
    """Measure. Returns the text, the JSON object, and whether every result was right. Tables appear on stderr at once.

    Raises:
        NotAvailable: nothing could be measured; what was asked for is skipped by name.
    """
    bench_module = moe_bench()
    bench = options(args, devices=bench_module.cuda_devices())
    stage(f"{bench.ranks} ranks on {bench.device}")
    measured = bench_module.measure(bench)
    if not measured.rows:  # an empty page would look like a good answer
        rule = "at least one backend can be measured"
        raise NotAvailable.of(rule, fix="ask for another one, or more --budget", skipped="; ".join(measured.skipped))
    found = verdicts(measured.rows, measured.host_ratio)
    data = {"bench": asdict(bench), "command": bench.command} | measured.to_json()
    data["verdicts"] = [asdict(verdict) for verdict in found]
    return page(bench.command, measured, found), data, all(row.correct for row in measured.rows)
