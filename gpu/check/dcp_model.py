"""`python3 -m gpu.check.dcp_model`: whole steps on DCP groups, in processes, against one rank that has all keys (needs torch).

    python3 -m gpu.check.dcp_model                          two devices: DP 1 x DCP 2, eager and in graphs, every exchange
    python3 -m gpu.check.dcp_model --ranks 4                four devices: DP 2 x DCP 2
    python3 -m gpu.check.dcp_model --device cpu             CPU tensors over gloo, eager, without a2a_direct

For every MoE backend, exchange, with and without DBO, eager and (on devices) from graphs: greedy tokens and logits by the
margin rule of `dbo.job.compare`, and what the detectors say about the trace. Exit code 0 when every line passed, 1 when one did
not, 3 when there are too few devices.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dbo.check import judge
from dbo.check.report import Report
from dbo.config import DBOConfig, effective, facts
from dbo.errors import NotAvailable
from dbo.job.compare import Request
from dbo.job.defaults import DEFAULTS
from dbo.job.rank import FolderWeights, RankJob, RankMain, RequestSpec
from dbo.job.reference import alone, compare_peers
from dbo.model.config import load_model_config
from dbo.model.generator import generate_model_folder
from dbo.schedule import load_schedule, to_text
from gpu import probe
from gpu.check.linearity import linearity
from gpu.world import GpuRun, launch

BACKENDS = ("nccl", "deepep_low_latency")
INTERLEAVES = {"ag_rs": 2, "a2a": 1, "a2a_direct": 4}
"""Each exchange with another layout of the keys."""

PROMPT_TOKENS = (1, 2, 9, 30, 5, 17)
"""One key leaves the other peers without any; the last ones end within a run of positions, and behind a page."""


@dataclass(frozen=True, kw_only=True)
class DCPRun:
    """One line of the table."""

    backend: str
    exchange: str
    enable_dbo: bool
    graphs: bool

    def __str__(self) -> str:
        words = (self.exchange, "DBO" if self.enable_dbo else "plain", "graphs" if self.graphs else "eager")
        return f"{self.backend} {' '.join(words)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and return the exit code."""
    options = _parser().parse_args(argv)
    try:
        machine = probe.machine(device=options.device, ranks=options.ranks, share_device=False)
    except NotAvailable as error:
        sys.stderr.write(f"{error}\n")
        return 3
    with tempfile.TemporaryDirectory(prefix="dbo-dcp-") as scratch:
        return _run(options, machine, options.model or model_folder(Path(scratch) / "model"))


def model_folder(path: Path) -> Path:
    """A model whose tokens go to every expert.

    With a choice of experts, 16-bit rounding moves a token in some hundreds to other ones than the reference's, with DCP or
    without (logits then differ by 0.19); without it the same runs stay within 0.035 (bf16, CPU), and a wrong share is seen.
    """
    generate_model_folder(path, seed=0, n_routed_experts=8, num_experts_per_tok=8)
    return path


def _run(options: argparse.Namespace, machine: probe.Machine, folder: Path) -> int:
    on_device = machine.options["device"] != "cpu"
    run = partial(launch, ranks=options.ranks, timeout_s=240.0, vehicle=options.vehicle, **machine.options)
    expected: Mapping[str, Request] = {}
    failed = cases = 0
    began = time.monotonic()
    for case in _cases(options, machine.backends, on_device):
        start = time.monotonic()
        try:
            job = job_of(
                case,
                folder,
                replicas=options.ranks // options.dcp,
                size=options.dcp,
                on_device=on_device,
                dtype=options.dtype,
            )
            expected = expected or alone(job, job.requests)
            passed, what = examine(run, job, expected)
        except Exception as error:
            passed, what = False, "".join(traceback.format_exception(error))
        cases, failed = cases + 1, failed + (not passed)
        _say(case, passed, what, time.monotonic() - start)
    missing = [name for name in BACKENDS if name not in machine.backends]
    shape, absent = f"DP {options.ranks // options.dcp} x DCP {options.dcp}", f"; not here: {', '.join(missing)}"
    took = f"{time.monotonic() - began:.0f} s{absent if missing else ''}"
    sys.stdout.write(f"{shape}: {cases} cases, {failed} failed, {took}\n")
    return 1 if failed or not cases else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu.check.dcp_model", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dcp", type=int, default=2, help="ranks of a group; DP is what is left")
    parser.add_argument(
        "--backend", action="append", choices=sorted(facts.BACKENDS), help="all-to-all backends of the MoE"
    )
    parser.add_argument(
        "--exchange", action="append", choices=facts.DCP_COMM_BACKENDS, help="default: those that run here"
    )
    parser.add_argument("--mode", action="append", choices=("eager", "graphs"), help="default: both, where graphs run")
    parser.add_argument(
        "--dtype", choices=facts.DTYPES, help="default: fp32, and bf16 where a library carries no other"
    )
    parser.add_argument("--vehicle", choices=("auto", "thread", "greenlet"), default="thread", help="what ubatches are")
    parser.add_argument("--model", type=Path, help="a DeepSeek-V2 folder (default: a generated one)")
    return parser


def _cases(options: argparse.Namespace, runs_here: Sequence[str], on_device: bool) -> Iterator[DCPRun]:
    backends = options.backend or [name for name in BACKENDS if name in runs_here]
    exchanges = options.exchange or [name for name in facts.DCP_COMM_BACKENDS if on_device or name != "a2a_direct"]
    modes = options.mode or (["eager", "graphs"] if on_device else ["eager"])
    for backend in backends:
        for exchange in exchanges:
            for mode in modes:
                for enable_dbo in (False, True):
                    yield DCPRun(backend=backend, exchange=exchange, enable_dbo=enable_dbo, graphs=mode == "graphs")


def job_of(
    case: DCPRun, folder: Path, *, replicas: int, size: int, on_device: bool, dtype: str | None = None
) -> RankJob:
    """The case's job: six requests a replica, some of which have no key on some peer."""
    flags = DEFAULTS | {
        "world": "gpu",
        "data_parallel_size": replicas,
        "decode_context_parallel_size": size,
        "dcp_comm_backend": case.exchange,
        "cp_kv_cache_interleave_size": INTERLEAVES[case.exchange],
        "all2all_backend": case.backend,
        "enable_dbo": case.enable_dbo,
    }
    if case.backend == "deepep_low_latency":
        flags["low_latency_max_tokens_per_rank"] = flags["max_num_batched_tokens"]
    carries = facts.BACKENDS[case.backend].dtypes
    if dtype is not None:
        flags["dtype"] = dtype
    elif on_device and carries:
        flags["dtype"] = min(carries)  # gloo carries any, a library's kernels do not
    if case.graphs:
        flags["cudagraph_mode"] = "FULL"
    if not case.enable_dbo:
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            flags.pop(name)
    config, model = DBOConfig(**flags), load_model_config(folder)
    requests = [
        [
            RequestSpec(
                id=f"{replica}.{i}",
                max_new_tokens=4 + (3 * i + replica) % 7,
                prompt_token_ids=tuple((13 * i + 5 * replica + 3 * k) % 250 for k in range(length)),
            )
            for i, length in enumerate(PROMPT_TOKENS)
        ]
        for replica in range(replicas)
    ]
    return RankJob(
        config=config,
        model_config=model,
        schedule=load_schedule(config.dbo_schedule),
        requests=requests,
        weights_of=FolderWeights(folder=str(folder), config=model, dtype=config.dtype),
        keep_logits=True,
    )


def examine(run: Callable[..., GpuRun], job: RankJob, expected: Mapping[str, Request]) -> tuple[bool, str]:
    """Run the job; whether every peer says what is expected, the detectors find nothing and the mode was the one meant."""
    launched = run(RankMain(job))
    if any(launched.errors) or launched.report is not None:
        text = launched.report["text"] if launched.report else ""
        return False, "\n".join([*(f"rank {r}: {e!r}" for r, e in enumerate(launched.errors) if e), text])
    said = compare_peers(expected, launched.values, job.config)
    report = judged(launched, job)
    decisions = [o.decision for o in launched.values[0] if o.decision is not None]
    split = sum(d.split for d in decisions)
    replays = sum(d.cudagraph_mode == "FULL" for d in decisions)
    linear = linearity(launched.trace)
    words = f"tokens {'equal' if said.tokens_equal else 'DIFFER'} ({said.compared}, {said.ties} ties), "
    words += f"logits {said.max_rel_err:.1e}, " if said.max_rel_err is not None else "no logits, "
    words += f"{len(decisions)} steps, {split} split, {replays} from graphs; {report.verdict}"
    good = said.compared > 0 and said.tokens_equal and said.logits_close and report.verdict.good
    good = good and not linear.problems
    meant = bool(split) == job.config.enable_dbo and bool(replays) == (job.config.cudagraph_mode == "FULL")
    problems = [*(f"{v.id}: {v.sentence}" for v in report.violations[:3]), *map(str, linear.problems)]
    return good and meant, "\n".join([words, *([] if meant else ["not the mode that was asked for"]), *problems])


def judged(launched: GpuRun, job: RankJob) -> Report:
    """What the detectors say about the trace."""
    launched.trace.meta |= {
        "backend": job.config.all2all_backend,
        "schedule": to_text(job.schedule),
        "ubatches": job.config.num_ubatches,
        "seed": 0,
        "config": effective(job.config),
    }
    return judge(launched.trace)


def _say(case: DCPRun, passed: bool, what: str, took_s: float) -> None:
    first, *rest = what.splitlines() or [""]
    sys.stdout.write(f"{'ok  ' if passed else 'FAIL'} {took_s:6.1f} s  {case!s:<42} {first}\n")
    for line in rest[-40:]:
        sys.stdout.write(f"{'':<16}{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
