"""The arithmetic of flat exchanges on simulated tensors (needs torch): rows by (source rank, token), sums by source rank.

Everything here runs when the device work that it belongs to runs, on the CPU twins of device tensors. So a kernel that is not
ordered after its producer reads poison, or what was there before, as on a device; indices read that way are kept in range.

T tokens here, N received rows, R ranks, E experts, L = E / R, K experts a token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sim import tensors

if TYPE_CHECKING:
    from sim.world import SimWorld

Block = tuple[Tensor, ...]


class NumericFlatPayload:
    """Makes the pieces of one rank's calls."""

    def __init__(self, world: SimWorld) -> None:
        self.rank, self.ranks = world.rank, world.size

    def empty(self, shape: Sequence[int], dtype: str, name: str) -> Tensor:
        return tensors.poisoned_empty(shape, getattr(torch, dtype), self.rank, name)

    def dtype_of(self, array: Tensor) -> str:
        return str(array.dtype).removeprefix("torch.")

    def layout(self, topk_ids: Tensor, per_rank: Tensor, per_expert: Tensor, in_rank: Tensor) -> Callable[[], None]:
        """`[R]`, `[E]` and `[T, R]` from ids `[T, K]`."""
        ids, by_rank, by_expert, member = map(tensors.raw, (topk_ids, per_rank, per_expert, in_rank))

        @torch.inference_mode()
        def run() -> None:
            by_expert.copy_(_per_expert(ids, len(by_expert)))
            member.copy_(_in_rank(ids, self.ranks, len(by_expert) // self.ranks))
            by_rank.copy_(member.sum(0))

        return run

    def counts(self, topk_ids: Tensor, per_rank: Tensor, per_expert: Tensor) -> CountMember:
        """What this rank tells the others before a dispatch, from a layout."""
        by_rank, by_expert = tensors.raw(per_rank), tensors.raw(per_expert)
        return CountMember(topk_ids.shape[0], self.ranks, lambda: (by_rank, by_expert))

    def counts_of(self, topk_ids: Tensor, num_experts: int) -> CountMember:
        """The same without a layout."""
        ids = tensors.raw(topk_ids)

        def count() -> tuple[Tensor, Tensor]:
            return _in_rank(ids, self.ranks, num_experts // self.ranks).sum(0), _per_expert(ids, num_experts)

        return CountMember(topk_ids.shape[0], self.ranks, count)

    def rows(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, in_rank: Tensor | None, local: int) -> RowMember:
        return RowMember(x, topk_ids, topk_weights, in_rank, self.ranks, local)

    def write_ends(self, ends: Tensor) -> Callable[[list[int]], None]:
        """Writes the running count of received rows `[R]`."""
        into = tensors.raw(ends)

        @torch.inference_mode()
        def write(counts: list[int]) -> None:
            into.copy_(torch.tensor(counts).cumsum(0))

        return write

    def receive(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, source: Tensor, token: Tensor, *, clean: bool
    ) -> Callable[[list[Block]], None]:
        """Writes blocks into `[N, …]` outputs, by source rank. Rows past the last one keep what they hold.

        With `clean` their ids become -1, and weights of experts elsewhere 0.
        """
        outputs = [tensors.raw(t) for t in (x, topk_ids, topk_weights, token, source)]

        @torch.inference_mode()
        def write(blocks: list[Block]) -> None:
            at, room = 0, len(outputs[0])
            for peer, block in enumerate(blocks):
                n = min(len(block[0]), room - at)
                for out, values in zip(outputs, (*block, torch.full((n,), peer)), strict=True):
                    out[at : at + n] = values[:n]
                at += n
            # Combine knows how many rows are real (a prefix sum in the handle), whatever an earlier replay left behind.
            outputs[4][at:] = -1
            if clean:
                outputs[1][at:] = -1
                outputs[2][:at].masked_fill_(outputs[1][:at] < 0, 0.0)

        return write

    def results(self, x: Tensor, source: Tensor, token: Tensor) -> ResultMember:
        return ResultMember(x, source, token)

    def reduce(self, combined: Tensor) -> Callable[[list[Block]], None]:
        """Writes `[T, H]`: the sum over blocks in order of rank, without weights, in fp32."""
        into = tensors.raw(combined)

        @torch.inference_mode()
        def write(blocks: list[Block]) -> None:
            total = torch.zeros(into.shape, dtype=torch.float32)
            for rows, token in blocks:
                total.index_add_(0, token.long() % max(len(into), 1), rows.float())
            into.copy_(total)

        return write


class CountMember:
    """How many rows a rank sends to each peer, and to each of its experts."""

    def __init__(self, tokens: int, ranks: int, count: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._tokens, self._ranks, self._count = tokens, ranks, count

    @torch.inference_mode()
    def block(self, peer: int) -> int:
        return min(max(int(self._count()[0][peer]), 0), self._tokens)

    @torch.inference_mode()
    def experts(self, peer: int) -> list[int]:
        by_expert = self._count()[1].view(self._ranks, -1)[peer]
        return [int(n) for n in by_expert]


class RowMember:
    """The rows that a rank dispatches."""

    def __init__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, in_rank: Tensor | None, ranks: int, local: int
    ) -> None:
        self._x, self._ids, self._weights = tensors.raw(x), tensors.raw(topk_ids), tensors.raw(topk_weights)
        self._in_rank = None if in_rank is None else tensors.raw(in_rank)
        self._ranks, self._local = ranks, local

    @torch.inference_mode()
    def block(self, peer: int) -> Block:
        """(x, ids local to `peer` or -1, weights, tokens) of its rows."""
        member = _in_rank(self._ids, self._ranks, self._local) if self._in_rank is None else self._in_rank
        tokens = member[:, peer].nonzero().flatten()
        local = self._ids[tokens] - peer * self._local
        here = (local >= 0) & (local < self._local)
        return self._x[tokens], local.masked_fill(~here, -1), self._weights[tokens], tokens


class ResultMember:
    """The experts' results that a rank sends back."""

    def __init__(self, x: Tensor, source: Tensor, token: Tensor) -> None:
        self._x, self._source, self._token = tensors.raw(x), tensors.raw(source), tensors.raw(token)

    @torch.inference_mode()
    def block(self, peer: int) -> Block:
        """(rows, tokens) of the rows that came from `peer`."""
        mine = self._source == peer
        return self._x[mine], self._token[mine]


def _in_rank(ids: Tensor, ranks: int, local: int) -> Tensor:
    owner = ids.div(local, rounding_mode="floor").masked_fill(ids < 0, -1)
    return (owner[:, :, None] == torch.arange(ranks)).any(1)


def _per_expert(ids: Tensor, num_experts: int) -> Tensor:
    return (ids[:, :, None] == torch.arange(num_experts)).sum((0, 1))
