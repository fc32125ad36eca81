"""The seed's two forms: the Order line and the Comp and Comm rows, printed, parsed, and back again."""

import pytest

from dbo.errors import ScheduleError
from dbo.schedule import drawing, load_schedule, order_line, parse_schedule, presets, ring_order, validate

SEED_DRAWING = """\
Comp: |-A0₀-A1₀-||-MLP₁-||-S₁-MLP₀-||-S₀-A0₁-A1₁-|
Comm: |----D₁---||--D₀--||----C₁---||-----C₀-----|"""
SEED_ORDER = """\
Order: D₁ send, A0₀, A1₀, D₁ recv, D₀ send, MLP₁, D₀ recv,
       C₁ send, S₁, MLP₀, C₁ recv, C₀ send, S₀, A0₁, A1₁, C₀ recv."""
ASCII_DRAWING = """\
comp |-A0_0-A1_0-||-MLP1-||-S1-MLP0-||-S0-A0_1-A1_1-|
comm |----D1-----||--D0--||----C1---||------C0------|"""
LOW_LATENCY = "A0 A1 hook D.send | D.recv MLP hook C.send S | C.recv"
HEAD = "schedule seed\nbackends deepep_low_latency\n"

EVERY_FORM = [(s.name, b) for s in presets().values() for b in ("deepep_low_latency", "nccl") if b in s.backends]


@pytest.mark.parametrize(
    "form",
    [SEED_DRAWING, SEED_ORDER, SEED_DRAWING + "\n" + SEED_ORDER, ASCII_DRAWING, ASCII_DRAWING + "\n" + SEED_ORDER],
    ids=["drawing", "order", "both", "ascii", "mixed"],
)
def test_the_seeds_forms_are_the_preset(form):
    parsed = parse_schedule(HEAD + form)
    assert parsed == parse_schedule(HEAD + "layer " + LOW_LATENCY)
    assert ring_order(parsed) == ring_order(load_schedule("mlp_shared_overlap"), backend="deepep_low_latency")
    validate(parsed, backend="deepep_low_latency", num_ubatches=2)


def test_the_bare_drawing_of_the_seed_parses_without_a_head():
    parsed = parse_schedule(SEED_DRAWING + "\n" + SEED_ORDER, name="seed", backends=["deepep_low_latency"])
    assert parsed == parse_schedule(HEAD + SEED_ORDER)


def test_a_drawing_and_an_order_that_differ_are_refused():
    other = SEED_ORDER.replace("C₁ send, S₁", "S₁, C₁ send").replace("C₀ send, S₀", "S₀, C₀ send")
    with pytest.raises(ScheduleError, match=r":5:1: drawing and order agree"):
        parse_schedule(HEAD + SEED_DRAWING + "\n" + other)


def test_the_seeds_forms_print_letter_by_letter():
    schedule = load_schedule("mlp_shared_overlap")
    assert drawing(schedule, leader=1) == SEED_DRAWING
    wrapped = " ".join(SEED_ORDER.split()).removeprefix("Order: ").removesuffix(".")
    assert order_line(schedule, leader=1, pretty=True) == wrapped
    assert drawing(schedule, leader=1, pretty=False).splitlines()[0] == "Comp: " + ASCII_DRAWING.splitlines()[0][5:]


@pytest.mark.parametrize("pretty", [False, True])
@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize(("name", "backend"), EVERY_FORM, ids=["-".join(case) for case in EVERY_FORM])
def test_an_order_line_parses_back_to_the_program(name, backend, leader, pretty):
    schedule = load_schedule(name)
    line = order_line(schedule, backend=backend, leader=leader, pretty=pretty)
    parsed = parse_schedule(f"schedule t\nbackends {backend}\norder {line}")
    assert order_line(parsed, leader=leader, pretty=pretty) == line
    if (name, backend) == ("sglang_decode", "deepep_low_latency"):
        # Its last run only takes a result that the peer's hook received: a run without points, which no line shows.
        assert (parsed.yields_per_layer, parsed.offset) == (3, 1)
        return
    assert (parsed.items, parsed.offset) == (schedule.program(backend).folded, schedule.offset)


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nccl"])
@pytest.mark.parametrize("num_ubatches", [3, 4])
def test_an_order_of_more_ubatches_parses_back(num_ubatches, backend):
    schedule = load_schedule("mlp_shared_overlap")
    line = order_line(schedule, backend=backend, num_ubatches=num_ubatches, leader=1)
    parsed = parse_schedule(f"schedule t\nbackends {backend}\norder {line}")
    assert (parsed.items, parsed.offset) == (schedule.program(backend).items, 0)


def test_a_hook_at_the_end_of_a_run_stays_in_it():
    head = "schedule t\nbackends deepep_low_latency\n"
    schedule = parse_schedule(head + "layer A0 A1 D.send hook | D.recv MLP C.send hook | C.recv S")
    line = order_line(schedule, num_ubatches=3)
    assert "D1.send D0.recv S2" in line
    assert parse_schedule(f"{head}order {line}") == schedule


def test_no_point_is_lost_when_two_results_are_taken_at_once():
    line = "D0.send MLP0 C0.send S0 A0_1 A1_1 D0.recv C0.recv D1.send MLP1 C1.send S1 A0_0 A1_0 D1.recv C1.recv"
    parsed = parse_schedule(f"schedule t\nbackends deepep_low_latency\norder {line}")
    assert sorted(parsed.order()) == sorted(["A0", "A1", "D.send", "D.recv", "MLP", "C.send", "C.recv", "S"])
    with pytest.raises(ScheduleError, match=r"producer=D\.recv"):
        validate(parsed, backend="deepep_low_latency", num_ubatches=2)


def test_an_order_with_two_offsets_is_refused():
    text = "schedule t\nbackends nccl\n{}layer A0 | A1 D.send@comm S | D.recv MLP C.send@comm | C.recv"
    line = order_line(parse_schedule(text.format("offset 1\n")), num_ubatches=3)
    with pytest.raises(ScheduleError, match=r":3:7: one offset lies between neighbours: offsets=\[1, 0\]"):
        parse_schedule(f"schedule t\nbackends nccl\norder {line}")


DRAWABLE = [
    ("mlp_shared_overlap", "deepep_low_latency"),
    ("lightllm_decode", "deepep_low_latency"),
    ("deepseek_five_stage", "deepep_low_latency"),
    ("sglang_decode", "nccl"),
    ("vllm_high_throughput", "nccl"),
]
NOT_DRAWABLE = sorted({*EVERY_FORM} - {*DRAWABLE, ("sglang_decode", "deepep_low_latency")})


@pytest.mark.parametrize(("name", "backend"), DRAWABLE, ids=["-".join(case) for case in DRAWABLE])
def test_a_drawing_parses_back_to_the_program(name, backend):
    schedule = load_schedule(name)
    for leader in (0, 1):
        parsed = parse_schedule(f"schedule t\nbackends {backend}\n" + drawing(schedule, backend=backend, leader=leader))
        assert (parsed.items, parsed.offset) == (schedule.program(backend).folded, schedule.offset)


def test_the_forms_of_sglang_decode_draw_the_same():
    schedule = load_schedule("sglang_decode")
    assert drawing(schedule, backend="deepep_low_latency") == drawing(schedule, backend="nccl")


def test_five_stages_drawn():
    assert drawing(load_schedule("deepseek_five_stage"), leader=1).splitlines() == [
        "Comp: |-S₁-A0₀-||-MLP₁-||-A1₀-||-S₀-A0₁-||-MLP₀-||-A1₁-|",
        "Comm: |---D₁---||------||--C₁-||---D₀---||------||--C₀-|",
    ]


@pytest.mark.parametrize(("name", "backend"), NOT_DRAWABLE, ids=["-".join(case) for case in NOT_DRAWABLE])
def test_two_exchanges_at_once_are_not_drawn(name, backend):
    schedule = load_schedule(name)
    with pytest.raises(ScheduleError, match="one exchange at a time.*print the order line"):
        drawing(schedule, backend=backend)
