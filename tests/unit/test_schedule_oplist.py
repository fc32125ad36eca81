"""Lists of operations with yield markers become schedules; what does not fit is refused in its place."""

from __future__ import annotations

import pytest

from dbo.errors import ScheduleSyntaxError, UsageError
from dbo.schedule import load_schedule, ring_order, validate
from dbo.schedule.oplist import parse_operations

DECODE = """
# two-batch overlap, decode
offset 2
[
    layer.op_comm_prepare_attn,
    layer.self_attn.op_prepare,
    operations.YieldOperation(),
    layer.self_attn.op_core,
    layer.op_comm_prepare_mlp,
    layer.mlp.op_gate,
    operations.YieldOperation(),
    layer.mlp.op_select_experts,
    layer.mlp.op_dispatch_a,
    layer.mlp.op_shared_experts,
    operations.YieldOperation(),
    layer.mlp.op_dispatch_b,
    layer.mlp.op_experts,
    layer.mlp.op_combine_a,
    operations.YieldOperation(),
    layer.mlp.op_combine_b,
    operations.YieldOperation(),
    layer.mlp.op_output,
    layer.op_comm_postprocess_layer,
]
"""
SHORT = (
    '"attn_prepare", "attn_core", "gate", "dispatch_a", YIELD, "dispatch_b", "experts", "combine_a", "shared_experts"'
)


@pytest.mark.parametrize("backend", ["nccl", "deepep_low_latency", "deepep_high_throughput"])
def test_a_decode_list_is_the_preset_of_that_order(backend: str) -> None:
    imported = parse_operations(DECODE, name="decode")
    preset = load_schedule("sglang_decode")
    assert imported.offset == 2 and imported.yields_per_layer == 5
    assert ring_order(imported, backend=backend, layers=3) == ring_order(preset, backend=backend, layers=3)
    validate(imported, backend=backend, num_ubatches=2)


@pytest.mark.parametrize("marker", ["|", "yield", "YIELD", "YieldOperation()", "ops.YieldOperation()"])
def test_every_spelling_of_a_yield_is_read(marker: str) -> None:
    text = SHORT.replace("YIELD", marker) + f"\n{marker}\ncombine_b"
    assert parse_operations(text, name="s", backends=["nccl"]).yields_per_layer == 2


def test_one_operation_a_line_and_a_whole_list_in_one_line_are_the_same() -> None:
    line = SHORT + ", YIELD, combine_b"
    lines = "\n".join(part.strip().strip('"') for part in line.split(","))
    assert parse_operations(line, name="s") == parse_operations(lines, name="s")


def test_hooks_stand_before_sends_and_yields_where_the_backend_has_them() -> None:
    schedule = parse_operations(SHORT + ", YIELD, combine_b", name="s")
    text = " ".join(_word(item) for item in schedule.program("deepep_low_latency").items)
    assert text == "A0 A1 hook D.send | D.recv MLP hook C.send S | C.recv"
    text = " ".join(_word(item) for item in schedule.program("nccl").items)
    assert text == "A0 A1 D.send@comm | D.recv MLP C.send@comm S | C.recv"


def _word(item: object) -> str:
    name, stream = getattr(item, "name", ""), getattr(item, "stream", "")
    return (
        name + ("@comm" if stream == "comm" else "")
        if name
        else {"Yield": "|", "RunRecvHook": "hook"}[type(item).__name__]
    )


def test_aliases_come_from_the_text_the_caller_and_the_table_in_this_order() -> None:
    text = SHORT.replace("experts", "moe", 1) + ", YIELD, combine_b"
    with pytest.raises(ScheduleSyntaxError, match="operation='moe'"):
        parse_operations(text, name="s")
    called = parse_operations(text, name="s", aliases={"moe": "MLP"})
    written = parse_operations("alias moe = MLP\n" + text, name="s", aliases={"moe": "-"})
    assert called == written


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (SHORT + "\nmixer", (2, 1), "operation='mixer'"),
        (SHORT + "\n  YIELD core", (2, 9), "point=A1"),
        ("alias moe = EXPERTS\n" + SHORT, (1, 13), "point='EXPERTS'"),
        (SHORT + "\nYIELD  # the receive is missing", (2, 6), "missing=C.recv"),
        (SHORT + "\ncombine_b ; output", (2, 11), "text=';'"),
        ("", (1, 1), "missing=A0"),
    ],
)
def test_an_error_names_its_line_and_column(text: str, place: tuple[int, int], words: str) -> None:
    with pytest.raises(ScheduleSyntaxError) as refused:
        parse_operations(text, name="s", source="ops.txt")
    assert (refused.value.line, refused.value.column) == place
    assert words in str(refused.value) and str(refused.value).startswith(f"ops.txt:{place[0]}:{place[1]}: ")


def test_unknown_backends_and_points_of_the_caller_are_refused() -> None:
    with pytest.raises(UsageError, match="backend=smoke"):
        parse_operations(SHORT, name="s", backends=["smoke"])
    with pytest.raises(UsageError, match="point=EXPERTS"):
        parse_operations(SHORT, name="s", aliases={"moe": "EXPERTS"})


def test_a_file_of_operations_is_loaded_by_its_name(tmp_path) -> None:
    path = tmp_path / "mine.ops"
    path.write_text(DECODE, encoding="utf-8")
    schedule = load_schedule(path)
    assert schedule.name == "mine" and schedule.offset == 2
    path.write_text("nonsense", encoding="utf-8")
    with pytest.raises(ScheduleSyntaxError, match=r"mine\.ops:1:1"):
        load_schedule(path)
