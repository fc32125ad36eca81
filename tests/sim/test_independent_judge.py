"""A second judge: order, overlap and verdict computed again from the trace file alone, with nothing of the system.

Only the file that `dbo check` writes is read, with `json`; neither the runner, nor the scheduler, nor a detector is
imported. What is recomputed is compared with what the command printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SEED = "D1.send A0_0 A1_0 D1.recv D0.send MLP1 D0.recv C1.send S1 MLP0 C1.recv C0.send S0 A0_1 A1_1 C0.recv"
FIELDS = "id rank line kind name t_us dur_us step layer ubatch point after reads writes src attrs".split()
DEVICE_LINES = ("compute", "comm", "net")


@dataclass(frozen=True)
class Run:
    """What one `dbo check` printed and wrote."""

    exit: int
    printed: dict[str, Any]
    trace: dict[str, Any]

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(FIELDS, row, strict=True)) for row in self.trace["records"]]

    def device(self, rank: int) -> list[dict[str, Any]]:
        """Device records of a rank in order of issue."""
        found = [r for r in self.records if r["line"] in DEVICE_LINES and r["rank"] == rank and r["ubatch"] >= 0]
        return sorted(found, key=lambda r: r["id"])

    @cached_property
    def before(self) -> dict[int, int]:
        """For every record the set of records that happen before it, as bits at their positions in the file."""
        last: dict[tuple[int, str], int] = {}
        known: dict[int, int] = {}
        position: dict[int, int] = {}
        for at, r in enumerate(self.records):
            sources = list(r["after"])
            line = (r["rank"], r["line"])
            if r["rank"] >= 0 and line in last:
                sources.append(last[line])
            bits = 0
            for source in sources:
                assert source in position, f"record {r['id']} comes after {source}, which the file has not told yet"
                bits |= known[source] | 1 << position[source]
            known[r["id"]], position[r["id"]], last[line] = bits, at, r["id"]
        return known


def check(tmp_path: Path, *arguments: str) -> Run:
    """Run `dbo check` without numbers in a process of its own."""
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "dbo.cli", "check", "--mode", "ordering", "--json", "--trace", str(path)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == 1, done.stderr
    return Run(done.returncode, json.loads(done.stdout), json.loads(path.read_text())["dbo"])


# -- the second judge -------------------------------------------------------------------------------------------------


def order(run: Run) -> list[str]:
    """Points of a middle MoE layer of rank 0's first split step, from the leading dispatch to the next layer's."""
    issued = [r for r in run.device(0) if r["point"] and r["kind"] not in ("record", "wait")]
    step = min(r["step"] for r in issued)
    issued = [r for r in issued if r["step"] == step]
    leader = next(r["ubatch"] for r in issued if r["point"] == "D.send")
    sends = [
        next(g)
        for _, g in groupby(
            (r for r in issued if r["point"] == "D.send" and r["ubatch"] == leader), key=lambda r: r["layer"]
        )
    ]
    middle = (len(sends) - 1) // 2
    window = [r for r in issued if sends[middle]["id"] <= r["id"] < sends[middle + 1]["id"]]
    return [key for key, _ in groupby(label(r["point"], r["ubatch"]) for r in window)]


def label(point: str, ubatch: int) -> str:
    head, dot, half = point.partition(".")
    return f"{head}_{ubatch}" if head in ("A0", "A1") else f"{head}{ubatch}{dot}{half}"


def exchanged(labels: list[str]) -> list[str]:
    """Ubatches 0 and 1 swapped (the A in A0_1 is a name, not a ubatch)."""
    swap = {"0": "1", "1": "0"}

    def one(text: str) -> str:
        if text[:3] in ("A0_", "A1_"):
            return text[:3] + swap[text[3]]
        head, dot, half = text.partition(".")
        return head[:-1] + swap[head[-1]] + dot + half

    return [one(text) for text in labels]


def hidden_share(run: Run) -> float:
    """Communication time of split steps under a compute operation of the same rank / all of it."""
    total = hidden = 0.0
    for rank in range(run.trace["meta"]["ranks"]):
        device = run.device(rank)
        compute = [(r["t_us"], r["t_us"] + r["dur_us"]) for r in device if r["line"] == "compute" and r["kind"] == "op"]
        for r in device:
            moves = r["kind"] == "transfer" or (r["line"] == "comm" and r["kind"] == "exchange")
            if moves:
                start, stop = r["t_us"], r["t_us"] + r["dur_us"]
                total += stop - start
                hidden += sum(max(0.0, min(stop, b) - max(start, a)) for a, b in compute)
    return hidden / total


def runs(offset: int, sizes: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """The byte runs [start, stop) of a strided box; its innermost axis is contiguous."""
    starts = [offset]
    for size, stride in zip(sizes[:-1], strides[:-1], strict=True):
        starts = [start + i * stride for start in starts for i in range(size)]
    return [(start, start + sizes[-1]) for start in starts]


def races(run: Run) -> list[tuple[int, int]]:
    """Pairs of accesses of a common byte, one of them a write, that the file does not order."""
    position = {r["id"]: at for at, r in enumerate(run.records)}
    uses: dict[int, list[tuple[int, int, bool, dict[str, Any]]]] = {}
    for r in run.records:
        for accesses, writes in ((r["reads"], False), (r["writes"], True)):
            for buffer, offset, sizes, strides in accesses:
                for start, stop in runs(offset, sizes, strides):
                    uses.setdefault(buffer, []).append((start, stop, writes, r))
    found = set()
    for accesses in uses.values():
        for at, (start, stop, writes, r) in enumerate(accesses):
            for start2, stop2, writes2, r2 in accesses[:at]:
                if start < stop2 and start2 < stop and (writes or writes2) and r2 is not r:
                    if not run.before[r["id"]] >> position[r2["id"]] & 1:
                        found.add((r2["id"], r["id"]))
    return sorted(found)


def verdict(run: Run) -> str:
    """The run came to its end, every ubatch kept its yields and its hooks, every step its rows, and no byte races."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in run.records:
        kinds[r["kind"]].append(r)
    exits = [r["attrs"] for r in kinds["ubatch.exit"]]
    ends = [r["attrs"] for r in kinds["step.end"]]
    hooks = {
        name: sorted((r["rank"], r["step"], r["attrs"]["hook"]) for r in kinds[f"hook.{name}"])
        for name in ("register", "run")
    }
    decisions: dict[int, set[str]] = {}
    for r in kinds["decide"]:
        decisions.setdefault(r["step"], set()).add(json.dumps([r["attrs"]["table"], r["attrs"]["decision"]]))
    good = (
        run.trace["meta"]["complete"]
        and not kinds["error"]
        and not kinds["blocked"]
        and all(a["yields"] == a["declared_yields"] and not a["hook_pending"] for a in exits)
        and all(a["rows"] == a["expected_rows"] and a["live_threads"] == 0 for a in ends)
        and hooks["register"] == hooks["run"]
        and all(len(seen) == 1 for seen in decisions.values())
        and not races(run)
    )
    return "proved" if good else "violated"


# -- both judges agree ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def low_latency(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return check(tmp_path_factory.mktemp("low_latency"))


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return check(tmp_path_factory.mktemp("nccl"), "--all2all-backend", "nccl")


@pytest.fixture(params=["low_latency", "nccl"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


def test_the_order_is_the_one_that_was_printed(run: Run) -> None:
    assert order(run) == run.printed["order"] != []


def test_the_default_schedule_gives_the_seeds_order_letter_by_letter(low_latency: Run) -> None:
    """Up to exchanging the ubatches, which the output states: context 0 leads."""
    assert exchanged(order(low_latency)) == SEED.split()
    assert low_latency.printed["order_exchanged"] is True


def test_the_overlap_is_the_one_that_was_printed(run: Run) -> None:
    assert hidden_share(run) == pytest.approx(run.printed["overlap"]["hidden_share"], abs=1e-6)
    assert 0.3 < hidden_share(run) <= 1.0 + 1e-9


def test_the_verdict_is_the_one_that_was_printed(run: Run) -> None:
    assert (verdict(run), run.printed["verdict"], run.exit) == ("proved", "proved", 0)


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        ("drop-wait", "nccl"),
        ("drop-yield", "nccl"),
        ("drop-hook", "deepep_low_latency"),
        ("raise", "nccl"),
        ("double-hook", "deepep_low_latency"),
        ("local-decision", "nccl"),
        ("shared-buffer", "deepep_low_latency"),
    ],
)
def test_both_judges_see_a_fault(tmp_path: Path, fault: str, backend: str) -> None:
    faulty = check(tmp_path, "--inject", fault, "--all2all-backend", backend)
    assert (verdict(faulty), faulty.printed["verdict"], faulty.exit) == ("violated", "violated", 1)


# -- the schedule file is what decides --------------------------------------------------------------------------------

LOW_LATENCY = "layer A0 A1 hook D.send | D.recv MLP hook C.send S | C.recv"
NCCL = "layer A0 A1 D.send@comm | D.recv MLP C.send@comm S | C.recv"


def schedule_file(tmp_path: Path, layer: str, backend: str, yields: int = 2) -> str:
    path = tmp_path / f"edited-{abs(hash(layer)) % 1000}.schedule"
    path.write_text(f"schedule edited\nbackends {backend}\nyields {yields}\n{layer}\n")
    return str(path)


def with_schedule(tmp_path: Path, layer: str, backend: str) -> Run:
    return check(tmp_path, "--all2all-backend", backend, "--dbo-schedule", schedule_file(tmp_path, layer, backend))


def test_a_copy_of_the_preset_gives_the_same_order_and_overlap(tmp_path: Path, low_latency: Run) -> None:
    copy = with_schedule(tmp_path, LOW_LATENCY, "deepep_low_latency")
    assert order(copy) == order(low_latency)
    assert hidden_share(copy) == pytest.approx(hidden_share(low_latency))


def test_the_shared_expert_before_combine_changes_order_and_overlap(tmp_path: Path, low_latency: Run) -> None:
    edited = with_schedule(tmp_path, LOW_LATENCY.replace("hook C.send S", "S hook C.send"), "deepep_low_latency")
    plain, found = order(low_latency), order(edited)
    assert found != plain and sorted(found) == sorted(plain)
    assert plain.index("S0") > plain.index("C0.send") and found.index("S0") < found.index("C0.send")
    assert edited.printed["order"] == found and edited.printed["order_exchanged"] is False
    assert abs(hidden_share(edited) - hidden_share(low_latency)) > 0.01
    assert verdict(edited) == edited.printed["verdict"] == "proved"


def test_a_yield_that_is_moved_changes_order_and_overlap(tmp_path: Path) -> None:
    plain = with_schedule(tmp_path, NCCL, "nccl")
    edited = with_schedule(tmp_path, "layer A0 A1 D.send@comm | D.recv MLP C.send@comm S C.recv |", "nccl")
    assert order(edited) != order(plain)
    follows = order(edited)[order(edited).index("S0") + 1]
    assert follows == "C0.recv", "without the yield the ubatch goes straight on to its receive"
    assert hidden_share(edited) < hidden_share(plain) - 0.05
    assert (order(edited), edited.printed["verdict"]) == (edited.printed["order"], verdict(edited))


def test_this_module_imports_nothing_of_the_system() -> None:
    code = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('judge', sys.argv[1]);"
        "m = u.module_from_spec(s); sys.modules['judge'] = m; s.loader.exec_module(m);"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in ('dbo', 'sim', 'gpu', 'torch', 'fuzz')))"
    )
    done = subprocess.run([sys.executable, "-c", code, __file__], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
