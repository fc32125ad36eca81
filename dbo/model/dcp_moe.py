"""MoE rows of a DCP group: peers hold the same rows, each dispatches a share, all gather the results. Needs torch."""

from __future__ import annotations

import torch

from dbo.dcp.interface import ContextParallel, rows_of_peer


def own_rows(x: torch.Tensor, group: ContextParallel, *, fill: float | bool = 0.0) -> torch.Tensor:
    """This peer's S of T rows; past the last of them `fill`."""
    share = rows_of_peer(x.shape[0], group.size)
    missing = share * group.size - x.shape[0]
    if missing:
        x = torch.cat((x, torch.full((missing, *x.shape[1:]), fill, dtype=x.dtype, device=x.device)))
    return x[group.rank * share : (group.rank + 1) * share]


def all_rows(mine: torch.Tensor, group: ContextParallel, num_rows: int) -> torch.Tensor:
    """All T rows from every peer's S."""
    return group.all_gather_rows(mine)[:num_rows]
