"""Each rule of the validator refuses its own fault; what it accepts passes an independent model of the buffers."""

import random
from dataclasses import replace

import pytest

from dbo.errors import ScheduleError
from dbo.schedule import (
    LayerProgram,
    Point,
    RunRecvHook,
    Schedule,
    Yield,
    load_schedule,
    parse_schedule,
    presets,
    ring_order,
    validate,
)
from dbo.schedule.ring import run_ring

EVERY_PRESET = [(s.name, b) for s in presets().values() for b in s.backends]


def layer(items, backend="deepep_low_latency", head=""):
    return parse_schedule(f"schedule t\nbackends {backend}\n{head}\nlayer {items}")


@pytest.mark.parametrize(("name", "backend"), EVERY_PRESET, ids=["-".join(case) for case in EVERY_PRESET])
def test_every_preset_is_valid_for_every_backend_it_declares(name, backend):
    assert validate(load_schedule(name), backend=backend, num_ubatches=2) is None


@pytest.mark.parametrize("name", [s.name for s in presets().values() if s.offset == 0])
def test_three_ubatches_where_the_backend_allows(name):
    assert validate(load_schedule(name), backend="nccl", num_ubatches=3) is None


NCCL = "A0 A1 D.send@comm | D.recv MLP C.send@comm S | C.recv"
LOW_LATENCY = "A0 A1 hook D.send | D.recv MLP hook C.send S | C.recv"
REFUSED = {
    "unknown backend": (lambda: layer(NCCL, "nccl"), "gloo", 2, r"backend is known.*backend=gloo; use one of"),
    "another's backend": (lambda: layer(NCCL, "nccl"), "symm_copy", 2, r"declares.*backend=symm_copy; use one of nccl"),
    "one ubatch": (lambda: layer(NCCL, "nccl"), "nccl", 1, r"num_ubatches=1"),
    "three on low latency": (lambda: layer(LOW_LATENCY), "deepep_low_latency", 3, r"num_ubatches=3; use 2 ubatches"),
    "shared before attention": (
        lambda: layer("A0 S A1 hook D.send | D.recv MLP hook C.send | C.recv"),
        "deepep_low_latency",
        2,
        r"consumer=S, producer=A1",
    ),
    "experts before their rows": (
        lambda: layer("A0 A1 D.send@comm | MLP D.recv C.send@comm S | C.recv", "nccl"),
        "nccl",
        2,
        r"consumer=MLP, producer=D\.recv",
    ),
    "copy before the result": (
        lambda: layer("A0 A1 | D.send@comm D.recv MLP | C.send@comm S copy@comm C.recv@comm |", "nccl"),
        "nccl",
        2,
        r"consumer=copy, producer=C\.recv",
    ),
    "more than a wait carried": (
        lambda: layer("S C.recv A0 A1 D.send@comm | D.recv MLP C.send@comm |", "nccl"),
        "nccl",
        2,
        r"carried into the next layer.*point=S",
    ),
    "yields not as declared": (lambda: layer(NCCL, "nccl", "yields 3"), "nccl", 2, r"declared=3, yields=2"),
    "no yield": (lambda: layer(NCCL.replace("|", ""), "nccl"), "nccl", 2, r"ever hands over.*yields=0"),
    "offset of a layer": (lambda: layer(NCCL, "nccl", "offset 2"), "nccl", 2, r"offset=2, yields=2"),
    "attention on comm": (
        lambda: layer(NCCL.replace("A1", "A1@comm"), "nccl"),
        "nccl",
        2,
        r"compute stream.*point=A1, stream=comm",
    ),
    "send on compute": (
        lambda: layer(NCCL.replace("C.send@comm", "C.send"), "nccl"),
        "nccl",
        2,
        r"all ranks see one order.*point=C\.send, stream=compute",
    ),
    "low latency on comm": (
        lambda: layer(LOW_LATENCY.replace("D.send", "D.send@comm")),
        "deepep_low_latency",
        2,
        r"everything on the compute stream.*point=D\.send",
    ),
    "low latency without hooks": (
        lambda: layer(LOW_LATENCY.replace("hook", "")),
        "deepep_low_latency",
        2,
        r"place to run them.*hooks=0",
    ),
    "no yield between send and take": (
        lambda: layer("A0 A1 hook D.send D.recv | MLP hook C.send S | C.recv"),
        "deepep_low_latency",
        2,
        r"peer runs a receive hook.*point=D\.recv",
    ),
    "hook before D.send missing": (
        lambda: layer("A0 A1 D.send | hook D.recv MLP hook C.send S | C.recv"),
        "deepep_low_latency",
        2,
        r"peer runs a receive hook|before the next call's send",
    ),
    "hook behind the send": (
        lambda: layer("A0 A1 D.send hook | D.recv MLP C.send hook S | C.recv"),
        "deepep_low_latency",
        2,
        r"before the next call's send: .*pending=D\.recv of ubatch 0, send=D\.send of ubatch 1, layer=0; put a hook",
    ),
    "a third result": (
        lambda: layer("A0 A1 hook D.send | hook | hook D.recv MLP S C.send | C.recv", head="offset 1"),
        "deepep_low_latency",
        2,
        r"at most two results are held.*held=D\.send of ubatch",
    ),
    "a combined result taken late": (
        lambda: layer("hook A0 | A1 hook D.send | D.recv MLP C.send | hook | S hook C.recv", head="offset 1"),
        "deepep_low_latency",
        2,
        r"at most two results are held.*held=C\.send of ubatch 0, overwritten_by=C\.send of ubatch 1",
    ),
    "attention overtakes with an offset and three ubatches": (
        lambda: layer("A0 | | A1 D.send@comm S | D.recv MLP C.send@comm | C.recv", "nccl", "offset 3"),
        "nccl",
        3,
        r"A1 of a ubatch comes before.*offset=3",
    ),
    "unequal yields with an offset and three ubatches": (
        lambda: layer(NCCL, "nccl", "offset 1"),
        "nccl",
        3,
        r"all ubatches yield equally often.*offset=1, yields=\[1, 2, 1\]",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(fault):
    make, backend, num_ubatches, message = REFUSED[fault]
    with pytest.raises(ScheduleError, match=message):
        validate(make(), backend=backend, num_ubatches=num_ubatches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: [i for i in items if i != Point("S")], "point=S, times=0"),
        (lambda items: [*items, Point("S")], "point=S, times=2"),
        (lambda items: [*items, Point("copy"), Point("copy")], "point=copy, times=2"),
        (lambda items: [*items, Point("B0")], "point=B0"),
        (lambda items: [Point("A0", "copy"), *items[1:]], "point=A0, stream=copy"),
    ],
)
def test_a_schedule_built_in_code_is_checked_like_a_text(change, message):
    schedule = layer(LOW_LATENCY)
    program = LayerProgram(items=tuple(change(list(schedule.items))))
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule, programs=(program,)), backend="deepep_low_latency", num_ubatches=2)


def test_hooks_are_nothing_where_the_backend_has_none():
    plain, hooked = layer(NCCL, "nccl"), layer(NCCL.replace("|", "hook |"), "nccl")
    validate(hooked, backend="nccl", num_ubatches=2)
    assert ring_order(plain) == ring_order(hooked)


class Buffers:
    """The library's two receive buffers: call k is numbered over dispatch and combine and lives in buffer k mod 2."""

    def __init__(self):
        self.calls = 0
        self.arriving = None
        self.held = {}

    def send(self, ubatch, kind):
        buffer, other = self.calls % 2, 1 - self.calls % 2
        assert buffer not in self.held, "a held result is overwritten"
        assert self.arriving != other, "flags of a call that has not been received are cleared"
        self.arriving, self.owner = buffer, (ubatch, kind)
        self.calls += 1

    def receive(self, ubatch, kind):
        assert self.owner == (ubatch, kind)
        self.held[self.arriving] = (ubatch, kind)
        self.arriving = None

    def use(self, ubatch, kind):
        self.held = {buffer: result for buffer, result in self.held.items() if result != (ubatch, kind)}


def run_on_buffers(schedule, layers):
    buffers, run = Buffers(), run_ring(schedule, layers=layers)
    for index, step in enumerate(run.steps):
        for (point, ubatch, _), before in run.taken.items():
            if point == "C.recv" and before == index:
                buffers.use(ubatch, "C")
        kind, _, half = step.point.partition(".")
        if half:
            {"send": buffers.send, "recv": buffers.receive}[half](step.ubatch, kind)
        if step.point == "MLP":
            buffers.use(step.ubatch, "D")
    return buffers


def random_schedule(rng):
    names = ["A0", "A1", "D.send", "D.recv", "MLP", "C.send", "C.recv"]
    names.insert(rng.randrange(2, 8), "S")
    items = [Point(name) for name in names]
    # Near the shapes that work, so that many are accepted: a yield behind each send.
    for name in ("D.send", "C.send"):
        items.insert(items.index(Point(name)) + rng.randrange(1, 3), Yield())
    for _ in range(rng.randrange(3)):
        items.insert(rng.randrange(1, len(items) + 1), Yield())
    for _ in range(rng.randrange(1, 5)):
        items.insert(rng.randrange(len(items) + 1), RunRecvHook())
    offset = rng.randrange(2)
    return Schedule(
        name="r", backends=("deepep_low_latency",), programs=(LayerProgram(items=tuple(items)),), offset=offset
    )


def test_accepted_low_latency_schedules_never_break_the_buffers():
    rng = random.Random(7)
    accepted = 0
    for _ in range(3000):
        schedule = random_schedule(rng)
        try:
            validate(schedule, backend="deepep_low_latency", num_ubatches=2)
        except ScheduleError:
            continue
        accepted += 1
        assert run_on_buffers(schedule, layers=5).calls == 20
    assert accepted >= 30


def test_the_buffers_notice_what_the_validator_refuses():
    with pytest.raises(AssertionError, match="flags"):
        run_on_buffers(REFUSED["hook behind the send"][0](), layers=3)
    with pytest.raises(AssertionError, match="overwritten"):
        run_on_buffers(REFUSED["a third result"][0](), layers=3)
