"""Runs the tests of a layer's kernels under Triton's interpreter in a process of its own where this process cannot.

The interpreter is chosen when Triton is imported. A suite that imported it before, uninterpreted, cannot go back, and
the files skip themselves; this test then runs them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNEL_TESTS = [Path(__file__).with_name(name) for name in ("test_layer_kernels.py", "test_attention_kernels.py")]


def test_kernels_apart() -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra `kernels`)")
    from triton import language, runtime

    if torch.cuda.is_available() or not isinstance(language.max, runtime.JITFunction):
        assert all(path.exists() for path in KERNEL_TESTS)  # they run, or have run, in this process
        return
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *map(str, KERNEL_TESTS)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0 and " passed" in ran.stdout and "skipped" not in ran.stdout, (
        ran.stdout[-4000:] + ran.stderr
    )
