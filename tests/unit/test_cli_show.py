"""`dbo show`: the window of a layer, its rows in text, its picture, its Chrome trace, and what is refused."""

from __future__ import annotations

import json
import sys

import pytest

from dbo.cli.dispatch import main
from dbo.errors import UsageError
from dbo.export.chrome import read_trace, write_trace
from dbo.export.window import window
from dbo.job.layer import LayerJob, layer_program
from dbo.schedule import load_schedule
from dbo.trace import Record, Trace
from sim.world import launch

LAYERS = 3


def _run(backend: str = "deepep_low_latency", layers: int = LAYERS) -> Trace:
    job = LayerJob(schedule=load_schedule("mlp_shared_overlap"), backend=backend, ranks=2, layers=layers)
    trace = launch(layer_program(job), ranks=2, mode="ordering").trace
    trace.meta |= {"backend": backend, "schedule": "schedule mlp_shared_overlap\n", "ubatches": 2, "seed": 0}
    return trace


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_trace(_run(), tmp_path_factory.mktemp("show") / "trace.json"))


def _by_hand(*records: tuple[str, str, str, int, int, float, float]) -> Trace:
    """(line, kind, point, ubatch, layer, start, end) of rank 0 in step 0."""
    trace = Trace(meta={"complete": True})
    for id, (line, kind, point, ubatch, layer, start, end) in enumerate(records):
        trace.records.append(
            Record(id, 0, line, kind, kind, start, end - start, step=0, layer=layer, ubatch=ubatch, point=point)
        )
    return trace


def test_a_window_holds_what_happens_while_the_layer_does() -> None:
    trace = _by_hand(
        ("compute", "op", "A1", 0, 0, 0, 4),
        ("comm", "exchange", "D.send", 1, 0, 2, 12),
        ("compute", "op", "MLP", 0, 0, 6, 9),
        ("compute", "op", "MLP", 1, 1, 30, 31),
    )
    shown = window(trace, rank=0, step=0, layer=0)
    assert [(b.label, b.start_us, b.end_us) for b in shown.comp] == [("A1₀", 0, 4), ("MLP₀", 6, 9)]
    assert [[b.label for b in row] for row in shown.comm] == [["D₁"]]
    assert shown.exposed == ((4, 6), (9, 12))
    assert shown.hidden_share == pytest.approx(0.5)


def test_halves_of_an_exchange_on_the_compute_stream_hide_nothing() -> None:
    trace = _by_hand(("compute", "recv", "D.recv", 1, 0, 0, 4), ("net", "transfer", "C.send", 0, 0, 0, 4))
    shown = window(trace, step=0, layer=0)
    assert shown.hidden_share == 0 and [b.label for b in shown.comp] == ["D₁.recv"]


def test_exchanges_at_the_same_time_take_a_row_each() -> None:
    trace = _by_hand(
        ("compute", "op", "A0", 0, 0, 0, 9),
        ("comm", "exchange", "D.send", 0, 0, 1, 5),
        ("net", "transfer", "C.send", 1, 0, 3, 8),
        ("comm", "exchange", "D.send", 0, 0, 5, 6),
    )
    rows = window(trace, step=0, layer=0).comm
    assert [[(b.label, b.start_us, b.end_us) for b in row] for row in rows] == [[("D₀", 1, 6)], [("C₁", 3, 8)]]


def test_a_steady_layer_is_the_default_and_any_other_can_be_asked_for() -> None:
    trace = _run()
    assert window(trace).layer == 1
    assert window(trace, layer=2).layer == 2
    assert window(trace, rank=1, step=0, layer=0).rank == 1


def test_the_only_layer_of_a_run_is_shown_too() -> None:
    assert window(_run(layers=1)).layer == 0


@pytest.mark.parametrize("asked", [{"rank": 7}, {"step": 9}, {"layer": LAYERS}])
def test_what_the_trace_does_not_have_is_refused_with_what_it_has(asked: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"ranks 0 to 1; of rank"):
        window(_run(), **asked)


def test_the_text_shows_who_computes_while_who_communicates(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", path]) == 0
    title, _, comp, comm, *rest = capsys.readouterr().out.splitlines()
    assert title.startswith("rank 0, step 0, layer 1 · deepep_low_latency · mlp_shared_overlap · ")
    assert comp.startswith("Comp |") and comm.startswith("Comm ")
    # The dispatch of ubatch 0 stands under the attention of ubatch 1.
    dispatch = comm.index("D₀")
    assert comp.index("A0₁") < dispatch < comp.index("D₀.recv")
    assert any("₀ is ubatch 0, ₁ is ubatch 1" in line for line in rest)


def test_text_adds_the_list_of_the_step(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", path, "--text", "--rank", "1"]) == 0
    out = capsys.readouterr().out
    assert "main" in out and "u0" in out and "compute" in out and "dispatch.send u0 L1" in out


def test_json_has_the_same_bars(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", path, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    shown = window(read_trace(path))
    assert [bar["label"] for bar in data["comp"]] == [bar.label for bar in shown.comp]
    assert data["hidden_share"] == pytest.approx(shown.hidden_share)


def test_chrome_writes_a_file_that_both_readers_take(path: str, tmp_path) -> None:
    target = tmp_path / "chrome.json"
    assert main(["show", path, "--chrome", str(target)]) == 0
    assert read_trace(target) == read_trace(path)
    assert json.loads(target.read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize("target", ["{folder}/no/a.json", "/dev/full", "", "{folder}", "{folder}/" + "x" * 300])
def test_a_chrome_file_that_cannot_be_written_is_refused(
    path: str, tmp_path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert main(["show", path, "--chrome", target.format(folder=tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dbo: a trace is written to a folder that exists: chrome=")
    assert line.endswith("; name another file")


def test_png_draws_a_picture(path: str, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    target = tmp_path / "layer.png"
    assert main(["show", path, "--png", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 5_000
    assert main(["show", path, "--png", str(tmp_path / "no" / "folder.png")]) == 2


def test_png_without_matplotlib_says_what_to_install(
    path: str, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["show", path, "--png", str(tmp_path / "layer.png")]) == 3
    assert "dual-batch-overlap[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere.json"],
        ["{path}", "--rank", "-1"],
        ["{path}", "--layer", "99"],
        ["{path}", "--png", "a", "--chrome", "b"],
    ],
)
def test_bad_input_is_exit_code_2(path: str, arguments: list[str]) -> None:
    assert main(["show", *(a.format(path=path) for a in arguments)]) == 2
