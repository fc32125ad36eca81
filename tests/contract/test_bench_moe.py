"""`dbo bench moe` on real processes over gloo: right first, then timed; recordings are what they stand for."""

from __future__ import annotations

import gc
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dbo.contract.patience import Patience

torch = pytest.importorskip("torch", reason="torch is not installed (extra `torch`)")

import gpu.bench.moe  # noqa: E402
from dbo.bench.moe import MoEBench  # noqa: E402
from dbo.bench.moe_figures import LONG, VARIANTS  # noqa: E402
from dbo.bench.moe_shapes import SHAPES  # noqa: E402
from dbo.bench.moe_table import Measured  # noqa: E402
from dbo.errors import CaptureError, DBOError  # noqa: E402
from dbo.job.rank import make_prepare_finalize  # noqa: E402
from dbo.model.deepseek_v2 import DecoderLayer  # noqa: E402
from dbo.moe.interface import summed  # noqa: E402
from dbo.schedule import load_schedule  # noqa: E402
from dbo.ubatching.ring import dbo_current_ubatch_id  # noqa: E402
from dbo.ubatching.wrapper import UBatchWrapper  # noqa: E402
from gpu.bench import moe_works as works  # noqa: E402
from gpu.bench.moe import MoEProgram  # noqa: E402
from gpu.bench.moe_batch import RoutedBatch, draw_experts, lengths_of, plan_of  # noqa: E402
from gpu.bench.moe_stack import Layers, Runs, comm_sms  # noqa: E402
from gpu.bench.moe_works import LIMIT, Key, _captured, config_of, error_of, key_of  # noqa: E402
from gpu.world import launch  # noqa: E402
from tests.gpu.jobs import Wrapped  # noqa: E402

BENCH = MoEBench(
    device="cpu",
    ranks=2,
    shapes=("tiny",),
    tokens=(32,),
    backends=("nccl", "symm_copy"),
    layers=2,
    repeat=2,
    schedules=("mlp_shared_overlap",),
    prompt_tokens=16,
    context_tokens=24,
)
PATIENCE: dict[str, Any] = {"patience": Patience(stall_s=30.0), "timeout_s": 120.0}


def values_of(program: Any) -> list[Any]:
    run = launch(program, ranks=2, device="cpu", trace=False, **PATIENCE)
    assert run.errors == [None, None], run.errors
    return run.values


def test_every_backend_is_checked_and_timed_over_gloo(tmp_path) -> None:
    flags = "--device cpu --tokens 8 33 --backend nccl --backend deepep_low_latency --backend deepep_v2 --layers 2"
    flags += f" --schedule mlp_shared_overlap --prompt-tokens 16 --context-tokens 24 --repeat 2 --save {tmp_path / 's'}"
    command = [sys.executable, "-m", "dbo.cli", "bench", "moe", *shlex.split(flags), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data = json.loads(ran.stdout)
    rows: list[dict[str, Any]] = data["rows"]
    assert [(r["tokens"], r["backend"]) for r in rows] == [
        (33, "nccl"),
        (33, "deepep_low_latency"),
        (8, "nccl"),
        (8, "deepep_low_latency"),
    ]
    for found in rows:
        assert found["correct"] and found["bit_equal"] and found["limit"] == LIMIT
        assert {name: len(samples) for name, samples in found["samples_ms"].items()} == {
            name + ending: 2 for name in VARIANTS for ending in ("", LONG)
        }
    assert [r["what"] for r in rows[1:3]] == ["prefill, 3 requests, 16 keys", "decode, 8 requests, 24 keys"]
    assert len(data["skipped"]) == 2 and all("deepep_v2: NotAvailable" in name for name in data["skipped"])
    assert data["host_ratio"] > 0 and shlex.split(data["command"])[:3] == ["dbo", "bench", "moe"]
    assert len(data["verdicts"]) == 6 and "## tiny, 33 tokens a rank" in ran.stderr
    assert len(json.loads((tmp_path / "s").read_text())["rows"]) == 4


@dataclass(frozen=True)
class Recording:
    """What the recorded stack gives beside the real one, and after the real weights' exchange is gone."""

    backend: str

    def __call__(self, world: Any) -> dict[str, Any]:
        shape = SHAPES["tiny"]
        with torch.inference_mode():
            exchange = make_prepare_finalize(world, config_of(BENCH, self.backend, 32, "eager"), shape.config(1))
            wrapper = UBatchWrapper(
                None, world=world, schedule=load_schedule("mlp_shared_overlap"), backend=self.backend, moe_layers=()
            )
            batch = RoutedBatch(world, shape, 32, 3, prompt_tokens=16, context_tokens=24, seed=5)
            layers = Layers(world, shape, 3, seed=5)
            runs = Runs(world, wrapper, layers, batch, self.backend, exchange)
            other = Runs(world, wrapper, layers, batch, self.backend, exchange)
            runs.record(3)
            live, serial = runs.no_dbo(3), runs.serial(3)
            before = dict(world.counters)
            whole, halves = runs.compute(3), runs.compute_halves(3)
            silent = dict(world.counters) == before
            runs.comm(3)
            once = {name: n - before.get(name, 0) for name, n in world.counters.items() if n > before.get(name, 0)}
            runs.comm_halves(3)
            dbo, shorter = runs.dbo(3, load_schedule("mlp_shared_overlap")), runs.compute(2)
            refused = ""
            try:
                other.compute(1)
            except DBOError as error:
                refused = str(error)
        return {
            "whole": torch.equal(whole, live),
            "halves": torch.equal(halves, serial),
            "dbo": torch.equal(dbo, serial),
            "silent": silent,
            "exchanges": once,
            "refused": refused,
            "moved": error_of(live, batch.hidden),
            "two layers": torch.equal(shorter, live),
        }


@pytest.mark.parametrize("backend", ["nccl", "symm_copy", "deepep_low_latency"])
def test_a_recording_gives_the_same_numbers_and_sends_nothing(backend: str) -> None:
    for found in values_of(Recording(backend)):
        assert found["whole"] and found["halves"] and found["dbo"] and found["silent"]
        assert not found["two layers"] and found["moved"] > 0.5
        assert sum(found["exchanges"].values()) >= 6, "both halves of every layer are exchanged again"
        assert "a recording is made before it is played" in found["refused"]


class OneRowTwice(Wrapped):
    """Combine gives ubatch 1 its first row where the second belongs."""

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Any:
        receive = self.backend.finalize_async(expert_out, topk_weights, topk_ids)
        self.calls += 1
        if dbo_current_ubatch_id() != 1:
            return receive

        def wrong() -> Any:
            rows = summed(receive()).clone()
            rows[1] = rows[0]
            return rows

        return wrong


@dataclass(frozen=True)
class Planted:
    """The benchmark with the fault in one backend."""

    bench: MoEBench
    backend: str

    def __call__(self, world: Any) -> Measured:
        def make(world: Any, config: Any, model_config: Any) -> Any:
            made = make_prepare_finalize(world, config, model_config)
            return OneRowTwice(made) if config.all2all_backend == self.backend else made

        gpu.bench.moe.make_prepare_finalize = make
        program = MoEProgram(bench=self.bench, deadline=time.time() + 60, measured=Measured(machine=[]))
        return program(world)


def test_one_wrong_row_of_one_ubatch_is_seen_and_never_timed() -> None:
    measured = values_of(Planted(replace(BENCH, steady=False), "symm_copy"))[0]
    right, wrong = measured.rows
    assert (right.backend, wrong.backend) == ("nccl", "symm_copy")
    assert right.timed and right.correct and right.error < LIMIT / 2
    assert (
        not wrong.correct
        and not wrong.bit_equal
        and not wrong.samples_ms
        and wrong.note.startswith("wrong: not timed; dbo ")
    )


def test_what_has_no_time_left_is_named() -> None:
    program = MoEProgram(bench=BENCH, deadline=time.time() - 1, measured=Measured(machine=[]))
    measured = values_of(program)[0]
    assert measured.rows == [] and measured.skipped == ["tiny 32 eager: the budget is spent"]


@dataclass(frozen=True)
class Afterwards:
    """How many layers are still alive when the benchmark is done with them."""

    def __call__(self, world: Any) -> int:
        bench = replace(BENCH, backends=("symm_copy",), steady=False, repeat=1)
        program = MoEProgram(bench=bench, deadline=time.time() + 60, measured=Measured(machine=[]))
        with torch.inference_mode():
            rank = gpu.bench.moe._Rank(world, program)
            rank.run()
        assert len(rank.measured.rows) == 1
        gc.collect()
        return sum(isinstance(found, DecoderLayer) for found in gc.get_objects())


def test_a_batch_gives_its_memory_back() -> None:
    assert values_of(Afterwards()) == [0, 0]


def test_requests_are_prompts_or_decodes() -> None:
    assert lengths_of(40, prompt_tokens=16, context_tokens=9) == ([16, 16, 8], [16, 16, 8])
    assert lengths_of(3, prompt_tokens=16, context_tokens=9) == ([1, 1, 1], [9, 9, 9])
    plan = plan_of([1, 1], [130, 70], seed=0)
    assert plan.positions.tolist() == [129, 69] and plan.num_computed_tokens.tolist() == [129, 69]
    used = plan.block_table[plan.block_table > 0]
    assert sorted(used.tolist()) == [1, 2, 3, 4, 5]
    assert plan.slot_mapping.tolist() == [plan.block_table[0, 2] * 64 + 1, plan.block_table[1, 1] * 64 + 5]


def test_the_draw_of_experts_is_uniform_and_repeats_none() -> None:
    ids = draw_experts(4000, SHAPES["tiny"], seed=1)
    assert (ids[:, 0] != ids[:, 1]).all() and torch.equal(ids, draw_experts(4000, SHAPES["tiny"], seed=1))
    counts = ids.flatten().bincount(minlength=8)
    assert counts.min() > 900 and counts.max() < 1100


def test_errors_are_of_the_worst_row_and_never_lost() -> None:
    right = torch.ones(4, 8)
    assert error_of(right, right) == 0.0
    assert error_of(torch.cat((right[:3], 2 * right[:1])), right) == pytest.approx(1.0)
    assert error_of(torch.full_like(right, torch.nan), right) == 1e9


def test_works_are_shared_by_what_does_not_change_them() -> None:
    assert key_of("nccl", "compute" + LONG, 8, "s") == Key("nccl", "compute" + LONG)
    assert key_of("nccl", "comm", 8, "s") == Key("nccl", "comm", 8)
    assert key_of("nccl", "dbo", 8, "s") == Key("nccl", "dbo", 8, "s")


@dataclass(frozen=True)
class PlayedGraphs:
    """The benchmark in mode "graph", where a graph is the call itself; DBO over two layers cannot be captured."""

    def __call__(self, world: Any) -> Measured:
        class Graph:
            def __init__(self, name: str) -> None:
                self.name = name

            @contextmanager
            def capture(self) -> Any:
                if "dbo" in self.name and "mlp" in self.name:
                    raise CaptureError("a stream was left unjoined\nwith details")
                yield self

            def replay(self) -> None:
                pass

        world.new_graph = Graph
        bench = replace(BENCH, modes=("graph",), schedules=("mlp_shared_overlap", "sglang_prefill"), steady=False)
        return MoEProgram(bench=bench, deadline=time.time() + 60, measured=Measured(machine=[]))(world)


def test_what_cannot_be_captured_is_named_and_the_rest_is_timed() -> None:
    rows = values_of(PlayedGraphs())[0].rows
    assert [(r.backend, r.schedule, r.timed) for r in rows] == [
        (backend, schedule, schedule == "sglang_prefill")
        for backend in ("nccl", "symm_copy")
        for schedule in ("mlp_shared_overlap", "sglang_prefill")
    ]
    assert {r.note for r in rows} == {"", "not captured: CaptureError: a stream was left unjoined"}
    assert all(r.correct for r in rows)


class Passes:
    """As much of `Runs` as `prepare` asks for: what runs, and when all ranks meet, in `log`."""

    name, backend, world = "symm_copy", None, None

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any) -> torch.Tensor:
            self.log.append(name)
            return torch.ones(2, 2)

        return run


def test_no_pass_begins_while_a_peer_is_in_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of other sizes write where a peer may still read; nothing else keeps the ranks together there."""
    runs = Passes()
    monkeypatch.setattr(works, "meet", lambda world: runs.log.append("meet"))
    monkeypatch.setattr(works, "_agree", lambda world, found: None)
    found, _ = works.prepare(BENCH, runs, "eager", None)  # type: ignore[arg-type]
    assert runs.log[::2] == ["meet"] * (len(runs.log) // 2) and "meet" not in runs.log[1::2]
    assert runs.log[1:8:2] == ["record", "no_dbo", "no_dbo", "serial"] and len(runs.log) == 2 * (4 + len(found.calls))


class Library:
    """A buffer that remembers the SMs of its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def dispatch(self, x: Any, *, num_sms: int = 0) -> None:
        self.calls.append(num_sms)

    combine = dispatch


class Setting(Library):
    num_sms = 20

    def set_num_sms(self, new_num_sms: int) -> None:
        self.num_sms = new_num_sms


@dataclass
class Backend:
    buffer: Any
    comm_sms: int = 0


def test_sms_are_those_of_all_exchanges_inside_and_nobody_s_after() -> None:
    passed, setting = Backend(Library()), Backend(Setting())
    library = passed.buffer
    with comm_sms(passed, 8):
        passed.buffer.dispatch(None)
        passed.buffer.combine(None, num_sms=passed.comm_sms)
    passed.buffer.dispatch(None)
    assert library.calls == [8, 8, 0] and passed == Backend(library)
    with comm_sms(setting, 24):
        assert (setting.comm_sms, setting.buffer.num_sms) == (24, 24)
    assert (setting.comm_sms, setting.buffer.num_sms) == (0, 20)


class CapturingWorld:
    """As much of a world as a capture asks for; `refuses`: what the capture raises here. `peers`: what they say of theirs."""

    def __init__(self, *, refuses: Exception | None = None, peers: tuple[str, ...] = ("",)) -> None:
        self.played: list[str] = []
        self.refuses, self.peers = refuses, peers
        self.control = self.compute = self

    def all_gather_object(self, mine: str) -> list[str]:
        return [mine, *self.peers]

    def new_graph(self, name: str) -> Any:
        self.played.append(name)
        return self

    @contextmanager
    def capture(self) -> Iterator[None]:
        yield
        if self.refuses is not None:
            raise self.refuses

    def replay(self) -> None:
        self.played.append("replay")

    def drain(self) -> None:
        self.played.append("drain")


def test_a_captured_work_is_the_graph_s_replay() -> None:
    world = CapturingWorld()
    again, out, why = _captured(world, Key("nccl", "dbo", 0, "s"), lambda: torch.ones(1))
    again()
    assert world.played == ["nccl dbo 0 s", "replay", "drain", "replay"] and out is not None and why == ""


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (CapturingWorld(refuses=CaptureError("no")), "CaptureError: no"),
        (CapturingWorld(peers=("RuntimeError: peer",)), "RuntimeError: peer"),
    ],
    ids=["here", "on a peer"],
)
def test_what_one_rank_cannot_capture_no_rank_replays(world: CapturingWorld, why: str) -> None:
    again, out, told = _captured(world, Key("nccl", "dbo", 0, "s"), lambda: torch.ones(1))
    assert world.played == ["nccl dbo 0 s"] and out is None and told == why
    assert torch.equal(again(), torch.ones(1)), "the eager work is left"
