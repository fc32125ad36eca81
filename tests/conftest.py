"""Rules for all tests: what is left out where torch is missing, and how many devices a gpu test may ask for."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.meta.source_tree import ROOT, needs

HAS_TORCH = importlib.util.find_spec("torch") is not None
LEFT_OUT: list[str] = []


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch, leave out the files that import it, however far down; `pytest_terminal_summary` names them."""
    if HAS_TORCH or collection_path.suffix != ".py" or not needs(collection_path, "torch"):
        return None
    LEFT_OUT.append(str(collection_path.relative_to(ROOT)))
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """An xdist worker collects; the controller, which prints, has to be told what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = LEFT_OUT


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LEFT_OUT.extend(getattr(node, "workeroutput", {}).get("left_out", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LEFT_OUT:
        names = ", ".join(sorted(set(LEFT_OUT)))
        terminalreporter.write_line(f"torch is not installed; files that need it were left out: {names}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a gpu test that asks for more devices than there are."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    wanted = marker.kwargs["min_devices"]
    found = _device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} accelerators, this machine has {found}")


@cache
def _device_count() -> int:
    if not HAS_TORCH:
        return 0
    import torch

    return torch.cuda.device_count()
