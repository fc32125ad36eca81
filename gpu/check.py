"""`python -m gpu.check`: everything that can be checked on this machine's devices, and a short table (needs torch).

    python -m gpu.check --share-device       two ranks on one device: DeepEP V1, both modes, eager and graphs
    python -m gpu.check                      a device a rank
    python -m gpu.check --device cpu         CPU tensors over gloo
    torchrun --standalone --nproc-per-node=2 -m gpu.check

Exit code 0 when every line passed, 1 when one did not, 3 when there are too few devices.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dbo.compare import compare
from dbo.config import DBOConfig
from dbo.conformance import RunCases, run_suite
from dbo.errors import NotAvailable
from dbo.export.chrome import read_trace
from dbo.job_inputs import DEFAULTS, generated_folder
from dbo.main_job import run as run_main_job
from dbo.main_job_types import CheckRequest, CheckResult
from dbo.model.config import load_model_config
from dbo.rank import FolderWeights, RankJob, RankMain, RequestSpec
from dbo.schedule import load_schedule
from gpu import handoff, plants, probe, soak
from gpu.linear import linearity
from gpu.world import launch


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    passed: bool
    what: str
    took_s: float


class Quiet:
    """Progress that nobody watches."""

    def stage(self, text: str) -> None:
        return None

    def step(self, report: Any) -> None:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for and return the exit code."""
    options = _parser().parse_args(argv)
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        machine = probe.machine(device=options.device, ranks=options.ranks, share_device=options.share_device)
    except NotAvailable as error:
        sys.stderr.write(f"{error}\n")
        return 3
    backends = tuple(options.backend or machine.backends)
    if not backends:
        sys.stderr.write("no all-to-all backend can run here: `dbo doctor` says what to install\n")
        return 3
    rows = []
    for row in _rows(options, machine, backends):
        rows.append(row)
        if speaks:
            _say(row)
    failed = [row for row in rows if not row.passed]
    if speaks:
        shared = "; ranks share a device: nothing here says anything about speed" if options.share_device else ""
        total = sum(row.took_s for row in rows)
        sys.stdout.write(f"{len(rows)} checks, {len(failed)} failed, {total:.0f} s{shared}\n")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu.check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--share-device", action="store_true", help="all ranks on the first device")
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument("--backend", action="append", help="all-to-all backends (default: those that run here)")
    parser.add_argument("--vehicle", choices=("thread", "greenlet"), default="thread", help="what ubatches are")
    parser.add_argument("--model", type=Path, help="a DeepSeek-V2 folder (default: a generated one)")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS", help="steps of the long run (default: none)")
    parser.add_argument(
        "--only", action="append", help="names of parts: conformance, job, graph, watchdog, handoff, soak"
    )
    return parser


def _rows(options: argparse.Namespace, machine: probe.Machine, backends: tuple[str, ...]) -> Iterator[Row]:
    device = "cpu" if machine.options["device"] == "cpu" else "cuda"
    in_place = "RANK" in os.environ  # torchrun: a rank that is ended on purpose would end the whole run
    wanted = options.only or ["conformance", "job", "graph", "watchdog", "handoff", "soak"]
    run = partial(launch, ranks=options.ranks, timeout_s=240.0, vehicle=options.vehicle, **machine.options)
    if "conformance" in wanted:
        yield _timed("conformance", partial(_conformance, run, options.ranks, backends, in_place))
    for backend in backends:
        if "job" in wanted:
            yield _timed(f"job {backend}", partial(_job, options, backend, "NONE"))
        if "graph" in wanted and device == "cuda":
            yield _timed(f"job {backend}, graph", partial(_job, options, backend, "FULL"))
            yield _timed(f"graph = eager {backend}", partial(_replays, run, options, backend))
        if "watchdog" in wanted and not in_place:
            yield _timed(f"watchdog {backend}", partial(_watchdog, partial(run, stall_s=5.0), options, backend))
        if "soak" in wanted and options.soak:
            yield _timed(f"soak {backend}", partial(_soak, run, options, backend, device))
    if "handoff" in wanted:
        yield _timed("hand-over", _handoff)


def _timed(name: str, check: Callable[[], tuple[bool, str]]) -> Row:
    start = time.monotonic()
    try:
        passed, what = check()
    except Exception as error:
        passed, what = False, "".join(traceback.format_exception(error))
    return Row(name=name, passed=passed, what=what, took_s=time.monotonic() - start)


def _say(row: Row) -> None:
    first, *rest = row.what.splitlines() or [""]
    sys.stdout.write(f"{'ok  ' if row.passed else 'FAIL'} {row.took_s:6.1f} s  {row.name:<36} {first}\n")
    for line in rest[-40:]:
        sys.stdout.write(f"{'':<16}{line}\n")
    sys.stdout.flush()


# -- the parts ----------------------------------------------------------------------------------------------------


def _conformance(run: Callable[..., Any], ranks: int, backends: tuple[str, ...], in_place: bool) -> tuple[bool, str]:
    if in_place:
        launched = run(RunCases(True, backends))
        problems = [f"{name}: {p}" for value in launched.values for name, p in value or [("launch", "lost")] if p]
        return not problems, "\n".join(problems) or f"{len(launched.values[0])} cases"
    results = run_suite(partial(run, stall_s=5.0), ranks=ranks, backends=backends)
    problems = [f"{r.name}: {r.problem}" for r in results if not r.passed]
    return not problems, "\n".join([f"{len(results)} cases, {len(problems)} failed", *problems])


def _main_job(options: argparse.Namespace, backend: str, graphs: str) -> CheckResult:
    flags = _flags(options, backend) | ({"cudagraph_mode": "FULL"} if graphs == "FULL" else {})
    path = Path(f"{os.environ.get('TMPDIR', '/tmp')}/gpu-check-{backend}-{graphs}-{os.environ.get('RANK', 0)}.json")
    request = CheckRequest(
        flags=flags, model=options.model, steps=8, device=options.device, share_device=options.share_device, trace=path
    )
    return run_main_job(request, Quiet())


def _flags(options: argparse.Namespace, backend: str) -> dict[str, Any]:
    carries_any = backend in ("nccl", "symm_copy") or options.device == "cpu"
    return {
        "world": "gpu", "data_parallel_size": options.ranks, "all2all_backend": backend,
        "dtype": "float32" if carries_any else "bfloat16",
    }  # fmt: skip


def _job(options: argparse.Namespace, backend: str, graphs: str) -> tuple[bool, str]:
    result = _main_job(options, backend, graphs)
    reference, words = result.reference, [result.verdict.text]
    words.append(f"tokens {'equal' if reference.tokens_equal else 'DIFFER'}, {reference.ties} ties")
    words.append(f"logits {reference.max_rel_err:.1e}" if reference.max_rel_err is not None else "no logits")
    words.append(f"serial bits {'equal' if reference.serial_equal else 'DIFFER'}")
    words.append(f"order {'as' if reference.order_as_simulated else 'NOT as'} simulated")
    lines = [", ".join(words)]
    lines += [f"{v.id}: {v.sentence}" for v in result.violations[:5]]
    assert result.trace is not None
    linear = linearity(read_trace(result.trace))
    lines += list(linear.problems)
    lines[0] += f", {linear.checked} edges"
    good = result.verdict.good and bool(reference.serial_equal) and linear.checked > 0 and not linear.problems
    return good, "\n".join(lines)


def _job_of(options: argparse.Namespace, backend: str, **changes: Any) -> RankJob:
    """A job on the generated model; requests of many lengths, the last rank with the fewest."""

    folder = options.model or generated_folder(CheckRequest(), Quiet())
    flags = DEFAULTS | _flags(options, backend)
    if backend == "deepep_low_latency":
        flags["low_latency_max_tokens_per_rank"] = flags["max_num_batched_tokens"]
    config = DBOConfig(**(flags | changes.pop("flags", {})))
    model = load_model_config(folder)
    requests = changes.pop("requests", 6)
    many = [
        [
            RequestSpec(
                id=f"{rank}.{i}", max_new_tokens=4 + (5 * i + rank) % 9,
                prompt_token_ids=tuple((13 * i + 5 * rank + 3 * k) % 250 for k in range(2 + (7 * i) % 23)),
            )
            for i in range(requests - (requests // 5) * (rank == options.ranks - 1))
        ]
        for rank in range(options.ranks)
    ]  # fmt: skip
    return RankJob(
        config=config, model_config=model, schedule=load_schedule(config.dbo_schedule), requests=many,
        weights_of=FolderWeights(folder=str(folder), config=model, dtype=config.dtype), keep_logits=True, **changes,
    )  # fmt: skip


def _replays(run: Callable[..., Any], options: argparse.Namespace, backend: str) -> tuple[bool, str]:
    """The same requests eager and from graphs: the replayed steps, each of another batch, say the same."""
    eager = _job_of(options, backend)
    graphs = replace(eager, config=eager.config.replace(cudagraph_mode="FULL"))
    one, other = (run(RankMain(job), trace=False) for job in (eager, graphs))
    if any(one.errors) or any(other.errors):
        return False, f"{one.errors} {other.errors}"
    steps = [o for o in other.values[0] if o.decision is not None and o.decision.cudagraph_mode == "FULL"]
    split = sum(o.decision.split for o in steps)
    said = compare(_by_request(one.values), _by_request(other.values), dtype=eager.config.dtype)
    what = f"{len(steps)} replays ({split} split), {said.compared} tokens, {said.ties} ties"
    return said.tokens_equal and split >= 3, f"{what}, logits {said.max_rel_err:.1e}"


def _by_request(values: Sequence[Any]) -> dict[str, tuple[list[int], list[Any]]]:
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for outcomes in values:
        for outcome in outcomes or []:
            for id, token in outcome.tokens.items():
                tokens, rows = found.setdefault(id, ([], []))
                tokens.append(token)
                rows.append(outcome.logits[id])
    return found


def _watchdog(run: Callable[..., Any], options: argparse.Namespace, backend: str) -> tuple[bool, str]:
    """A rank that leaves out a dispatch, and a ubatch that yields once too little, are named."""
    lines, good = [], True
    for planted, ubatch in ((plants.skip_a_dispatch, 1), (plants.drop_a_yield, 0)):
        start = time.monotonic()
        launched = run(RankMain(_job_of(options, backend, program_of=plants.OnRank(1, planted))))
        report = launched.report or {"rank": -1, "ubatch": -1, "point": "", "text": f"no report: {launched.errors}"}
        named = report["rank"] == 1 and report["ubatch"] == ubatch and bool(report["point"])
        good = good and named and 0 not in launched.exit_codes
        lines.append(f"{planted.__name__}: {time.monotonic() - start:.1f} s: {report['text'].splitlines()[0]}")
    return good, "\n".join(lines)


def _soak(run: Callable[..., Any], options: argparse.Namespace, backend: str, device: str) -> tuple[bool, str]:
    """The same requests with and without DBO, eager and, on a device, with graphs."""
    steps = options.soak
    flags = {"cudagraph_mode": "FULL"} if device == "cuda" else {}
    job = _job_of(options, backend, flags=flags, requests=max(20, steps), max_steps=steps)
    plain = replace(job, config=job.config.without_dbo())
    one, other = (run(soak.Soak(j), trace=False) for j in (job, plain))
    if any(one.errors) or any(other.errors):
        return False, f"{one.errors} {other.errors}"
    problems = soak.problems(one.values, other.values)
    pairs = zip(one.values, other.values, strict=True)
    same, ties, others = map(sum, zip(*(soak.differing(a, b, dtype=job.config.dtype) for a, b in pairs), strict=True))
    first = one.values[0]
    what = f"{first.steps} steps ({first.split} split, {first.graphs} graphs, {first.idle} without a token), "
    what += f"{same} requests the same, {ties} ties, {others} others"
    return not problems and not others and same > ties, "\n".join([what, *problems])


def _handoff() -> tuple[bool, str]:
    costs = handoff.measure()
    base, best = costs[0], min(costs[1:], key=lambda cost: cost.median_us)
    words = "; ".join(f"{cost.name} {cost.median_us:.0f} us" for cost in costs)
    return best.median_us <= 0.5 * base.median_us, f"{words} a step of 108 hand-overs"


def _leave(code: int) -> None:
    """End a process that torchrun started. Gloo's threads may outlive the interpreter and abort it, so do not wait for that."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _leave(main())
    sys.exit(main())
