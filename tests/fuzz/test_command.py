"""`dbo fuzz`, end to end."""

import importlib.util
import json

import pytest

import fuzz.campaign
import fuzz.targets
from dbo.cli import main
from fuzz.case import parse_token
from tests.fuzz.test_case import SPELLING, TOKEN

PLANTED = SPELLING + ":drop-yield:rank=1,ubatch=0,at=0"


def call(capsys, *arguments):
    code = main(["fuzz", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_campaign_runs_clean_cases_and_faults_in_turn(capsys):
    code, out, _ = call(capsys, "--json", "--budget", "15", "--faults", "raise,differing-config")
    answer = json.loads(out)
    assert code == 0 and answer["verdict"] == "sampled" and answer["verdict_text"] == "sampled(15 cases)"
    assert set(answer["by_fault"]) == {"clean", "raise", "differing-config"} and answer["cases"] == 15
    assert answer["surprise"] == "" and answer["seed"] == 0


def test_the_same_seed_gives_the_same_cases(capsys, monkeypatch):
    runs = []
    for seed in ("3", "3", "4"):
        tokens = []
        monkeypatch.setattr(
            fuzz.campaign, "run_case", lambda c, kept=tokens: kept.append(c.token) or fuzz.targets.run_case(c)
        )
        call(capsys, "--budget", "6", "--seed", seed, "--faults", "none")
        runs.append(tokens)
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) == 6


def test_a_budget_of_seconds_ends(capsys):
    code, out, _ = call(capsys, "--budget", "1s", "--faults", "none")
    assert code == 0 and "clean" in out


def test_a_case_that_is_as_it_should_be_exits_0(capsys):
    code, out, _ = call(capsys, "--case", TOKEN)
    assert code == 0 and "as it should be" in out and "verdict: proved" in out and SPELLING in out
    code, out, _ = call(capsys, "--json", "--case", PLANTED)
    answer = json.loads(out)
    assert code == 0 and answer["verdict"] == "violated" and answer["violations"][0]["id"] == "unequal-yields"


def blind(monkeypatch):
    """Take the detector away that the planted case needs."""
    from dbo import check

    monkeypatch.setattr(check, "DETECTORS", [d for d in check.DETECTORS if d.ID != "unequal-yields"])


def test_a_miss_exits_1_and_says_how_to_see_it_again(capsys, monkeypatch):
    blind(monkeypatch)
    code, out, _ = call(capsys, "--case", PLANTED)
    assert code == 1 and "surprise: " in out and "violated(unequal-yields) is due" in out
    code, out, _ = call(capsys, "--json", "--budget", "20", "--faults", "add-yield")
    answer = json.loads(out)
    assert code == 1 and answer["replay"] == f"dbo fuzz --case {answer['case']}"
    code, out, _ = call(capsys, "--case", answer["case"])
    assert code == 1


def test_a_flagged_clean_case_is_shrunk(capsys, monkeypatch):
    honest = fuzz.targets.run_case

    def touchy(case):
        if case.moe_layers >= 2:
            raise ValueError("too deep")
        return honest(case)

    monkeypatch.setattr(fuzz.campaign, "run_case", touchy)
    code, out, _ = call(capsys, "--json", "--faults", "none", "--budget", "40")
    answer = json.loads(out)
    assert code == 1 and answer["surprise"] == "ValueError: too deep"
    assert ".m2." in answer["spelling"] and ".r2." in answer["spelling"]
    found = parse_token(answer["case"])
    assert found.spelling == answer["spelling"] and len(answer["case"]) <= 60
    assert (found.graphs, found.dcp_size, found.shared_experts) == (False, 1, "overlap")  # the plainest of its kind


def test_ctrl_c_gives_what_there_is(capsys, monkeypatch):
    honest, seen = fuzz.targets.run_case, []

    def interrupted(case):
        seen.append(case)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return honest(case)

    monkeypatch.setattr(fuzz.campaign, "run_case", interrupted)
    code, out, _ = call(capsys, "--json", "--faults", "none")
    answer = json.loads(out)
    assert code == 130 and answer["interrupted"] and answer["verdict_text"] == "sampled(3 cases)"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--case", "nonsense"], "starts with f2"),
        (["--case", SPELLING + ":nonsense"], "fault=nonsense"),
        (["--case", SPELLING.replace("e4", "e3")], "spread evenly"),
        (["--faults", "nonsense"], "choose from all, none"),
        (["--budget", "0"], "--budget"),
        (["--budget", "soon"], "--budget"),
        (["--mode", "exact"], "--mode"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(capsys, arguments, says):
    code, out, err = call(capsys, *arguments)
    assert code == 2 and out == "" and says in err and "Traceback" not in err


def test_numbers_without_torch_are_not_available_here(capsys, monkeypatch):
    if importlib.util.find_spec("torch") is not None:
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
    code, _, err = call(capsys, "--mode", "numeric")
    assert code == 3 and "dual-batch-overlap[torch]" in err
