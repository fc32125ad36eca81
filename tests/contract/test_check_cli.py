"""`dbo check` from its command line: bad input in one clear sentence, every fault by its id, every key of the JSON.

Mostly in process and without numbers, on a folder that holds a configuration and a tokenizer only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo.cli import main
from sim.faults import CATALOGUE, Fault
from tests.contract.check_cli_harness import Dbo, assert_refused, write_folder

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("deepep_low_latency", "nccl")
DCP = ("--decode-context-parallel-size", "2")


# -- model folders ----------------------------------------------------------------------------------------------------


def test_a_missing_model_folder(dbo: Dbo, tmp_path: Path) -> None:
    assert_refused(dbo("--model", tmp_path / "nowhere", "--mode", "ordering"), "folder=", "nowhere")


def test_a_file_in_place_of_a_model_folder(dbo: Dbo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_refused(dbo("--model", tmp_path / "file", "--mode", "ordering"), "a model is a folder")


def test_a_folder_without_a_configuration(dbo: Dbo, tmp_path: Path) -> None:
    assert_refused(dbo("--model", tmp_path, "--mode", "ordering"), "config.json")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "\x00\x01"], ids=repr)
def test_a_corrupt_configuration(dbo: Dbo, tmp_path: Path, text: str) -> None:
    path = write_folder(tmp_path / "model")
    (path / "config.json").write_text(text)
    assert_refused(dbo("--model", path, "--mode", "ordering"), "config.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ("DeepseekV2ForCausalLM", "model_type=llama")),
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, ("model_type=deepseek_v3",)),
        ({"norm_topk_prob": True}, ("norm_topk_prob=True", "transformers ignores")),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config=fp8",)),
        ({"scoring_func": "sigmoid"}, ("scoring_func=sigmoid",)),
        ({"hidden_size": "many"}, ("hidden_size",)),
        ({"n_routed_experts": 7}, ("num_experts=7", "num_ranks=2")),
        ({"hidden_size": 64}, ("hidden_size=64", "another --all2all-backend")),
    ],
)
def test_a_model_that_is_not_run(dbo: Dbo, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    path = write_folder(tmp_path / "model", **changes)
    assert_refused(dbo("--model", path, "--mode", "ordering"), *words)


def _no_weights(path: Path) -> None:
    """Leave the folder as it is: a configuration and a tokenizer."""


def _pickled(path: Path) -> None:
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _truncated(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 64)


def _empty_file(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def _missing_tensors(path: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _missing_shard(path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_weights, ("safetensors",)),
        (_pickled, ("pytorch_model.bin", "pickle")),
        (_truncated, ("model.safetensors",)),
        (_empty_file, ("model.safetensors",)),
        (_missing_tensors, ("model.",)),
        (_missing_shard, ("model-00001-of-00002.safetensors",)),
    ],
)
def test_weights_that_cannot_be_read(
    dbo: Dbo, tmp_path: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    pytest.importorskip("torch", reason="weights are read with torch")
    path = write_folder(tmp_path / "model")
    damage(path)
    assert_refused(dbo("--model", path), *words)


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty line.txt", "hello\n\nworld\n", (":2:", "at least one token", "tokens=0")),
        ("empty ids.jsonl", "[1, 2]\n[]\n", (":2:", "at least one token", "tokens=0")),
        ("nothing.txt", "", ("at least one prompt",)),
        ("too long.txt", "x" * 600, (":1:", "fits the limit", "max_tokens=503")),
        ("too long.jsonl", json.dumps([1] * 504), ("tokens=504", "max_tokens=503")),
        ("outside.jsonl", "[1]\n[3, 999999]\n", (":2:", "token_id=999999", "index=1", "vocab_size=320")),
        ("negative.jsonl", "[-1]\n", ("token_id=-1",)),
        ("float.jsonl", "[1.5]\n", ("is an integer", "1.5")),
        ("malformed.jsonl", '[1, 2\n"x"', (":1:", "malformed JSON")),
        ("object.jsonl", '{"text": "x"}', ("prompt_token_ids",)),
    ],
)
def test_prompts_that_cannot_be_run(
    dbo: Dbo, folder: Path, tmp_path: Path, name: str, text: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert_refused(dbo("--model", folder, "--mode", "ordering", "--prompts", path), *words)


def test_a_prompt_file_that_is_missing_or_no_text(dbo: Dbo, folder: Path, tmp_path: Path) -> None:
    assert_refused(dbo("--model", folder, "--prompts", tmp_path / "nowhere"), "must be readable", "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert_refused(dbo("--model", folder, "--prompts", tmp_path / "bytes"), "UTF-8", "first_bad_byte=0")


def test_the_longest_prompt_that_fits_runs(dbo: Dbo, folder: Path, tmp_path: Path) -> None:
    """The limit of the refusal above is the real one: one token less is accepted, and finishes."""
    (tmp_path / "long.jsonl").write_text(json.dumps([1] * 503) + "\n[2]\n")
    answer = dbo("--model", folder, "--mode", "ordering", "--prompts", tmp_path / "long.jsonl")
    assert (answer.exit, answer.data["verdict"]) == (0, "proved")
    assert sum(step["tokens"][0] for step in answer.data["steps"]) == 503 + 8


# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("schedule s\nbackends nccl\nlayer A0 A1 X.send@comm\n", ":3:13:"),
        ("schedule s\nbackends nccl\nlayer A0 A1 D.send@copper |\n", ":3:"),
        ("schedule s\nbackends warp\nlayer A0\n", ":2:10:"),
        ("schedule s\nbackends nccl\nyields many\nlayer A0\n", ":3:8:"),
        ("schedul s\n", ":1:1:"),
        ("schedule s\nbackends nccl\n\n  # nothing\nlayers A0\n", ":5:1:"),
    ],
)
def test_a_malformed_schedule_file_is_refused_at_line_and_column(
    dbo: Dbo, folder: Path, tmp_path: Path, text: str, where: str
) -> None:
    path = tmp_path / "bad.schedule"
    path.write_text(text)
    assert_refused(
        dbo("--model", folder, "--mode", "ordering", "--all2all-backend", "nccl", "--dbo-schedule", path),
        f"bad.schedule{where}",
    )


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("A0 A1 D.send@comm | D.recv MLP C.send@comm | C.recv", ("refused.schedule:3:", "missing=S")),
        ("A0 A1 MLP D.send@comm | D.recv C.send@comm S | C.recv", ("consumer=MLP", "producer=D.recv")),
        ("A0 A1 D.send@comm D.recv MLP C.send@comm S C.recv", ("yield",)),
        ("A0 A1 D.send | D.recv MLP C.send S | C.recv", ("stream=compute", "D.send@comm")),
    ],
)
def test_a_schedule_that_the_validator_refuses(
    dbo: Dbo, folder: Path, tmp_path: Path, layer: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "refused.schedule"
    path.write_text(f"schedule refused\nbackends nccl\nlayer {layer}\n")
    answer = dbo("--model", folder, "--mode", "ordering", "--all2all-backend", "nccl", "--dbo-schedule", path)
    assert_refused(answer, *words)


def test_a_schedule_that_is_missing_or_for_other_backends(dbo: Dbo, folder: Path, tmp_path: Path) -> None:
    common = ("--model", folder, "--mode", "ordering", "--dbo-schedule")
    assert_refused(dbo(*common, tmp_path / "no.schedule"), "no.schedule", "mlp_shared_overlap")
    assert_refused(dbo(*common, "vllm_high_throughput"), "backend=deepep_low_latency", "another schedule")


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--all2all-backnd", "nccl"), ("--all2all-backnd", "did you mean --all2all-backend?")),
        (("--all2all-backend", "carrier-pigeon"), ("carrier-pigeon", "nccl")),
        (("--steps", "0"), ("--steps", ">= 1")),
        (("--steps", "many"), ("--steps", "'many'")),
        (("--mode", "guessing"), ("--mode", "guessing")),
        (("--data-parallel-size", "two"), ("--data-parallel-size", "two")),
        (("--dbo-split-points", "1;2"), ("--dbo-split-points",)),
        (("--cudagraph-mode", "PIECEWISE"), ("--cudagraph-mode", "PIECEWISE")),
        (("extra",), ("extra",)),
        (("--tensor-parallel-size", "2"), ("tensor parallelism", "not now")),
        (("--enable-eplb",), ("not now",)),
        (("--steps", "600"), ("steps=600", "lower --steps")),
        (("--data-parallel-size", "1"), ("expert parallel", "data_parallel_size=1")),
        (("--no-enable-expert-parallel",), ("expert parallel",)),
        (("--ubatch-size", "3"), ("num_ubatches=3", "deepep_low_latency")),
        (("--dbo-decode-token-threshold", "1"), ("dbo_decode_token_threshold=1",)),
        (("--all2all-backend", "nccl", "--dbo-comm-sms", "3"), ("dbo_comm_sms=3", "even")),
        (("--low-latency-max-tokens-per-rank", "512"), ("512", "queue_pair_depth")),
        (("--num-kv-blocks", "4"), ("num_kv_blocks=4",)),
        (("--dcp-comm-backend", "a2a"), ("dcp_comm_backend=a2a", "decode_context_parallel_size=1")),
        (("--world", "moon"), ("--world", "moon")),
    ],
)
def test_unknown_and_impossible_flags(
    dbo: Dbo, folder: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(dbo("--model", folder, "--mode", "ordering", *arguments), *words)


def test_a_trace_file_in_a_folder_that_does_not_exist(folder: Path, tmp_path: Path, capsys: Any) -> None:
    code = main(["check", "--model", str(folder), "--mode", "ordering", "--trace", str(tmp_path / "no" / "t.json")])
    assert code == 2 and "--trace names a file in a folder that exists" in capsys.readouterr().err


# -- faults -----------------------------------------------------------------------------------------------------------

# Storage that is freed too early shows only where storages are freed, and weights where there are values.
APPLIES = [
    (fault, backend)
    for fault in CATALOGUE
    for backend in BACKENDS
    if backend in (fault.backends or BACKENDS) and not fault.numeric
]


def group_for(fault: Fault) -> tuple[object, ...]:
    """The flags of a DCP group that the fault breaks."""
    return (*DCP, "--dcp-comm-backend", fault.exchanges[0]) if fault.exchanges else ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_fault_the_run_is_proved(dbo: Dbo, folder: Path, backend: str) -> None:
    answer = dbo("--model", folder, "--mode", "ordering", "--all2all-backend", backend)
    assert (answer.exit, answer.data["verdict"], answer.data["violations"]) == (0, "proved", [])


@pytest.mark.parametrize(("fault", "backend"), APPLIES, ids=[f"{f.name}-{b}" for f, b in APPLIES])
def test_a_fault_is_found_by_its_id_and_names_the_culprit(dbo: Dbo, folder: Path, fault: Fault, backend: str) -> None:
    where = ("--model", folder, "--mode", "ordering", "--all2all-backend", backend, *group_for(fault))
    answer = dbo(*where, "--inject", fault.name)
    data = answer.data
    first = data["violations"][0]
    assert (answer.exit, data["verdict"], data["verdict_text"]) == (1, "violated", f"violated({first['id']})")
    assert first["id"] in (fault.id, *fault.also)
    assert 0 <= first["rank"] < data["ranks"]
    assert f"--inject {fault.name}" in first["replay"]


@pytest.mark.parametrize("fault", [fault.name for fault in CATALOGUE if fault.numeric])
def test_a_fault_of_numbers_is_refused_without_numbers(dbo: Dbo, fault: str) -> None:
    place = DCP if fault.startswith("dcp-") else ("--all2all-backend", "nccl")
    assert_refused(dbo("--mode", "ordering", "--inject", fault, *place), f"--inject {fault}", "use --mode numeric")


def test_the_list_names_every_fault_first_and_its_backends(dbo: Dbo) -> None:
    lines = dbo("--inject", "list", json=False).out.splitlines()
    assert [line.split()[0] for line in lines] == [fault.name for fault in CATALOGUE]
    for line, fault in zip(lines, CATALOGUE, strict=True):
        assert fault.sentence in line and all(b in line for b in (*fault.backends, *fault.exchanges))
    listed = dbo("--inject", "list").data["faults"]
    assert [(f["name"], tuple(f["backends"])) for f in listed] == [(f.name, tuple(f.backends)) for f in CATALOGUE]


@pytest.mark.parametrize(
    ("fault", "backend"),
    [(f, b) for f in CATALOGUE for b in BACKENDS if f.backends and b not in f.backends],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_fault_of_another_backend_says_which_backend_it_needs(
    dbo: Dbo, folder: Path, fault: Fault, backend: str
) -> None:
    answer = dbo("--model", folder, "--mode", "ordering", "--all2all-backend", backend, "--inject", fault.name)
    assert_refused(answer, f"--inject {fault.name}", "pass --all2all-backend", f"all2all_backend={backend}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--inject", "gremlin"), ("inject=gremlin", "drop-wait", "or list")),
        (("--inject", "raise", "--no-enable-dbo"), ("--inject raise", "--enable-dbo")),
        (("--inject", "raise:rank=9"), ("rank=9", "below 2")),
        (("--inject", "raise:ubatch=2"), ("ubatch=2", "below 2")),
        (("--inject", "raise:colour=red"), ("rank=…", "part=colour=red")),
        (("--inject", "raise:at=x"), ("part=at=x",)),
        (("--inject", "whole-metadata:field=causal"), ("field=causal", "seq_lens")),
        (("--inject", "dcp-late-exchange"), ("pass --decode-context-parallel-size 2 --dcp-comm-backend a2a",)),
        (
            ("--inject", "dcp-missing-signal", *DCP, "--dcp-comm-backend", "a2a"),
            ("pass --dcp-comm-backend a2a_direct", "dcp_comm_backend=a2a"),
        ),
        (("--inject", "dcp-late-exchange:at=9999", *DCP), ("a sum of the group follows", "plant it elsewhere")),
    ],
)
def test_an_inject_that_does_not_apply_says_what_would_make_it_apply(
    dbo: Dbo, folder: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(dbo("--model", folder, "--mode", "ordering", *arguments), *words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--inject", "raise:at=999"),
        ("--inject", "drop-yield", "--dbo-prefill-token-threshold", "48", "--dbo-decode-token-threshold", "48"),
        ("--inject", "skip-coordination:at=999"),
        ("--inject", "unrecorded-stream", "--all2all-backend", "nccl"),
    ],
    ids=" ".join,
)
def test_a_fault_at_a_place_that_the_run_never_reaches_does_not_pass_for_a_clean_run(
    dbo: Dbo, folder: Path, arguments: tuple[str, ...]
) -> None:
    assert_refused(dbo("--model", folder, "--mode", "ordering", *arguments), f"--inject {arguments[1].split(':')[0]}")


# -- the JSON object --------------------------------------------------------------------------------------------------

KEYS = {
    "verdict": str,
    "violations": list,
    "ranks": int,
    "steps": list,
    "order": list,
    "overlap": dict,
    "invariants": dict,
    "reference": dict,
    "forced_drains": int,
    "replay": str,
}
PARTS = {
    "overlap": {"hidden_share", "ideal_share", "exposed_us"},
    "invariants": {"checked", "failed"},
    "reference": {"tokens_equal", "max_rel_err"},
}
STEP_KEYS = {"step", "split", "tokens", "padded_tokens", "ubatches", "graph"}
VIOLATION_KEYS = {"id", "sentence", "rank", "ubatch", "step", "replay"}


def assert_has_all_keys(data: dict[str, Any]) -> None:
    for key, kind in KEYS.items():
        assert isinstance(data[key], kind), key
    for key, parts in PARTS.items():
        assert parts <= data[key].keys()
    assert data["steps"] and all(STEP_KEYS <= step.keys() for step in data["steps"])
    assert all(VIOLATION_KEYS <= violation.keys() for violation in data["violations"])


def test_the_object_has_every_key_in_a_good_and_in_a_violated_run(dbo: Dbo, folder: Path) -> None:
    common = ("--model", folder, "--mode", "ordering", "--all2all-backend", "nccl")
    good, bad = dbo(*common).data, dbo(*common, "--inject", "drop-wait").data
    assert_has_all_keys(good)
    assert_has_all_keys(bad)
    assert good["invariants"]["checked"] > 1000 and good["invariants"]["failed"] == 0
    assert bad["violations"] and bad["invariants"]["failed"] == len(bad["violations"])
    split = [step for step in good["steps"] if step["split"]]
    assert split and len(split) < len(good["steps"]), "by default some steps split and some do not"
    assert all(step["ubatches"] == 2 and len(step["slices"]) == 2 for step in split)


def test_the_replay_line_runs_the_same_again(dbo: Dbo, folder: Path) -> None:
    first = dbo(
        "--model",
        folder,
        "--mode",
        "ordering",
        "--all2all-backend",
        "nccl",
        "--steps",
        "3",
        "--inject",
        "drop-yield:at=2",
        "--seed",
        "7",
    ).data
    words = first["replay"].split()
    assert words[:2] == ["dbo", "check"]
    again = dbo(*words[2:]).data
    assert {k: v for k, v in again.items() if k != "trace"} == {k: v for k, v in first.items() if k != "trace"}


def test_the_text_says_per_step_votes_padding_and_slices_then_the_layer_and_the_verdict(dbo: Dbo, folder: Path) -> None:
    text = dbo("--model", folder, "--mode", "ordering", json=False).out
    header = next(line for line in text.splitlines() if line.startswith("step "))
    assert all(word in header for word in ("votes", "split", "tokens", "padded", "slices"))
    order = r"^\s*Order: D0\.send A0_1 A1_1 D0\.recv D1\.send MLP0"
    for pattern in (
        r"^\s*Comp \|",
        r"^\s*Comm ",
        order,
        r"^overlap: ",
        r"^invariants: ",
        r"^verdict: proved$",
        r"^trace: ",
        r"^replay: dbo check",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern
    assert "ubatches exchanged" in text


# -- processes of their own -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The default command, with numbers, as a user runs it."""
    pytest.importorskip("torch", reason="a run with numbers needs torch")
    path = tmp_path_factory.mktemp("numbers")
    code = (
        "import resource, sys; from dbo.cli import main; code = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "check", "--json", "--trace", str(path / "trace.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    yield json.loads(done.stdout) | {"peak_bytes": int(done.stderr.split()[-1]) * 1024}


def test_the_default_command_is_proved_with_equal_tokens_and_no_forced_drain(numbers: dict[str, Any]) -> None:
    assert_has_all_keys(numbers)
    assert (numbers["verdict"], numbers["exit"], numbers["violations"]) == ("proved", 0, [])
    assert numbers["reference"]["tokens_equal"] is True and numbers["reference"]["max_rel_err"] < 1e-4
    assert numbers["forced_drains"] == 0
    assert (numbers["ranks"], numbers["backend"]) == (2, "deepep_low_latency")
    assert numbers["schedule"] == "mlp_shared_overlap"
    assert numbers["peak_bytes"] < 2 * 2**30


def test_the_steady_layer_is_the_seeds_order_with_the_ubatches_exchanged(numbers: dict[str, Any]) -> None:
    seed = "D1.send A0_0 A1_0 D1.recv D0.send MLP1 D0.recv C1.send S1 MLP0 C1.recv C0.send S0 A0_1 A1_1 C0.recv"
    swapped = "D0.send A0_1 A1_1 D0.recv D1.send MLP0 D1.recv C0.send S0 MLP1 C0.recv C1.send S1 A0_0 A1_0 C1.recv"
    assert numbers["order"] in (seed.split(), swapped.split())
    assert numbers["order_exchanged"] == (numbers["order"] == swapped.split())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("--model", "nowhere"), 2), (("--sed", "1"), 2), (("--inject", "drop-wait", "--mode", "ordering"), 2)],
)
def test_a_process_ends_with_the_exit_code_and_one_line(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dbo.cli", "check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("dbo: ")
