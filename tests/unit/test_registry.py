"""Worlds by name: lazily, only the ones beside dbo, and with the choices in the refusal."""

import importlib.machinery
import sys
import types

import pytest

from dbo import registry
from dbo.errors import NotAvailable, UsageError


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


def test_faults_of_a_world_without_a_catalogue_are_refused():
    with pytest.raises(UsageError, match=r"world=gpu; choose one of sim"):
        registry.faults("gpu")
