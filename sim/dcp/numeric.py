"""The exchange of a DCP group on simulated tensors (needs torch): kernels, collectives and the direct path's values.

Everything here runs when the device work that it belongs to runs, on the CPU twins of device tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import sim.tensors.dispatch  # noqa: F401  # from here on there is a device "sim"
from dbo.dcp.exchange import TORCH_KERNELS
from dbo.dcp.merging import merge
from dbo.dcp.packing import empty_rows
from sim import tensors
from sim.dcp.group import Mover


class FusedKernels:
    """`dbo.dcp.exchange.PackKernels`, one kernel each, as on a device."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def pack(
        self,
        out_BHD: Tensor,
        lse_BH: Tensor,
        send_CBNP: Tensor,
        seq_lens: Tensor | None,
        query_start_loc: Tensor | None,
    ) -> None:
        reads = [t for t in (out_BHD, lse_BH, seq_lens, query_start_loc) if t is not None]
        out, lse, send = map(tensors.raw, (out_BHD, lse_BH, send_CBNP))
        mask = [None if t is None else tensors.raw(t) for t in (seq_lens, query_start_loc)]
        _submit("dcp.pack", reads, [send_CBNP], lambda: TORCH_KERNELS.pack(out, lse, send, *mask))

    def unpack_merge(self, recv_CBNP: Tensor, head_dim: int, is_lse_base_on_e: bool) -> tuple[Tensor, Tensor]:
        _, rows, heads, _ = recv_CBNP.shape
        merged = tensors.poisoned_empty((rows, heads, head_dim), recv_CBNP.dtype, self._rank, "merged")
        whole = tensors.poisoned_empty((rows, heads), torch.float32, self._rank, "merged_lse")
        recv, into, into_lse = map(tensors.raw, (recv_CBNP, merged, whole))

        def run() -> None:
            out, lse = TORCH_KERNELS.unpack_merge(recv, head_dim, is_lse_base_on_e)
            into.copy_(out), into_lse.copy_(lse)

        _submit("dcp.unpack_merge", [recv_CBNP], [merged, whole], run)
        return merged, whole


class NumericMoving:
    """What each collective takes from its input for a peer, and how it fills its output."""

    def all_to_all(self, output: Tensor, input: Tensor) -> Mover:
        return self._mover(output, input, lambda given, peer: given[peer], lambda got: torch.stack(got))

    def all_gather(self, output: Tensor, input: Tensor) -> Mover:
        return self._mover(output, input, lambda given, peer: given, lambda got: torch.stack(got))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Mover:
        return self._mover(output, input, lambda given, peer: given[peer], _sum)

    def all_reduce(self, output: Tensor, input: Tensor) -> Mover:
        return self._mover(output, input, lambda given, peer: given, _sum)

    def _mover(
        self,
        output: Tensor,
        input: Tensor,
        part: Callable[[Tensor, int], Tensor],
        join: Callable[[list[Tensor]], Tensor],
    ) -> Mover:
        given, into = tensors.raw(input), tensors.raw(output)

        @torch.inference_mode()
        def take(peer: int) -> Tensor:
            return part(given, peer).clone()

        @torch.inference_mode()
        def give(got: list[Tensor]) -> None:
            into.copy_(join(got).view(into.shape))

        return Mover(take, give)


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).float().sum(0)


class NumericDirect:
    """Values of the direct path."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def call(
        self, out_THD: Tensor, lse_TH: Tensor, seq_lens: Tensor, query_start_loc: Tensor, members: Sequence[int]
    ) -> NumericCall:
        rows, heads, dim = out_THD.shape
        merged = tensors.poisoned_empty((rows, heads // len(members), dim), out_THD.dtype, self._rank, "merged")
        out, lse, lens, starts = map(tensors.raw, (out_THD, lse_TH, seq_lens, query_start_loc))
        return NumericCall(merged, out, lse, (lens, starts), members, self._rank)


class NumericCall:
    """One exchange of one rank: `merged` is its result."""

    def __init__(
        self, merged: Tensor, out: Tensor, lse: Tensor, mask: tuple[Tensor, Tensor], members: Sequence[int], rank: int
    ) -> None:
        self.merged = merged
        self._into, self._out, self._lse, self._mask = tensors.raw(merged), out, lse, mask
        self._members, self._rank = members, rank

    @torch.inference_mode()
    def chunk(self, member: int) -> tuple[Tensor, Tensor]:
        """The heads of `member` and their LSE, as they are now."""
        heads = self._out.shape[1] // len(self._members)
        first = self._members.index(member) * heads
        empty = empty_rows(self._out.shape[0], *self._mask)
        lse = torch.where(empty[:, None], -math.inf, self._lse.float())
        return self._out[:, first : first + heads].clone(), lse[:, first : first + heads].clone()

    @torch.inference_mode()
    def merge(self, held: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Own part and what lies in the slabs, in order of peers. A slab that nobody has filled yet holds poison."""
        shape = self._into.shape
        poison = torch.full(shape, math.nan), torch.zeros(shape[:2])
        parts = [self.chunk(m) if m == self._rank else held.get(m, poison) for m in self._members]
        out = torch.stack([_rows(part.to(self._into.dtype), shape) for part, _ in parts])
        lse = torch.stack([_rows(part, shape[:2]) for _, part in parts])
        self._into.copy_(merge(out, lse)[0])


def _rows(part: Tensor, shape: Any) -> Tensor:
    """A slab may hold another exchange's rows; a device would read whatever lies there."""
    if part.shape == tuple(shape):
        return part
    flat = torch.zeros(math.prod(shape), dtype=part.dtype)
    n = min(flat.numel(), part.numel())
    flat[:n] = part.flatten()[:n]
    return flat.view(shape)


def _submit(name: str, reads: list[Tensor], writes: list[Tensor], work: Callable[[], None]) -> None:
    @torch.inference_mode()
    def run() -> None:
        work()

    tensors.submit_kernel(name, reads=reads, writes=writes, run=run)
