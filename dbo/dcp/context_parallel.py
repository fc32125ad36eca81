"""Needs torch. `ContextParallel` over torch tensors: one of the three exchanges, and the group's sums and gathers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dbo.dcp.collectives import ag_rs
from dbo.dcp.exchange import PackKernels, dcp_a2a_lse_reduce
from dbo.dcp.groups import DCPGroup
from dbo.dcp.interface import DCPShape
from dbo.dcp.packing import lse_pack_dim
from dbo.dcp.workspace import Slot, WorkspaceManager

LANE = "dcp"


class SummingGroup(DCPGroup, Protocol):
    """A group that can also sum and gather for the model."""

    def all_reduce(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """The sum over the ranks of `input`, the same bits everywhere."""

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Every rank's `input` [...], stacked in rank order in `output` [C, ...]."""


class Direct(Protocol):
    """`a2a_direct` in this world; `ubatch` chooses the regions."""

    def reduce(
        self, out_THD: torch.Tensor, lse_TH: torch.Tensor, seq_lens: Any, query_start_loc: Any, *, ubatch: int
    ) -> torch.Tensor:
        """`[T, H / C, D]`."""


class TorchContextParallel:
    """See `dbo.dcp.interface.ContextParallel`. The staging is reserved for the largest (u)batch and locked at once."""

    def __init__(
        self,
        shape: DCPShape,
        group: SummingGroup,
        *,
        workspace: WorkspaceManager,
        kernels: PackKernels,
        current_ubatch: Callable[[], int],
        direct: Direct | None = None,
    ) -> None:
        self.group = group
        self.size, self.rank = shape.size, group.rank
        self.workspace = workspace
        self._backend, self._kernels, self.direct = shape.backend, kernels, direct
        self._current_ubatch = current_ubatch
        if shape.backend == "a2a":
            dtype = getattr(torch, shape.dtype)
            row = (shape.heads // shape.size, shape.head_dim + lse_pack_dim(dtype))
            spec = ((shape.size, shape.max_rows, *row), dtype)
            for ubatch in range(shape.num_ubatches):
                workspace.get_simultaneous(spec, spec, slot=Slot(ubatch, LANE), caller="TorchContextParallel")
        workspace.lock()

    def reduce_heads(
        self, out_THD: torch.Tensor, lse_TH: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        ubatch = self._current_ubatch()
        mask = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
        if self.direct is not None:
            return self.direct.reduce(out_THD, lse_TH, seq_lens, query_start_loc, ubatch=ubatch)
        if self._backend == "a2a":
            merged = dcp_a2a_lse_reduce(
                out_THD,
                lse_TH,
                self.group,
                **mask,
                workspace=self.workspace,
                slot=Slot(ubatch, LANE),
                kernels=self._kernels,
            )
        else:
            merged = ag_rs(out_THD, lse_TH, self.group, **mask)
        assert isinstance(merged, torch.Tensor)
        return merged

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.empty_like(x)
        self.group.all_reduce(total, x)
        return total

    def all_gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((self.size, *rows.shape), dtype=rows.dtype, device=rows.device)
        self.group.all_gather_into_tensor(gathered, rows)
        return gathered.flatten(0, 1)

    def staging(self, graph: str) -> AbstractContextManager[None]:
        return self.workspace.capturing(graph)
