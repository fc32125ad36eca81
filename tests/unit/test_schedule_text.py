"""The file form: what parses, what prints back, and where exactly a text is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo.errors import ScheduleError, ScheduleSyntaxError
from dbo.schedule import (
    BACKENDS,
    LayerProgram,
    Point,
    RunRecvHook,
    Schedule,
    Yield,
    load_schedule,
    parse_schedule,
    presets,
    to_text,
)
from dbo.schedule.model import OPTIONAL_POINTS, REQUIRED_POINTS

GOOD = """\
# comment
schedule mine
description two  words   # and a comment
alias other another
backends deepep_low_latency nccl symm_copy
yields 2
layer[deepep_low_latency] A0 A1 hook D.send | D.recv MLP
      hook C.send S | C.recv
layer A0 A1 D.send@comm | D.recv MLP C.send@comm S | C.recv
"""


def test_a_text_parses_into_values():
    schedule = parse_schedule(GOOD)
    assert (schedule.name, schedule.aliases, schedule.description) == ("mine", ("other", "another"), "two words")
    assert schedule.backends == ("deepep_low_latency", "nccl", "symm_copy")
    assert schedule.items == (
        Point("A0"),
        Point("A1"),
        RunRecvHook(),
        Point("D.send"),
        Yield(),
        Point("D.recv"),
        Point("MLP"),
        RunRecvHook(),
        Point("C.send"),
        Point("S"),
        Yield(),
        Point("C.recv"),
    )
    assert schedule.program("symm_copy").items[2] == Point("D.send", "comm")
    assert (schedule.hooks, schedule.yields_per_layer, schedule.offset) == (True, 2, 0)


@pytest.mark.parametrize("name", presets())
def test_presets_print_and_parse_back(name):
    schedule = presets()[name]
    assert parse_schedule(to_text(schedule)) == schedule


@st.composite
def schedules(draw):
    backends = draw(st.lists(st.sampled_from(BACKENDS), min_size=1, unique=True))
    named = draw(st.integers(0, len(backends)))
    keys = [(backend,) for backend in backends[:named]] + ([()] if named < len(backends) else [])
    points = st.sampled_from([*OPTIONAL_POINTS, None]).map(
        lambda extra: [*REQUIRED_POINTS, *([extra] if extra else [])]
    )

    def program(key):
        names = draw(points.flatmap(st.permutations))
        items = [Point(name, draw(st.sampled_from(["compute", "comm"]))) for name in names]
        for item in draw(st.lists(st.sampled_from([Yield(), RunRecvHook()]), max_size=6)):
            items.insert(draw(st.integers(0, len(items))), item)
        return LayerProgram(items=tuple(items), backends=key)

    return Schedule(
        name="s",
        backends=tuple(backends),
        programs=tuple(program(key) for key in keys),
        offset=draw(st.integers(0, 3)),
        declared_yields=draw(st.none() | st.integers(0, 9)),
        aliases=tuple(draw(st.lists(st.sampled_from(["a", "b_2", "c-3"]), unique=True))),
        description=draw(st.sampled_from(["", "one", "one two: three"])),
    )


@given(schedules())
def test_any_schedule_prints_and_parses_back(schedule):
    assert parse_schedule(to_text(schedule)) == schedule


LAYER = "layer A0 A1 D.send@comm | D.recv MLP C.send@comm S | C.recv"
HEAD = "schedule t\nbackends nccl\n"
ORDER = "D1.send A0_0 A1_0 D1.recv D0.send MLP1 D0.recv C1.send S1 MLP0 C1.recv C0.send S0 A0_1 A1_1 C0.recv"
WRONG = {
    "unknown keyword": (HEAD + "lawyer A0\n", 3, 1, r"keyword='lawyer'; use one of schedule,"),
    "keyword of signs": ("=== t\n", 1, 1, r"keyword='==='"),
    "continuation of nothing": ("  schedule t\n", 1, 3, "none is above"),
    "keyword glued": ("schedule=t\n", 1, 9, r"text='=t'"),
    "keyword twice": ("schedule t\nschedule u\n", 2, 1, "keyword=schedule; drop one"),
    "bracket on a name": ("schedule[nccl] t\n", 1, 9, "keyword=schedule; drop them"),
    "no name": ("schedule\n", 1, 9, "needs a name"),
    "two names": ("schedule t u\n", 1, 12, "text='u'"),
    "nothing": ("", 1, 1, "schedule missing"),
    "no backends": ("schedule t\n" + LAYER, 2, 1, "backends missing"),
    "unknown backend": ("schedule t\nbackends nccl gloo\n", 2, 15, "backend='gloo'; use one of deepep_low_latency"),
    "unknown backend in brackets": (HEAD + "layer[nccl, gloo] A0", 3, 13, "backend='gloo'"),
    "empty brackets": (HEAD + "layer[] A0", 3, 7, "backend=''"),
    "undeclared backend": (HEAD + "layer[symm_copy] A0", 3, 7, "backend=symm_copy; add it to backends"),
    "backend in two programs": (
        "schedule t\nbackends nccl symm_copy\n" + LAYER.replace(" ", "[nccl] ", 1) + "\nlayer[symm_copy,nccl] A0",
        4,
        17,
        "backend=nccl; drop one",
    ),
    "two programs": (HEAD + LAYER + "\n" + LAYER, 4, 1, "keyword=layer; drop one"),
    "order and layer": (HEAD + LAYER + "\norder " + ORDER, 4, 1, "keyword=order; drop one"),
    "program of no backend": (
        HEAD + LAYER.replace(" ", "[nccl] ", 1) + "\n" + LAYER,
        4,
        1,
        "backends=nccl are in brackets; drop it",
    ),
    "backend without a program": (
        "schedule t\nbackends nccl symm_copy\n" + LAYER.replace(" ", "[nccl] ", 1),
        3,
        1,
        "missing=symm_copy; add a layer line",
    ),
    "no number": (HEAD + "yields many\n", 3, 8, "yields='many'; use digits"),
    "negative": (HEAD + LAYER + "\noffset -1\n", 4, 8, "offset='-1'"),
    "empty layer": (HEAD + "layer   # nothing", 3, 6, "layer needs points"),
    "unknown point": (HEAD + "layer A0 A2 D.send", 3, 10, "point='A2'; use A0 A1"),
    "unknown point below": (HEAD + "layer A0\n   A1 D", 4, 7, "point='D'"),
    "duplicate point": (HEAD + LAYER + " MLP", 3, 61, "point=MLP; drop one"),
    "missing point": (HEAD + LAYER.replace("S ", ""), 3, 58, "missing=S; add it"),
    "bad stream": (HEAD + LAYER.replace("D.send@comm", "D.send@side"), 3, 20, "stream='side'; use compute or comm"),
    "no stream": (HEAD + LAYER.replace("D.send@comm", "D.send@"), 3, 20, "stream=''"),
    "order: empty": (HEAD + "order", 3, 6, "order needs points"),
    "order: no index": (HEAD + "order D1.send, A0, A1_0", 3, 16, "text='A0'; write one of"),
    "order: no gap": (HEAD + "order D1.send MLP1S1", 3, 15, "text='MLP1S1'"),
    "order: no ubatch": (HEAD + "order D1.send MLP1234", 3, 15, "text='MLP1234'"),
    "order: no half": (HEAD + "order D1 A0_0", 3, 7, "point=D1; write its send and recv"),
    "order: twice": (HEAD + "order D1.send D1.send", 3, 15, "point=D1.send; drop one"),
    "order: one ubatch": (HEAD + "order D0.send MLP0", 3, 15, "ubatches=1; add the others"),
    "order: missing": (HEAD + "order " + ORDER.replace("S0 ", ""), 3, 96, "missing=S0; add it"),
    "order: rotated": (HEAD + "order C0.recv " + ORDER.replace(" C0.recv", ""), 3, 7, "first=C0.recv; rotate it"),
    "order: no common program": (
        HEAD + "order " + ORDER.replace("S0 A0_1", "A0_1 S0"),
        3,
        7,
        "ubatches follow one program: ubatch=0; make it do what the leader, 1, does",
    ),
    "order: hook at home": (
        HEAD.replace("nccl", "deepep_low_latency")
        + "order "
        + ORDER.replace("MLP1 D0.recv", "MLP1").replace("MLP0 C1.recv", "MLP0 D0.recv C1.recv"),
        3,
        62,
        "point=D0.recv; move it into another ubatch's run",
    ),
    "order and offset": (
        HEAD.replace("nccl", "deepep_low_latency") + "offset 3\norder " + ORDER,
        3,
        1,
        "offset=3, order=0",
    ),
    "drawing: one row": (HEAD + "comp |-A0_0-|", 3, 1, "missing=comm"),
    "drawing: no bars": (HEAD + "comp -A0_0-\ncomm |---|", 3, 6, "row='-A0_0-'"),
    "drawing: empty": (HEAD + "comp |---|\ncomm |---|", 3, 6, "nothing drawn"),
    "drawing: columns": (HEAD + "comp |-A0_0-||-S0-|\ncomm |---|", 4, 6, "comp=2, comm=1; align them"),
    "drawing: D above": (HEAD + "comp |-A0_0-D1-|\ncomm |---|", 3, 13, "compute points only: point=D"),
    "drawing: S below": (HEAD + "comp |-A0_0-|\ncomm |--S1--|", 4, 9, "D and C only: point=S"),
    "drawing: two at once": (HEAD + "comp |-A0_0----|\ncomm |-D1--C0--|", 4, 12, "one exchange: point=C"),
    "drawing: continued": (HEAD + "comp |-A0_0-|\n  |-S0-|\ncomm |-D1--|", 4, 1, "row is one line"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_text_is_refused_at_its_place(fault):
    text, line, column, message = WRONG[fault]
    with pytest.raises(ScheduleSyntaxError, match=message) as caught:
        parse_schedule(text, source="file")
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(caught.value).startswith(f"file:{line}:{column}: ")


def test_a_file_is_loaded_by_path_and_its_faults_name_it(tmp_path):
    path = tmp_path / "mine.schedule"
    path.write_text(GOOD, encoding="utf-8")
    assert load_schedule(path) == load_schedule(str(path)) == parse_schedule(GOOD)
    path.write_text("schedule t\nfoo", encoding="utf-8")
    with pytest.raises(ScheduleSyntaxError, match=r"mine\.schedule:2:1: unknown keyword"):
        load_schedule(path)


def test_presets_are_found_by_name_and_alias():
    assert load_schedule("vllm_low_latency") is load_schedule("mlp_shared_overlap")
    assert sorted(presets()) == [
        "ascend_d0d1c0c1",
        "deepseek_five_stage",
        "lightllm_decode",
        "mlp_shared_overlap",
        "sglang_decode",
        "sglang_prefill",
        "vllm_high_throughput",
    ]


def test_an_unknown_name_lists_the_choices(tmp_path):
    with pytest.raises(ScheduleError, match="schedule=nothing_such; use one of") as caught:
        load_schedule("nothing_such")
    assert "vllm_low_latency" in str(caught.value) and "sglang_prefill" in str(caught.value)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="UnicodeDecodeError"):
        load_schedule(binary)
