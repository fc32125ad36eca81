"""No access to memory of a kernel is wider than its address is aligned; see `ptx_alignment`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLANTED = """
import sys
import tests.gpu.ptx_alignment as program
from gpu.kernels import packed

source = packed._pack.src.replace("tl.multiple_of((((head", "((((head").replace("(D + L), 1)", "(D + L))")
assert "multiple_of" not in source
packed._pack._unsafe_update_src(source)
program.SHAPES, program.DTYPES = program.SHAPES[-1:], program.DTYPES[:1]
sys.exit(program.main())
"""


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(autouse=True)
def compiles() -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra `kernels`)")


def test_no_access_is_wider_than_its_address_is_aligned() -> None:
    ran = check("-m", "tests.gpu.ptx_alignment")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "accesses of _pack, _unpack_merge, direct_kernel; 0 too wide" in ran.stdout
    assert int(ran.stdout.split()[0]) > 1000


def test_a_wrong_belief_of_the_compiler_is_found() -> None:
    """The pack kernel as it was: D = 192 in bf16 makes rows of 97 words, and Triton stored four at once."""
    ran = check("-c", PLANTED)
    assert ran.returncode == 1, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "_pack ['send']: 16 bytes, aligned to 4: st.global.v4.b32" in ran.stdout
