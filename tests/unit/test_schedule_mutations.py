"""A changed text is refused, or it changes what runs: nothing in a schedule is decoration."""

import pytest

from dbo.errors import ScheduleError
from dbo.schedule import RunRecvHook, presets, validate
from dbo.schedule.ring import run_ring
from dbo.schedule.text import item_text, parse_schedule

CASES = [(s.name, b) for s in presets().values() for b in ("deepep_low_latency", "nccl") if b in s.backends]


def text_of(schedule, backend, items):
    lines = ["schedule m", f"backends {backend}", f"yields {schedule.yields_per_layer}", f"offset {schedule.offset}"]
    return "\n".join([*lines, "layer " + " ".join(item_text(item) for item in items)])


def effect(text, backend):
    """What a text makes happen, or None where it is refused."""
    try:
        schedule = parse_schedule(text)
        validate(schedule, backend=backend, num_ubatches=2)
    except ScheduleError:
        return None
    run = run_ring(schedule, backend=backend)
    return run.steps, dict(run.taken)


def mutations(items):
    for i in range(len(items)):
        yield f"drop {i}", items[:i] + items[i + 1 :]
    for i in range(len(items) - 1):
        if items[i] != items[i + 1]:
            yield f"swap {i}", (*items[:i], items[i + 1], items[i], *items[i + 2 :])


@pytest.mark.parametrize(("name", "backend"), CASES, ids=["-".join(case) for case in CASES])
def test_every_small_change_is_refused_or_changes_the_run(name, backend):
    schedule = presets()[name]
    items = schedule.program(backend).items
    original = effect(text_of(schedule, backend, items), backend)
    assert original is not None
    outcomes = {what: effect(text_of(schedule, backend, changed), backend) for what, changed in mutations(items)}
    assert [what for what, outcome in outcomes.items() if outcome == original] == []
    assert None in outcomes.values()
    assert any(outcome not in (None, original) for outcome in outcomes.values())


@pytest.mark.parametrize(("name", "backend"), CASES, ids=["-".join(case) for case in CASES])
def test_dropping_any_yield_or_hook_of_low_latency_is_refused(name, backend):
    schedule = presets()[name]
    items = schedule.program(backend).items
    for i, item in enumerate(items):
        if item_text(item) == "|" or item == RunRecvHook():
            assert effect(text_of(schedule, backend, items[:i] + items[i + 1 :]), backend) is None


def test_moving_the_shared_expert_moves_it_in_the_order():
    before = "schedule t\nbackends nccl\nlayer A0 A1 D.send@comm | D.recv MLP C.send@comm S | C.recv"
    after = before.replace(" S |", " |").replace("D.send@comm |", "D.send@comm S |")
    layers = []
    for text in (before, after):
        steps = run_ring(parse_schedule(text), layers=1).steps
        layers.append([s.point for s in steps if s.ubatch == 0])
    assert layers[0].index("S") > layers[0].index("C.send")
    assert layers[1].index("S") == layers[1].index("D.send") + 1
