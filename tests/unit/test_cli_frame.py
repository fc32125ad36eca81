"""The frame: exit codes, one JSON object in every case, no traceback for a refusal, no stub among the commands."""

import importlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import dbo
from dbo.check import verdict
from dbo.check.violation import Violation
from dbo.cli.dispatch import COMMANDS, main
from dbo.errors import ModelFormatError, NotAvailable, StepDrift
from dbo.job.types import CheckRequest, CheckResult, Invariants, OverlapFigures, Reference, StepReport


def result_of(verdict_, violations=()):
    return CheckResult(
        verdict=verdict_,
        violations=violations,
        ranks=2,
        overlap=OverlapFigures(hidden_share=0.9, ideal_share=0.95, exposed_us=float("nan")),
        invariants=Invariants(checked=7, failed=len(violations)),
        reference=Reference(tokens_equal=True, max_rel_err=1e-6),
        replay="dbo check --seed 3",
    )


@pytest.fixture
def job(monkeypatch):
    """Stands in for the main job: `job.does` is called with the request and the progress."""
    module = types.ModuleType("dbo.job.run")
    module.requests = []
    module.does = lambda request, progress: result_of(verdict.proved())

    def run(request, progress):
        module.requests.append(request)
        return module.does(request, progress)

    module.run = run
    monkeypatch.setitem(sys.modules, "dbo.job.run", module)
    monkeypatch.setattr(dbo, "main_job", module, raising=False)
    return module


def raises(error):
    def does(request, progress):
        raise error

    return does


def check_one_object(out):
    lines = out.splitlines()
    assert len(lines) == 1, out
    return json.loads(lines[0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "must be given: missing=COMMAND; see `dbo --help`"),
        (["chekc"], "a command must be known: command=chekc; did you mean check?"),
        (["moon"], "a command must be known: command=moon; choose one of bench, check,"),
        (["check", "--sed", "1"], "did you mean --seed?"),
        (["check", "--zzz"], "a flag must be known: flag=--zzz; `dbo check --help` lists the flags"),
        (["check", "--world", "cpu"], "--world takes one of its choices: world='cpu'; choose one of sim, gpu"),
        (["check", "--steps", "0"], "--steps takes an integer >= 1: steps='0'; pass such a value"),
        (["check", "--steps", "many"], "--steps takes an integer >= 1: steps='many'; pass such a value"),
        (["check", "--seed", "x"], "--seed takes an integer: seed='x'; pass such a value"),
        (
            ["check", "--dbo-split-points", "a"],
            "--dbo-split-points takes integers between commas, as 16,64: dbo_split_points='a'; pass such a value",
        ),
        (["check", "--mode"], "this flag takes a value: flag=--mode; choose one of numeric, ordering"),
        (["check", "--seed"], "this flag takes a value: flag=--seed; write --seed SEED"),
        (["check", "--share-device=1"], "a switch takes no value: flag=--share-device, value='1'; drop the value"),
        (["bench", "moon"], "world takes one of its choices: world='moon'; choose one of sim, dcp, moe"),
        (["fuzz", "--budget", "x"], "or of seconds, as 60s: budget='x'; pass such a value"),
        (["show", "x", "--text", "--png", "y"], "exclude each other: flags=--png, --text; drop one"),
        (["show"], "must be given: missing=TRACE; see `dbo show --help`"),
        (["check", "left-over"], "argument=left-over"),
        (["check", "--tensor-parallel-size", "2"], "not now"),
        (["check", "--prompts", "no/such/file"], "No such file"),
        (["check", "--trace", "no/such/folder/trace.json"], "create the folder"),
    ],
)
def test_a_usage_error_is_one_sentence_and_exit_2(job, capsys, arguments, says):
    assert main(arguments) == 2
    text = capsys.readouterr()
    assert text.out == ""
    assert says in text.err
    assert len(text.err.splitlines()) == 1
    assert main([*arguments, "--json"]) == 2
    assert check_one_object(capsys.readouterr().out) == {"error": text.err.removeprefix("dbo: ").strip(), "exit": 2}
    assert job.requests == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelFormatError("no config.json"), 2),
        (NotAvailable("no devices"), 3),
        (StepDrift([1, 2]), 1),
        (ModuleNotFoundError("No module named 'tokens'", name="tokens"), 70),
        (ZeroDivisionError("x"), 70),
    ],
)
def test_whatever_the_job_raises_has_its_exit_code_and_one_object(job, capsys, error, code):
    job.does = raises(error)
    assert main(["check", "--json"]) == code
    text = capsys.readouterr()
    answer = check_one_object(text.out)
    assert answer["exit"] == code
    assert str(error) in answer["error"]
    assert ("Traceback" in text.err) == (code == 70)


def test_without_torch_the_job_says_what_to_install(job, capsys):
    job.does = raises(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert main(["check"]) == 3
    assert "dual-batch-overlap[torch]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (verdict.proved(), 0),
        (verdict.sampled(3, 100.0), 0),
        (verdict.inconclusive("nothing was checked"), 1),
        (verdict.violated("stream-race"), 1),
    ],
)
def test_the_verdict_decides_the_exit_code(job, capsys, found, code):
    job.does = lambda request, progress: result_of(found)
    assert main(["check"]) == code
    assert f"verdict: {found.text}" in capsys.readouterr().out


def test_json_holds_the_promised_keys_and_no_nan(job, capsys):
    race = Violation(id="stream-race", sentence="a read", rank=1, ubatch=0, step=2, replay="dbo check --inject x")
    job.does = lambda request, progress: result_of(verdict.violated("stream-race"), (race,))
    assert main(["check", "--json"]) == 1
    answer = check_one_object(capsys.readouterr().out)
    promised = "verdict violations ranks steps order overlap invariants reference forced_drains replay".split()
    assert set(promised) <= answer.keys()
    assert answer["verdict"] == "violated"
    assert {"id", "sentence", "rank", "ubatch", "step", "replay"} <= answer["violations"][0].keys()
    assert answer["overlap"] == {"hidden_share": 0.9, "ideal_share": 0.95, "exposed_us": None}
    assert answer["invariants"]["failed"] == 1


def test_what_a_job_prints_does_not_spoil_the_object(job, capsys):
    def chatty(request, progress):
        print("a library says hello")
        return result_of(verdict.proved())

    job.does = chatty
    assert main(["check", "--json"]) == 0
    text = capsys.readouterr()
    assert check_one_object(text.out)["verdict"] == "proved"
    assert "hello" in text.err


def test_an_interrupt_says_what_was_reached(job, capsys):
    def interrupted(request, progress):
        progress.stage("running the ranks")
        progress.step(StepReport(step=0, phase="prefill", split=True, tokens=(9, 7), padded_tokens=(9, 9)))
        raise KeyboardInterrupt

    job.does = interrupted
    assert main(["check"]) == 130
    text = capsys.readouterr()
    assert "running the ranks, after 1 finished steps" in text.err
    assert "step 0 prefill: split, tokens (9, 7)" in text.out
    assert "inconclusive(interrupted)" in text.out
    assert main(["check", "--json"]) == 130
    assert check_one_object(capsys.readouterr().out)["reached"]["steps"] == [0]


def test_an_interrupt_of_a_command_without_steps_says_nothing_of_a_verdict(monkeypatch, capsys):
    def run(args, reached):
        reached.stage("probing")
        raise KeyboardInterrupt

    monkeypatch.setattr("dbo.cli.doctor.run", run)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "dbo: interrupted while probing\n")
    assert main(["doctor", "--json"]) == 130
    found = {"error": "interrupted while probing", "exit": 130, "reached": {"stages": ["probing"]}}
    assert check_one_object(capsys.readouterr().out) == found


def test_flags_reach_the_request_and_only_those_that_were_given(job, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    line = "check --ubatch-size 3 --no-enable-dbo --seed 5 --steps 2 --mode ordering --inject drop-wait".split()
    assert main([*line, "--prompts", str(prompts), "--tensor-parallel-size", "1"]) == 0
    (request,) = job.requests
    assert request.flags == {"num_ubatches": 3, "enable_dbo": False, "seed": 5}
    assert (request.seed, request.world, request.steps) == (5, "sim", 2)
    assert (request.mode, request.inject) == ("ordering", "drop-wait")
    assert request.prompts.lines[0].content == "hello"


def test_a_request_without_flags_is_the_default_one(job):
    assert main(["check"]) == 0
    assert job.requests == [CheckRequest()]


def test_help_and_version_print_and_end_well(capsys):
    for arguments, expected in ((["--version"], dbo.__version__), (["check", "--help"], "--dbo-schedule")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


def test_every_listed_command_is_a_whole_one():
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        assert callable(module.add_arguments) and callable(module.run)
        assert re.fullmatch(r"[a-z].+[^.]", module.HELP), name


def test_a_reader_that_leaves_early_keeps_the_verdict():
    code = "import sys\nfrom dbo.cli import dispatch as frame, answer\n"
    code += "sys.exit(frame._print(answer.Answer(text='x' * 10**6), as_json=False))"
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "{code}" | true'],
        capture_output=True,
        text=True,
        cwd=Path(dbo.__file__).parents[1],
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
