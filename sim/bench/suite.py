"""What `dbo bench sim` times: switches, the ring, the deadlock report, layers at scale, coordination, memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from dbo.bench import coordination
from dbo.bench.ring import YIELDS, TwoThreadRing
from dbo.bench.timing import milliseconds
from dbo.check import HappensBefore, deadlock, judge, stream_race
from dbo.contract.benchmark import Benchmark, Target
from dbo.contract.world import Baton, World
from dbo.errors import DBOError
from dbo.job.layer import LayerJob, layer_program
from dbo.schedule import load_schedule
from dbo.ubatching.forward_context import ForwardContext
from dbo.ubatching.ring import UBatchContext, dbo_yield, make_ubatch_contexts
from sim.compiled.program import CompiledSchedule, compile_schedule
from sim.tasks import Scheduler
from sim.world import SimRun, launch

SCHEDULE, BACKEND = "mlp_shared_overlap", "deepep_low_latency"
V3_MOE_LAYERS = 58


def benchmarks() -> Sequence[Benchmark]:
    """All of them, in the order of the table."""
    return [*_switches(), *_rings(), _deadlock(), *_compiled(), *_real(), *_coordination(), _memory()]


# -- host tasks -------------------------------------------------------------------------------------------------------


def _switches() -> list[Benchmark]:
    return [
        Benchmark(
            name=f"switch-{v}", what=f"one switch between two tasks on {v}s", unit="µs", sample=partial(_switch_us, v)
        )
        for v in ("greenlet", "thread")
    ]


def _switch_us(vehicle: str, switches: int = 20_000) -> float:
    scheduler = Scheduler(vehicle=vehicle)

    def work() -> None:
        for _ in range(switches // 2):
            for other in scheduler.tasks:
                scheduler.wake(other)
            scheduler.block(("turn",))

    for line in ("u0", "u1"):
        scheduler.spawn(work, rank=0, line=line)
    scheduler.on_deadlock = lambda stuck: None  # the last one to block is left alone
    start = time.perf_counter()
    scheduler.run()
    return (time.perf_counter() - start) * 1e6 / scheduler.switches


def _rings() -> list[Benchmark]:
    greenlets = partial(_rings_per_second, plain_ring_program, "greenlet")
    rows = [
        Benchmark(
            name="ring-greenlet",
            what=f"a ring of a barrier and 2 batons, {YIELDS} yields, with clocks",
            unit="/s",
            sample=greenlets,
        ),
        Benchmark(
            name="ring-thread",
            what="the same on OS threads",
            unit="/s",
            sample=partial(_rings_per_second, plain_ring_program, "thread"),
            target=Target(bound=1000, at_least=True),
        ),
        Benchmark(
            name="ring-dbo",
            what=f"the ring of dbo.ubatching.ring, 2 ubatches, {YIELDS} yields, with clocks",
            unit="/s",
            sample=partial(_rings_per_second, ring_program, "greenlet"),
        ),
    ]
    if importlib.util.find_spec("frontrun") is not None:
        rows += [
            Benchmark(
                name="ring-frontrun",
                what="ring-greenlet under frontrun",
                unit="/s",
                sample=_frontrun_per_second,
                most=3,
            ),
            Benchmark(
                name="ring-ratio",
                what="ring-greenlet / ring-frontrun, one after the other",
                unit="×",
                most=3,
                sample=lambda: greenlets() / _frontrun_per_second(),
                target=Target(bound=100, at_least=True),
            ),
        ]
    return rows


class _Flag:
    """A simulated baton with the methods of an event; taking it clears it."""

    def __init__(self, baton: Baton) -> None:
        self.set, self.wait = baton.give, baton.take

    def clear(self) -> None:
        return None


def plain_ring_program(world: World) -> None:
    """`dbo.bench.ring` on two host tasks of one rank."""
    ring = TwoThreadRing(world.host.barrier(2, "ready"), [_Flag(world.host.baton(f"u{i}")) for i in range(2)])
    workers = [world.host.worker(f"u{index}") for index in range(2)]
    for index, worker in enumerate(workers):
        worker.submit(partial(ring.work, index))
    for worker in workers:
        worker.join()
    if not ring.fair:
        raise DBOError.of("the ring takes turns", fix="mend the scheduler", turns=ring.turns)


def ring_program(world: World) -> None:
    """One rank, two ubatches, `YIELDS` hand-overs each: the code of `dbo.ubatching.ring`, unmodified."""
    contexts = make_ubatch_contexts(
        2,
        world.compute,
        world.comm,
        [ForwardContext(attn_metadata=None, step=0) for _ in range(2)],
        world.host.barrier(3, "ready"),
        world=world,
    )

    def ubatch(context: UBatchContext) -> None:
        with context:
            for _ in range(YIELDS):
                dbo_yield()

    workers = [world.host.worker(f"u{index}") for index in range(2)]
    for worker, context in zip(workers, contexts, strict=True):
        worker.submit(partial(ubatch, context))
    contexts[0].ready_barrier.wait()
    contexts[0].start()
    for worker in workers:
        worker.join()


def _rings_per_second(program: Callable[[Any], None], vehicle: str, rings: int = 100) -> float:
    start = time.perf_counter()
    for _ in range(rings):
        run = launch(program, ranks=1, mode="ordering", vehicle=vehicle)
        HappensBefore(run.trace)
        if run.deadlocked or run.errors[0] is not None:
            raise DBOError.of("the ring runs to its end", fix="see the error", error=run.errors[0])
    return rings / (time.perf_counter() - start)


def _frontrun_per_second(attempts: int = 50) -> float:
    launcher = "import sys; from frontrun.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", launcher, sys.executable, "-m", "dbo.bench.frontrun_peer", str(attempts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        rule = "the named peer runs"
        raise DBOError.of(rule, fix="repair or remove frontrun", output=(done.stdout + done.stderr)[-500:])
    return float(done.stdout.split()[-1])


def _deadlock() -> Benchmark:
    return Benchmark(
        name="deadlock-report",
        what="a ubatch leaves early, the other waits: run, deadlock, report",
        unit="ms",
        sample=_deadlock_ms,
        target=Target(bound=1),
    )


def early_exit_program(world: World) -> None:
    """A plain ring of two batons in which ubatch 1 leaves without passing its baton on."""
    batons = [world.host.baton(f"u{index}") for index in range(2)]

    def stays() -> None:
        batons[1].give()
        batons[0].take()

    workers = [world.host.worker(f"u{index}") for index in range(2)]
    workers[0].submit(stays)
    workers[1].submit(batons[1].take)
    for worker in workers:
        worker.join()


def _deadlock_ms(times: int = 20) -> float:
    def once() -> None:
        run = launch(early_exit_program, ranks=1, mode="ordering")
        report = judge(run.trace, detectors=[deadlock])
        if not report.violations:
            raise DBOError.of("the early exit is reported", fix="mend the detector", verdict=report.verdict.text)

    def several() -> None:
        for _ in range(times):
            once()

    return milliseconds(several) / times


# -- scale ------------------------------------------------------------------------------------------------------------


def _compiled() -> list[Benchmark]:
    bounds = {64: 5.0, 256: 20.0, 1024: 100.0}
    recorded = [
        Benchmark(
            name=name,
            what=f"run two ranks of {words}, read the program and its cells",
            unit="ms",
            sample=partial(_recorded_ms, layers),
            note="once for any number of ranks; the compiled rows replay it",
        )
        for name, words, layers in (
            ("recorded", "one layer", 1),
            ("recorded-v3", f"{V3_MOE_LAYERS} layers", V3_MOE_LAYERS),
        )
    ]
    rows = [
        Benchmark(
            name=f"compiled-{ranks}",
            what=f"replay, race-check one recorded layer on {ranks} ranks",
            unit="ms",
            sample=partial(_compiled_ms, ranks, 1),
            target=Target(bound=bound),
        )
        for ranks, bound in bounds.items()
    ]
    whole = Benchmark(
        name="compiled-v3-256",
        what=f"the same for {V3_MOE_LAYERS} layers on 256 ranks",
        unit="ms",
        sample=partial(_compiled_ms, 256, V3_MOE_LAYERS),
        target=Target(bound=3000),
        note="a whole DeepSeek-V3 step of MoE layers, every rank's times and all pairs of ranks for races",
    )
    return [*recorded, *rows, whole]


def _recorded(layers: int) -> CompiledSchedule:
    program = compile_schedule(load_schedule(SCHEDULE), backend=BACKEND, layers=layers)
    if not program.cells:
        raise DBOError.of("a program writes something", fix="mend the recording", layers=layers)
    return program


_program = cache(_recorded)


def _recorded_ms(layers: int) -> float:
    return milliseconds(lambda: _recorded(layers))


def _compiled_ms(ranks: int, layers: int) -> float:
    program = _program(layers)
    return milliseconds(lambda: _refuse_races(program.replay(ranks).races))


def _real() -> list[Benchmark]:
    what = "ring, player, kernel of one layer, race-checked,"
    return [
        Benchmark(
            name="real-64", what=f"{what} 64 ranks", unit="ms", sample=partial(_real_ms, 64, 1), target=Target(bound=50)
        ),
        Benchmark(
            name="real-nccl-64",
            what="the same on backend nccl",
            unit="ms",
            sample=partial(_real_ms, 64, 1, backend="nccl"),
        ),
        Benchmark(name="real-256", what=f"{what} 256 ranks", unit="ms", sample=partial(_real_ms, 256, 1), most=5),
        Benchmark(name="real-1024", what=f"{what} 1,024 ranks", unit="ms", sample=partial(_real_ms, 1024, 1), most=3),
        Benchmark(
            name="real-v3-256",
            what=f"{V3_MOE_LAYERS} layers on 256 ranks, race-checked",
            unit="ms",
            most=1,
            sample=partial(_real_ms, 256, V3_MOE_LAYERS),
            note="every host task of every rank runs; compiled-v3-256 is the form that is meant for this size",
        ),
    ]


@cache
def _job(ranks: int, layers: int, backend: str) -> LayerJob:
    return LayerJob(schedule=load_schedule(SCHEDULE), backend=backend, ranks=ranks, layers=layers)


def _real_ms(ranks: int, layers: int, *, backend: str = BACKEND) -> float:
    return milliseconds(lambda: run_layers(ranks, layers, backend=backend))


def run_layers(ranks: int, layers: int, *, backend: str = BACKEND) -> SimRun:
    """Run the real code and check it for races.

    Raises:
        DBOError: it failed, hung or raced.
    """
    run = launch(layer_program(_job(ranks, layers, backend)), ranks=ranks, mode="ordering")
    errors = [error for error in run.errors if error is not None]
    if errors or run.deadlocked:
        raise DBOError.of("the clean program runs", fix="see the error", errors=errors[:1], deadlocked=run.deadlocked)
    _refuse_races(judge(run.trace, detectors=[stream_race]).violations)
    return run


def _refuse_races(races: Sequence[object]) -> None:
    if races:
        raise DBOError.of("the clean program has no race", fix="mend the program or the judge", first=races[0])


def _coordination() -> list[Benchmark]:
    bounds: dict[int, Target | None] = {8: Target(bound=1000), 16: None, 64: Target(bound=180_000)}
    return [
        Benchmark(
            name=f"coordination-{ranks}",
            what=f"every input of 4 classes on {ranks} ranks, by symmetry",
            unit="ms",
            sample=partial(_coordination_ms, ranks),
            target=bound,
            most=1 if ranks == 64 else 5,
        )
        for ranks, bound in bounds.items()
    ]


def _coordination_ms(ranks: int) -> float:
    return milliseconds(lambda: coordination.judge_all(ranks))


def _memory() -> Benchmark:
    return Benchmark(
        name="memory-1024",
        what="peak memory of a process that runs real-1024",
        unit="MB",
        sample=_memory_mb,
        target=Target(bound=500),
        most=3,
    )


def _memory_mb() -> float:
    code = "from sim.bench.suite import peak_mb, run_layers; run_layers(1024, 1); print(peak_mb())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def peak_mb() -> float:
    """The most memory that this process has had, in MiB.

    Linux: of the running program only; `ru_maxrss` would count what its parent had when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
