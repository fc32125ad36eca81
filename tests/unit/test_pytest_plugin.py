"""The pytest plugin, in pytest runs of its own: options, marker, seed, tokens, xdist, `-p no:dbo`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CONFTEST = """
import sys, types
from dbo import registry

world = types.ModuleType("sim.planted")
def launch(program, *, ranks, seed, replay=None, mode="x"):
    options = {} if replay is None else {"replay": replay}
    return program(ranks=ranks, seed=seed, **options)
world.launch = launch
sys.modules["sim.planted"] = world
registry.WORLDS["sim"] = "sim.planted:launch"
"""

TESTS = """
import pytest

class Lost(Exception):
    def __init__(self, replay):
        super().__init__("lost")
        self.replay = replay

def test_first(world):
    assert world.run(lambda **options: options) == {"ranks": 2, "seed": SEED}

@pytest.mark.dbo(ranks=4, seed=99)
def test_marked(world):
    assert world.run(lambda **options: options)["ranks"] == 4
    assert world.run(lambda **options: options, ranks=3)["ranks"] == 3

def test_losing(world):
    def program(replay=None, **options):
        print("got", replay)
        raise Lost("1:a3")
    world.run(program)
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest in a folder with TESTS; the entry point is planted, so that nothing has to be installed."""
    info = tmp_path / "site" / "planted-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[pytest11]\ndbo = dbo.pytest_plugin\n")
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (suite / "conftest.py").write_text(CONFTEST)

    def runner(*arguments, seed=0, tests=TESTS):
        (suite / "test_it.py").write_text(tests.replace("SEED", str(seed)))
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}", "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "no:randomly", *arguments]
        return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)

    return runner


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_the_seed_reaches_the_world_the_header_and_the_summary(run, workers):
    done = run("--dbo-seed", "5", *workers, seed=5)
    assert "2 passed" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "dbo: world=sim seed=5" in done.stdout
    assert "dbo: seed=5; the same again: --dbo-seed=5" in done.stdout


def test_a_random_seed_is_one_seed_over_all_workers_and_is_printed(run):
    tests = "import pytest\n@pytest.mark.parametrize('i', range(4))\ndef test_seed(world, i): assert not world.seed\n"
    done = run("--dbo-seed", "random", "-n", "2", tests=tests)
    printed = re.search(r"dbo: world=sim seed=(\d+)", done.stdout).group(1)
    assert set(re.findall(r"WorldRunner\(world='sim', seed=(\d+)", done.stdout)) == {printed}


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_failing_token_is_kept_tried_first_and_forgotten_once_it_passes(run, workers):
    done = run(*workers)
    assert "dbo: replay: pytest 'test_it.py::test_losing' --dbo-replay=1:a3" in done.stdout
    again = run("-v", *workers)
    assert "got 1:a3" in again.stdout
    if not workers:
        assert again.stdout.index("::test_losing FAILED") < again.stdout.index("::test_first PASSED")
    mended = TESTS.replace("raise Lost", "Lost")
    assert run(*workers, tests=mended).returncode == 0
    assert "got 1:a3" not in run("-s", tests=mended).stdout


def test_a_token_on_the_command_line_is_run(run):
    assert "got 7:zz" in run("--dbo-replay", "7:zz", "-k", "losing").stdout


def test_markers_options_and_their_mistakes(run):
    for arguments, says in (
        ("rank=4", "rank=4; did you mean ranks?"),
        ("colour='red'", "colour='red'; drop colour"),
        ("4", "arguments=(4,); name them"),
        ("world='moon'", "the marker dbo names a world: world='moon'; choose one of gpu, sim"),
    ):
        bad_marker = f"import pytest\n@pytest.mark.dbo({arguments})\ndef test_x(world): assert world\n"
        assert says in run(tests=bad_marker).stdout
    for option in (["--dbo-seed", "x"], ["--dbo-budget", "0"], ["--dbo-world", "cpu"]):
        done = run(*option)
        assert done.returncode == 4, done.stdout + done.stderr
        assert option[0] in done.stderr and "Traceback" not in done.stderr


def test_the_trace_of_a_run_is_written(run, tmp_path):
    tests = (
        "from dbo.trace import Trace\nimport types\n"
        "def test_x(world):\n"
        "    out = world.run(lambda **o: types.SimpleNamespace(trace=Trace(), replay=None))\n    assert out\n"
    )
    assert run("--dbo-trace-dir", str(tmp_path / "traces"), tests=tests).returncode == 0
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "test_it.py_test_x.trace.json"
    assert trace.read_bytes().startswith(b'{"buffers":[]')


def test_an_option_that_the_world_does_not_take_is_refused_and_not_ignored(run):
    done = run("--dbo-budget", "5", "-k", "first")
    assert "--dbo-budget needs a world that searches: world=sim, budget=5" in done.stdout


ON_THE_SIMULATOR = """
import pytest
from dbo.check import judge
from dbo.errors import DBOError

@pytest.mark.dbo(ranks=3, mode="ordering")
def test_ranks(world):
    assert world.run(lambda own: own.rank).values == [0, 1, 2]

@pytest.mark.dbo(mode="ordering")
def test_a_failing_program(world):
    def program(own):
        raise DBOError(f"rank {own.rank} fails")
    with pytest.raises(DBOError, match="rank 0 fails"):
        world.run(program)
    assert str(world.run(program, check=False).errors[1]) == "rank 1 fails"

@pytest.mark.dbo(mode="ordering")
@pytest.mark.parametrize(("waits", "found"), [(True, ""), (False, "stream-race")])
def test_a_race_is_for_the_judge(world, waits, found):
    def program(own):
        x = own.tensors.op("write", [], (4, 64))
        written = own.compute.record_event()
        own.set_stream(own.comm)
        if waits:
            own.comm.wait_event(written)
        own.tensors.op("read", [x], (4, 64))
    run = world.run(program)
    verdict = judge(run.trace).verdict
    assert (verdict.good, verdict.id) == (waits, found)
"""


def test_programs_run_on_the_simulator(run, tmp_path):
    (tmp_path / "suite" / "conftest.py").write_text("")
    done = run(tests=ON_THE_SIMULATOR)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_it_can_be_turned_off(run):
    done = run("-p", "no:dbo", tests="def test_x():\n    assert 1 + 1 == 2\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dbo:" not in done.stdout
