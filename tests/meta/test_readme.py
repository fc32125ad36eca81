"""README has exactly two command lines; the continuous check runs the second; what it promises is there."""

import re
import shlex
import subprocess
import sys

from tests.meta.source_tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def set_up_commands(text):
    """The indented lines that make an environment: what a reader with a fresh machine copies."""
    return re.findall(r"^    (python3 -m venv .*)$", text, flags=re.MULTILINE)


def test_two_commands_set_up_one_runs_the_main_job_and_one_the_tests():
    main_job, tests = set_up_commands(README)
    assert main_job.endswith(".venv/bin/dbo check")
    assert tests.endswith(".venv/bin/tox")
    assert all("-c constraints.txt" in command for command in (main_job, tests))


def test_ci_takes_its_command_out_of_the_readme():
    extraction = re.search(r"^command_line=\$\((sed .*)\)$", CI, flags=re.MULTILINE).group(1)
    done = subprocess.run(shlex.split(extraction), cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [set_up_commands(README)[1]]


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_failing_run_is_a_real_one():
    sample = re.search(r"^    \$ dbo (.*)\n((?:    .*\n)+)", README, flags=re.MULTILINE)
    shown = [line.removeprefix("    ") for line in sample.group(2).splitlines()]
    command = [sys.executable, "-m", "dbo.cli", *shlex.split(sample.group(1))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    printed = iter(done.stdout.splitlines())
    assert [line for line in shown if line != "…" and line not in printed] == []
    assert done.returncode == 1
