"""What must hold before a schedule may run: each rule is one function, each refusal one sentence.

Static rules read one program; ring rules read the order that all ubatches give together. The order is a pure function
of the schedule, the number of ubatches and the number of layers, which the ranks compared at start, so a rule that
holds for it holds on every rank: with all sends on one stream, the ranks agree on the order of every exchange.
"""

from __future__ import annotations

from collections import Counter

from dbo.errors import ScheduleError
from dbo.schedule.model import (
    BACKENDS,
    HOOK_BACKENDS,
    OPTIONAL_POINTS,
    POINTS,
    PRODUCERS,
    RECV_OF,
    REQUIRED_POINTS,
    STREAMS,
    LayerProgram,
    Point,
    Schedule,
)
from dbo.schedule.ring import RingRun, run_ring

# A period is one layer long and the ubatches lie less than one layer apart: three layers hold a start, a whole period
# and an end, the fourth shows that the period repeats. With one or two layers, start and end touch.
LAYERS = (1, 2, 4)


def validate(schedule: Schedule, *, backend: str, num_ubatches: int) -> None:
    """Refuse a schedule that would hang, race, lose data or hide nothing on `backend` with `num_ubatches` ubatches.

    Raises:
        ScheduleError: names the rule, the offending values and the fix.
    """
    if backend not in BACKENDS:
        _refuse(schedule, "the backend is known", f"use one of {', '.join(BACKENDS)}", backend=backend)
    program = schedule.program(backend)
    _check_num_ubatches(schedule, backend, num_ubatches)
    _check_points(schedule, program)
    _check_producers(schedule, program)
    _check_yields(schedule)
    _check_streams(schedule, program, backend)
    if backend in HOOK_BACKENDS and not program.hooks:
        _refuse(
            schedule,
            "a backend with receive hooks needs a place to run them",
            "add hook items before D.send and C.send",
            backend=backend,
            hooks=0,
        )
    for layers in LAYERS:
        run = run_ring(schedule, backend=backend, num_ubatches=num_ubatches, layers=layers)
        _check_attention_order(schedule, run, num_ubatches)
        _check_ring_law(schedule, num_ubatches, layers)
        if backend in HOOK_BACKENDS:
            _check_one_pending_receive(schedule, run)
            _check_two_results_held(schedule, run)


def _refuse(schedule: Schedule, rule: str, fix: str, **values: object) -> None:
    raise ScheduleError.of(rule, fix=fix, schedule=schedule.name, **values)


def _check_num_ubatches(schedule: Schedule, backend: str, num_ubatches: int) -> None:
    if num_ubatches < 2:
        _refuse(schedule, "a schedule overlaps at least 2 ubatches", "raise --ubatch-size", num_ubatches=num_ubatches)
    if backend in HOOK_BACKENDS and num_ubatches > 2:
        _refuse(
            schedule,
            "the backend's two receive buffers serve at most 2 ubatches",
            "use 2 ubatches, or another backend",
            backend=backend,
            num_ubatches=num_ubatches,
        )


def _check_points(schedule: Schedule, program: LayerProgram) -> None:
    """Every point once: each send has one receive, and a layer makes one dispatch and one combine, an even number."""
    counts = Counter(point.name for point in program.points)
    for name in counts.keys() - set(POINTS):
        _refuse(schedule, "the points of a layer are fixed", f"use {' '.join(POINTS)}", point=name)
    for name in REQUIRED_POINTS:
        if counts[name] != 1:
            _refuse(schedule, "a layer reaches each point once", "name it exactly once", point=name, times=counts[name])
    for name in OPTIONAL_POINTS:
        if counts[name] > 1:
            _refuse(schedule, "a layer reaches each point once", "name it at most once", point=name, times=counts[name])


def _check_producers(schedule: Schedule, program: LayerProgram) -> None:
    if program.carries:
        names = [point.name for point in program.points]
        for name in names[: names.index("A0")]:
            if name not in ("C.recv", "copy"):
                _refuse(
                    schedule,
                    "only combine's receive and the output copy are carried into the next layer",
                    "put the point after A0",
                    point=name,
                )
    order = [item.name for item in program.folded if isinstance(item, Point)]
    for consumer, producer in PRODUCERS.items():
        if consumer in order and order.index(consumer) < order.index(producer):
            _refuse(
                schedule,
                "a producer comes before its consumer",
                f"move {consumer} behind {producer}",
                consumer=consumer,
                producer=producer,
            )


def _check_yields(schedule: Schedule) -> None:
    for program in schedule.programs:
        if program.yields != schedule.yields_per_layer:
            _refuse(
                schedule,
                "every program yields as often as the schedule declares",
                "change the yields line or the program",
                declared=schedule.yields_per_layer,
                yields=program.yields,
            )
    if schedule.yields_per_layer == 0:
        _refuse(schedule, "without a yield no ubatch ever hands over", "add a yield after a send", yields=0)
    if not 0 <= schedule.offset < schedule.yields_per_layer:
        _refuse(
            schedule,
            "the offset lies within one layer",
            "use 0 <= offset < yields",
            offset=schedule.offset,
            yields=schedule.yields_per_layer,
        )


def _check_streams(schedule: Schedule, program: LayerProgram, backend: str) -> None:
    for point in program.points:
        if point.stream not in STREAMS:
            _refuse(
                schedule, "a point runs on compute or comm", "use one of them", point=point.name, stream=point.stream
            )
        if point.stream == "comm" and point.name in ("A0", "A1", "MLP"):
            # One FIFO stream orders a request's KV writes before the reads of its continuation in the next ubatch.
            _refuse(
                schedule,
                "attention and experts run on the compute stream",
                "drop @comm",
                point=point.name,
                stream=point.stream,
            )
        if backend in HOOK_BACKENDS and point.stream == "comm":
            _refuse(
                schedule,
                "the backend issues everything on the compute stream",
                "drop @comm, or write a program for the other backends",
                backend=backend,
                point=point.name,
                stream=point.stream,
            )
        if backend not in HOOK_BACKENDS and point.stream == "compute" and point.name in RECV_OF:
            # On one stream per kind the ranks agree on the order of all exchanges; on compute nothing would be hidden.
            _refuse(
                schedule,
                "the backend exchanges on the comm stream, where all ranks see one order",
                f"write {point.name}@comm",
                backend=backend,
                point=point.name,
                stream=point.stream,
            )


def _check_attention_order(schedule: Schedule, run: RingRun, num_ubatches: int) -> None:
    position = {(s.layer, s.ubatch): i for i, s in enumerate(run.steps) if s.point == "A1"}
    for (layer, ubatch), index in position.items():
        if ubatch + 1 < num_ubatches and index > position[layer, ubatch + 1]:
            _refuse(
                schedule,
                "A1 of a ubatch comes before A1 of the next, which reads its KV",
                "use a smaller offset or 2 ubatches",
                layer=layer,
                ubatch=ubatch,
                offset=schedule.offset,
            )


def _check_ring_law(schedule: Schedule, num_ubatches: int, layers: int) -> None:
    counts = [schedule.yields(layers, ubatch, num_ubatches) for ubatch in range(num_ubatches)]
    if len(set(counts)) > 1:
        _refuse(
            schedule,
            "all ubatches yield equally often",
            "use offset 0 or 2 ubatches",
            offset=schedule.offset,
            yields=counts,
        )


def _check_one_pending_receive(schedule: Schedule, run: RingRun) -> None:
    """Call k+1's send clears call k's flags, so call k's receive is launched first."""
    pending: tuple[str, int] | None = None
    for step in run.steps:
        if step.point in RECV_OF:
            if pending is not None:
                _refuse(
                    schedule,
                    "a call's receive is launched before the next call's send",
                    f"put a hook before {step.point}",
                    pending=f"{pending[0]} of ubatch {pending[1]}",
                    send=f"{step.point} of ubatch {step.ubatch}",
                    layer=step.layer,
                )
            pending = RECV_OF[step.point], step.ubatch
        elif step.point in RECV_OF.values():
            pending = None


def _check_two_results_held(schedule: Schedule, run: RingRun) -> None:
    """Call k+2 reuses call k's buffer, so call k's result is used up before that send: at most two are held."""
    experts = {(s.ubatch, s.layer): i for i, s in enumerate(run.steps) if s.point == "MLP"}
    calls = [(i, s) for i, s in enumerate(run.steps) if s.point in RECV_OF]
    for (_, call), (reuse, by) in zip(calls, calls[2:], strict=False):
        if call.point == "D.send":
            free = experts[call.ubatch, call.layer]
        else:
            free = run.taken["C.recv", call.ubatch, call.layer]
        if free > reuse:
            _refuse(
                schedule,
                "at most two results are held",
                "take the result earlier, or send later",
                held=f"{call.point} of ubatch {call.ubatch}",
                overwritten_by=f"{by.point} of ubatch {by.ubatch}",
                layer=by.layer,
            )
