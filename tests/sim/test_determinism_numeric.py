"""With numbers, too: two processes, two hash seeds, the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sim.job_harness import BACKENDS
from tests.sim.test_determinism import trace_bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_with_different_hash_seeds_write_the_same_trace(tmp_path: Path, backend: str) -> None:
    assert torch.__version__
    first = trace_bytes("numeric", "thread", backend, tmp_path / "a", "1")
    assert first == trace_bytes("numeric", "thread", backend, tmp_path / "b", "2")
