"""Worlds by name: lazily, only the ones beside dbo, and with the choices in the refusal."""

import importlib.machinery
import sys
import tomllib
import types
from pathlib import Path

import pytest

from dbo import registry
from dbo.errors import NotAvailable, UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def planted(monkeypatch):
    """A world of the test's own, in a package that lies beside dbo."""
    module = types.ModuleType("sim.planted")
    module.launch = lambda program, **options: (program, options)
    monkeypatch.setitem(sys.modules, "sim.planted", module)
    monkeypatch.setitem(registry.WORLDS, "planted", "sim.planted:launch")
    return module


def test_a_world_is_loaded_by_name(planted):
    entry = registry.load("planted")
    assert entry.name == "planted"
    assert entry.launch("program", size=2) == ("program", {"size": 2})


def test_an_unknown_world_is_refused_with_the_choices():
    with pytest.raises(UsageError, match=r"world=cpu; choose one of gpu, sim"):
        registry.load("cpu")


def test_a_foreign_package_of_the_same_name_is_refused_with_both_paths(planted, tmp_path, monkeypatch):
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.delitem(sys.modules, "sim", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotAvailable) as refused:
        registry.load("planted")
    assert str(tmp_path / "sim") in str(refused.value)
    assert str(registry.Path(registry.__file__).parent) in str(refused.value)


def test_a_foreign_package_that_is_already_imported_is_refused_too(planted, tmp_path, monkeypatch):
    foreign = types.ModuleType("sim")
    foreign.__spec__ = importlib.machinery.ModuleSpec("sim", None, is_package=True)
    foreign.__spec__.submodule_search_locations = [str(tmp_path / "sim")]
    monkeypatch.setitem(sys.modules, "sim", foreign)
    with pytest.raises(NotAvailable, match="must be the one beside dbo"):
        registry.load("planted")


def test_a_world_without_a_package_or_a_module_is_not_available(monkeypatch):
    monkeypatch.setitem(registry.WORLDS, "nowhere", "no_such_package_of_ours.world:launch")
    with pytest.raises(NotAvailable, match="missing=no_such_package_of_ours"):
        registry.load("nowhere")
    monkeypatch.setitem(registry.WORLDS, "unbuilt", "sim.no_such_module:launch")
    with pytest.raises(NotAvailable, match=r"missing=sim\.no_such_module; this build does not have it"):
        registry.load("unbuilt")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (registry.faults, "--inject needs a world with a catalogue of faults: world=gpu; choose one of sim"),
        (registry.benchmarks, "dbo bench times a world with benchmarks: world=gpu; choose one of sim"),
    ],
)
def test_a_world_without_what_a_table_lists_is_refused_in_its_own_words(table, words):
    with pytest.raises(UsageError, match=f"^{words}$"):
        table("gpu")


TABLES = [
    ("MOE_BENCH", registry.moe_bench, "the benchmark of MoE layers", ""),
    ("DCP_BENCH_DEVICE", registry.dcp_bench_device, "the DCP exchange on devices", ", or pass --device cpu"),
    ("FUZZER", registry.fuzzer, "the fuzzer", ""),
]


@pytest.mark.parametrize(("table", "load", "noun", "instead"), TABLES, ids=[name for name, *_ in TABLES])
@pytest.mark.parametrize(
    ("missing", "fix"),
    [
        ("triton.language", "install the extra `kernels`"),
        ("torch", "install the extra `torch`"),
        ("greenlet", "install greenlet"),
        ("sim.gone", "this build does not have it"),
        ("dbo.gone", "this build does not have it"),
    ],
)
def test_every_table_says_what_is_missing_and_who_needs_it(table, load, noun, instead, missing, fix, monkeypatch):
    monkeypatch.setattr(registry, table, "sim.planted")

    def import_module(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(registry.importlib, "import_module", import_module)
    with pytest.raises(NotAvailable) as refused:
        load()
    assert str(refused.value) == f"{noun} needs its modules: module=sim.planted, missing={missing}; {fix}{instead}"


@pytest.mark.parametrize(("table", "load", "noun", "instead"), TABLES, ids=[name for name, *_ in TABLES])
def test_every_table_refuses_a_foreign_package(table, load, noun, instead, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, table, "stranger")
    with pytest.raises(NotAvailable, match="stranger must be the one beside dbo"):
        load()
    monkeypatch.setattr(registry, table, "no_such_package_of_ours.module")
    with pytest.raises(NotAvailable, match=f"^{noun} lies beside dbo: missing=no_such_package_of_ours"):
        load()


def test_a_library_that_is_there_and_does_not_load_is_no_missing_one(monkeypatch):
    monkeypatch.setattr(registry, "MOE_BENCH", "sim.planted")

    def import_module(name):
        raise ImportError("libplanted.so: cannot open shared object file")

    monkeypatch.setattr(registry.importlib, "import_module", import_module)
    with pytest.raises(ImportError, match="libplanted"):
        registry.moe_bench()


def test_extras_bring_what_the_refusals_say():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, extra in registry._EXTRAS.items():
        assert any(requirement.startswith(name) for requirement in extras[extra]), f"{extra} does not bring {name}"
