"""pytest plugin (entry point `dbo`): the `world` fixture, its options, and replay tokens that are kept and tried first.

Loaded by every pytest run of an environment that has this distribution, so it imports nothing heavy; `-p no:dbo` turns
it off. Under xdist the controller chooses the seed and writes the cache, and workers read them.

    def test_ring(world):
        world.run(program, ranks=2)

    @pytest.mark.dbo(ranks=4, seed=7)
    def test_coordination(world): ...
"""

from __future__ import annotations

import difflib
import inspect
import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dbo import registry
from dbo.errors import DBOError, NotAvailable, UsageError, refusal

CACHE_KEY = "dbo/replay-tokens"
TOKEN_PROPERTY = "dbo-replay"
PASSED_PROPERTY = "dbo-passed"
MARKER = (
    "dbo(world, seed, ranks, mode, budget): how the `world` fixture runs this test; options of the command line win"
)
_MARKER_NAMES = frozenset({"world", "seed", "ranks", "mode", "budget"})
_RANDOM = "random"


@dataclass(kw_only=True)
class WorldRunner:
    """What the `world` fixture gives: runs programs in one world with this test's seed, budget and replay token.

    Attributes:
        world: the world's name.
        seed: of whatever a test draws; also the world's, where it draws something itself.
        ranks, mode: passed to the world unless `run` says otherwise; mode None: the world's own default.
        budget: schedules that a search may try; None: the world's own default.
        replay: a token to run first, from `--dbo-replay` or from this test's last failure.
        trace_dir: the trace of the test's last run goes here; None: it is not written.
        name: the test's node id, from which the trace file takes its name.
        token: the replay token of the last run, if it has one.
    """

    world: str
    seed: int
    ranks: int = 2
    mode: str | None = None
    budget: int | None = None
    replay: str | None = None
    trace_dir: Path | None = None
    name: str = ""
    token: str | None = field(default=None, init=False)

    def run(self, program: Any, *, ranks: int | None = None, check: bool = True, **options: Any) -> Any:
        """Launch `program` on every rank and return what the world's `launch` returns.

        With `check`, an error of a rank is raised, the lowest rank's first, and so is a deadlock with its wait-for
        report; without, the caller looks at the outcome.

        Raises:
            UsageError, NotAvailable: there is no such world here, or it does not take a budget or a replay token.
            DBOError: the run can never go on.
        """
        launch = registry.load(self.world).launch
        chosen = {"mode": self.mode, "budget": self.budget, "replay": self.replay}
        chosen = {name: value for name, value in chosen.items() if value is not None} | options
        chosen["ranks"] = ranks or self.ranks
        taken = inspect.signature(launch).parameters
        if "seed" in taken:
            chosen.setdefault("seed", self.seed)
        for name in ("budget", "replay"):
            if name in chosen and name not in taken:
                rule = f"--dbo-{name} needs a world that searches"
                raise NotAvailable.of(rule, fix="drop the option", world=self.world, **{name: chosen[name]})
        try:
            outcome = launch(program, **chosen)
        except Exception as error:
            self._keep(error)
            raise
        self._keep(outcome)
        if check:
            _raise_if_failed(outcome)
        return outcome

    def _keep(self, witness: Any) -> None:
        """Keep the token, and write the trace, of a run that returned or raised `witness`."""
        self.token = getattr(witness, "replay", None)
        trace = getattr(witness, "trace", None)
        if self.trace_dir is not None and trace is not None:
            self.trace_dir.mkdir(parents=True, exist_ok=True)
            file_name = re.sub(r"[^\w.-]+", "_", self.name) + ".trace.json"
            (self.trace_dir / file_name).write_bytes(trace.canonical_bytes())


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dbo", "Dual Batch Overlap")
    group.addoption("--dbo-world", choices=sorted(registry.WORLDS), help="world of the `world` fixture (default: sim)")
    group.addoption("--dbo-seed", type=_seed, metavar="N|random", help="seed of the `world` fixture (default: 0)")
    group.addoption("--dbo-budget", type=_budget, metavar="N", help="schedules that a search may try for a test")
    group.addoption("--dbo-replay", metavar="TOKEN", help="run this replay token in every selected test")
    group.addoption("--dbo-trace-dir", type=Path, metavar="FOLDER", help="write the traces of runs here")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.pluginmanager.register(_Session(config), "dbo-session")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[WorldRunner]:
    """Runs programs in the world that `--dbo-world` or the test's marker names."""
    session: _Session = request.config.pluginmanager.get_plugin("dbo-session")
    runner = session.runner(request.node)
    request.node.stash[_RUNNER] = runner
    yield runner


def _raise_if_failed(outcome: Any) -> None:
    for error in getattr(outcome, "errors", ()):
        if error is not None:
            raise error
    if getattr(outcome, "deadlocked", False):
        # Only a run that hangs pays for the detector.
        from dbo.check import deadlock
        from dbo.check.happens import HappensBefore

        found = deadlock.detect(outcome.trace, HappensBefore(outcome.trace)).violations
        raise DBOError("\n".join(violation.sentence for violation in found) or deadlock.SENTENCE)


_RUNNER = pytest.StashKey[WorldRunner]()


class _Session:
    """One pytest run, on the controller or on an xdist worker."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.seed, self.seed_is_chosen = self._choose_seed()
        self.failed: dict[str, str] = {}
        self.passed: set[str] = set()
        cache = getattr(config, "cache", None)
        self.known: dict[str, str] = dict(cache.get(CACHE_KEY, {})) if cache is not None else {}

    def _choose_seed(self) -> tuple[int, bool]:
        if self.worker_input is not None and "dbo_seed" in self.worker_input:
            return self.worker_input["dbo_seed"], self.worker_input["dbo_seed_is_chosen"]
        option = self.config.getoption("--dbo-seed")
        if option is None:
            return 0, False
        return random.SystemRandom().getrandbits(32) if option == _RANDOM else option, True

    def runner(self, item: pytest.Item) -> WorldRunner:
        marker = item.get_closest_marker("dbo")
        wanted = dict(marker.kwargs) if marker is not None else {}
        if (marker is not None and marker.args) or not wanted.keys() <= _MARKER_NAMES:
            raise UsageError(_bad_marker(marker.args if marker is not None else (), wanted))
        option = self.config.getoption
        worlds = sorted(registry.WORLDS)
        if wanted.get("world", "sim") not in worlds:
            fix = f"choose one of {', '.join(worlds)}"
            raise UsageError.of("the marker dbo names a world", fix=fix, world=repr(wanted["world"]))
        return WorldRunner(
            world=option("--dbo-world") or wanted.get("world", "sim"),
            seed=self.seed if self.seed_is_chosen else wanted.get("seed", self.seed),
            ranks=wanted.get("ranks", 2),
            mode=wanted.get("mode"),
            budget=option("--dbo-budget") or wanted.get("budget"),
            replay=option("--dbo-replay") or self.known.get(item.nodeid),
            trace_dir=option("--dbo-trace-dir"),
            name=item.nodeid,
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """xdist starts a worker: it gets the controller's seed."""
        node.workerinput["dbo_seed"] = self.seed
        node.workerinput["dbo_seed_is_chosen"] = self.seed_is_chosen

    def pytest_report_header(self) -> str:
        return f"dbo: world={self.config.getoption('--dbo-world') or 'sim'} seed={self.seed}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests that failed with a token last time run first."""
        items.sort(key=lambda item: item.nodeid not in self.known)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the token into the report, which is what xdist carries from a worker to the controller."""
        report = yield
        runner = item.stash.get(_RUNNER, None)
        if runner is not None and call.when == "call":
            if report.failed and runner.token is not None:
                report.user_properties.append((TOKEN_PROPERTY, runner.token))
                report.sections.append(("dbo", f"replay: pytest '{item.nodeid}' --dbo-replay={runner.token}"))
            elif report.passed:
                report.user_properties.append((PASSED_PROPERTY, True))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        properties = dict(report.user_properties)
        if TOKEN_PROPERTY in properties:
            self.failed[report.nodeid] = str(properties[TOKEN_PROPERTY])
        elif PASSED_PROPERTY in properties:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        cache = getattr(self.config, "cache", None)
        if cache is None or self.worker_input is not None:
            return
        tokens = {node: token for node, token in self.known.items() if node not in self.passed} | self.failed
        if tokens != self.known:
            cache.set(CACHE_KEY, tokens)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"dbo: seed={self.seed}; the same again: --dbo-seed={self.seed}")
        for node, token in self.failed.items():
            terminalreporter.write_line(f"dbo: replay: pytest '{node}' --dbo-replay={token}")


def _bad_marker(arguments: Sequence[object], keywords: Mapping[str, object]) -> str:
    names = ", ".join(sorted(_MARKER_NAMES))
    unknown = sorted(keywords.keys() - _MARKER_NAMES)
    if not unknown:
        return refusal(f"the marker dbo takes keywords only, {names}", "name them", arguments=repr(tuple(arguments)))
    near = difflib.get_close_matches(unknown[0], sorted(_MARKER_NAMES), n=1)
    fix = f"did you mean {near[0]}?" if near else f"drop {', '.join(unknown)}"
    return refusal(f"the marker dbo takes {names}", fix, **{name: repr(keywords[name]) for name in unknown})


def _seed(text: str) -> int | str:
    if text == _RANDOM:
        return text
    if not re.fullmatch(r"\d+", text):
        raise pytest.UsageError(f"--dbo-seed takes an integer >= 0 or {_RANDOM}, not {text!r}")
    return int(text)


def _budget(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise pytest.UsageError(f"--dbo-budget takes an integer >= 1, not {text!r}")
    return int(text)
