"""What tests of kernels share (needs torch and triton): a device, or Triton's interpreter on the CPU.

Imported before anything else that may import Triton: it chooses the interpreter when kernels are defined.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="triton is not installed (extra `kernels`)")

INTERPRETED = not isinstance(triton.language.max, triton.runtime.JITFunction)
runs_here = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED,
    reason="triton was imported before its interpreter could be asked for: test_layer_kernels_apart runs this file",
)


@pytest.fixture(autouse=True)
def working_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under the interpreter a kernel is numpy: quiet, and with loop bounds as Triton 3.6 and numpy 2.4 disagree on them."""
    if INTERPRETED:
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor, scope):
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"), torch.inference_mode():
        yield


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
