"""Needs torch and Triton, no device. Compiles the kernels for one; compares how wide each access is with how far its
address is aligned.

Triton decides on wide accesses from what it believes of divisibilities, and it can be wrong; a CPU never notices, a
device stops with "misaligned address". The interpreter does not see it either, so this reads the PTX: for every
access to global memory, which argument its address comes from and how many bytes it moves at once. How far those
addresses are aligned is computed here from the shapes.

Run as a program (the interpreter, once chosen, cannot compile): prints one line for each access that is too wide, and
how many it has looked at.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dbo.dcp import lse_pack_dim
from dbo.dcp.direct import DirectLayout
from gpu.kernels.exchange import DirectExchange, ExchangeTuning, new_region
from gpu.kernels.packed import TritonKernels

WIDEST_BYTES = 16
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((2, 37, 3, 80), (4, 33, 2, 96), (2, 1, 1, 7), (2, 64, 4, 192))  # C, B, N, D

_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?(?P<op>[a-z][\w.:]*)\s+(?P<rest>.*);")
_REGISTER = re.compile(r"%rd\d+")


@dataclass(frozen=True)
class Access:
    """One access to global memory: the arguments and constants that its address is made of, and its width."""

    roots: frozenset[str]
    nbytes: int
    text: str


def accesses(ptx: str, pointers: dict[int, str], constants: dict[str, int]) -> Iterator[Access]:
    """Follow 64-bit registers from pointer arguments to addresses.

    Args:
        pointers: number of the kernel's parameter -> name. An address loaded through one named "peers" is "region".
        constants: name -> number: an address that had this number added has this root, too.
    """
    lines = [m for m in map(_LINE.match, ptx.splitlines()) if m is not None]
    numbers = {str(value): name for name, value in constants.items()}
    roots: dict[str, set[str]] = {}
    while True:
        before = sum(map(len, roots.values()))
        for line in lines:
            op, rest = line["op"], line["rest"]
            registers = _REGISTER.findall(rest)
            if op.startswith("ld.param"):
                number = re.search(r"param_(\d+)", rest)
                if registers and number and int(number[1]) in pointers:
                    roots.setdefault(registers[0], set()).add(pointers[int(number[1])])
            elif op.startswith(("ld.", "st.", "atom.", "red.")):
                address = re.search(r"\[\s*(%rd\d+)", rest)
                if op.startswith("ld.global") and address and "peers" in roots.get(address[1], ()):
                    for target in registers[: registers.index(address[1])]:
                        roots.setdefault(target, set()).add("region")
            elif registers and not op.startswith("setp"):
                found = {root for source in registers[1:] for root in roots.get(source, ())}
                found |= {numbers[n] for n in re.findall(r"(?<![%\w])-?\d+", rest) if n in numbers}
                roots.setdefault(registers[0], set()).update(found)
        if sum(map(len, roots.values())) == before:
            break
    for line in lines:
        op, rest = line["op"], line["rest"]
        if re.match(r"(ld|st|atom|red)\.(?!param|shared)[\w.:]*", op) and (
            "global" in op or op.startswith(("atom", "red"))
        ):
            address = re.search(r"\[\s*(%rd\d+)", rest)
            if address is None:
                continue
            lanes = re.search(r"\.v(\d)", op)
            bits = re.findall(r"\.[bsuf](\d+)", op)[-1]
            width = int(bits) // 8 * (int(lanes[1]) if lanes else 1)
            yield Access(frozenset(roots.get(address[1], ())), width, f"{op} {rest}")


def aligned(*nbytes: int) -> int:
    """The widest access, in bytes, that fits all these steps of an address; 0 is any step."""
    return math.gcd(WIDEST_BYTES, *nbytes)


class Unlaunched:
    """Stands for a compiled kernel: whoever launches it for a grid launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: None


class Compiler:
    """Stands for a device: what would be launched is compiled, and its accesses are kept."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, dict[str, Any], str]] = []

    def install(self) -> None:
        driver = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
        triton.runtime.driver.set_active(driver)
        original = JITFunction.run
        keep = self.compiled

        def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **meta: Any) -> Any:
            made = original(kernel, *args, grid=grid, warmup=True, **meta)
            names = dict(zip(kernel.arg_names, args, strict=False)) | meta
            keep.append((kernel.__name__, names, made.asm["ptx"]))
            return Unlaunched()

        JITFunction.run = run


def pointer_numbers(names: dict[str, Any]) -> dict[int, str]:
    """The kernel's parameters as PTX numbers them: constants (and integers that are 1) are none."""
    passed = [n for n, v in names.items() if isinstance(v, torch.Tensor) or (isinstance(v, int) and not n.isupper())]
    passed = [
        n for n in passed if isinstance(names[n], torch.Tensor) or (n not in ("num_warps",) and not _is_one(n, names))
    ]
    return {i: n for i, n in enumerate(passed) if isinstance(names[n], torch.Tensor)}


def _is_one(name: str, names: dict[str, Any]) -> bool:
    return names[name] == 1 and name.startswith("stride")


def limits(kernel: str, names: dict[str, Any]) -> dict[str, int]:
    """Argument -> the widest access that its addresses allow, from the shapes alone."""
    found: dict[str, int] = {}
    for name in ("seq_lens", "query_start_loc", "peers", "state"):
        if name in names:
            found[name] = names[name].element_size()
    lse = names.get("lse")
    if lse is not None:
        size = lse.element_size()
        heads = names["H"] if "H" in names else names["N"]
        row, head = names["stride_lse_row"], names["stride_lse_head"]
        by_head = aligned(lse.data_ptr(), row * size, heads * size) if head == 1 else size
        by_row = aligned(lse.data_ptr(), head * size) if row == 1 and heads == 1 else size
        found["lse"] = max(by_head, by_row)
    dim = names["D"]
    if kernel == "_pack":
        found |= _source(names, "out", "stride_out")
        found["send"] = aligned((dim + names["L"]) * names["send"].element_size())
    else:
        found["merged"] = aligned(names["merged"].data_ptr(), dim * names["merged"].element_size())
        found["merged_lse"] = aligned(names["merged_lse"].data_ptr())
    if kernel == "_unpack_merge":
        found["recv"] = aligned((dim + names["L"]) * names["recv"].element_size())
    if kernel == "direct_kernel":
        found |= _source(names, "raw", "stride")
        found["region"] = 8
        found["DATA_OFFSET"] = aligned(dim * names["raw"].element_size())
        found["LSE_OFFSET"] = aligned(names["TILE_R"] * 4)
    return found


def _source(names: dict[str, Any], name: str, stride: str) -> dict[str, int]:
    size = names[name].element_size()
    steps = [names[f"{stride}_{axis}"] * size for axis in ("row", "head", "dim")]
    return {name: aligned(names[name].data_ptr(), *steps[:2]) if steps[2] == size else size}


def too_wide(kernel: str, names: dict[str, Any], ptx: str) -> tuple[int, list[str]]:
    """How many accesses were looked at, and those that are wider than their addresses allow or come from nowhere."""
    constants = {name: names[name] for name in ("DATA_OFFSET", "LSE_OFFSET") if name in names}
    allowed, bad, count = limits(kernel, names), [], 0
    for access in accesses(ptx, pointer_numbers(names), constants):
        count += 1
        # A constant says which part of a region it is; the region itself says no more than that.
        roots = access.roots - {"region"} if access.roots & constants.keys() else access.roots
        width = min((allowed[root] for root in roots if root in allowed), default=0)
        if access.nbytes > width:
            bad.append(f"{kernel} {sorted(access.roots)}: {access.nbytes} bytes, aligned to {width}: {access.text}")
    return count, bad


def inputs(shape: tuple[int, ...], dtype: torch.dtype, strided: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A partial output and its LSE: dense, rows of a wider tensor that begin at an odd place, or every other column."""
    world, rows, heads, dim = shape
    if strided == "no":
        return torch.zeros(rows, world * heads, dim, dtype=dtype), torch.zeros(rows, world * heads)
    wide = torch.zeros(rows, world * heads, 2 * dim + 6, dtype=dtype)
    out = wide[..., 3 : dim + 3] if strided == "odd" else wide[..., 1 : 2 * dim + 1 : 2]
    lse = (
        torch.zeros(rows, world * heads + 2)[:, : world * heads]
        if strided == "odd"
        else torch.zeros(world * heads, rows).t()
    )
    return out, lse


def run_kernels() -> None:
    """Every kernel over shapes, dtypes, strides, masks and sizes of blocks."""
    kernels = TritonKernels()
    larger = TritonKernels(pack_bytes=16384, num_warps=4)
    for shape in SHAPES:
        world, rows, heads, dim = shape
        layout = DirectLayout(world_size=world, max_rows=rows * heads, row_bytes=dim * 4)
        region = new_region(layout, "cpu")
        end = DirectExchange(
            layout=layout,
            rank=0,
            region=region,
            peer_addresses=[region.data_ptr()] * world,
            tuning=ExchangeTuning(programs=2),
        )
        for dtype in DTYPES:
            for strided in ("no", "odd", "columns"):
                out, lse = inputs(shape, dtype, strided)
                mask = (torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
                send = torch.zeros(world, rows, heads, dim + lse_pack_dim(dtype), dtype=dtype)
                for each in (kernels, larger):
                    each.pack(out, lse, send, *(mask if strided == "odd" else (None, None)))
                end.launch(out, lse, seq_lens=mask[0], query_start_loc=mask[1])
            kernels.unpack_merge(send, dim, True)


def main() -> int:
    compiler = Compiler()
    compiler.install()
    run_kernels()
    looked_at, bad = 0, list[str]()
    for kernel, names, ptx in compiler.compiled:
        count, wide = too_wide(kernel, names, ptx)
        looked_at, bad = looked_at + count, bad + wide
    for line in dict.fromkeys(bad):
        sys.stdout.write(line + "\n")
    kernels = sorted({kernel for kernel, *_ in compiler.compiled})
    sys.stdout.write(f"{looked_at} accesses of {', '.join(kernels)}; {len(bad)} too wide\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
