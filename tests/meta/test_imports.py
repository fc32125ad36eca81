"""Import direction, and what a plain import costs."""

import ast
import importlib.util
import shutil
import subprocess
import sys

import pytest

from tests.meta.source_tree import ROOT, modules, needs, parse

HEAVY = ("torch", "hypothesis", "transformers", "triton", "pytest")


@pytest.mark.parametrize("package", ["dbo", "sim", "fuzz", "dbo.cli", "dbo.registry", "dbo.job.types"])
def test_a_plain_import_loads_nothing_heavy(package):
    assert _loaded(package, HEAVY) == []


def test_the_pytest_plugin_imports_nothing_heavy():
    assert _loaded("dbo.pytest_plugin", ("torch", "hypothesis", "numpy", "sim", "gpu")) == []


def test_the_probe_sees_a_heavy_import():
    assert _loaded("hypothesis", HEAVY) == ["hypothesis"]


def test_modules_that_import_torch_say_so_first():
    silent = []
    for path in modules():
        first_line = (ast.get_docstring(parse(path)) or "").partition("\n")[0]
        if needs(path, "torch") and "torch" not in first_line.lower():
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_the_import_contracts_hold():
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed (extra dev); the tox environment lint runs it")
    lint = shutil.which("lint-imports") or f"{sys.exec_prefix}/bin/lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def _loaded(module: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` a fresh interpreter has loaded after `import module`."""
    code = f"import sys, {module}; print(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()
