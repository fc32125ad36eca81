"""Needs torch. The group of an exchange: a `torch.distributed` group, or anything that has the same methods.

A `DCPGroup` names its size, the caller's place in it, and a process group. A group that brings its own collectives (the
simulator's, a test's) has methods spelt as torch spells them; they win over the process group.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist


class DCPGroup(Protocol):
    """The C ranks that share the keys of a request.

    Attributes:
        world_size: C.
        rank: the caller's place in the group, 0 … C - 1.
        device_group: a `torch.distributed` process group, unless the group has collectives of its own.
    """

    @property
    def world_size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def device_group(self) -> Any: ...


def all_to_all_single(output: torch.Tensor, input: torch.Tensor, group: DCPGroup) -> None:
    """Send chunk c of `input` to rank c; chunk c of `output` comes from rank c. Both contiguous, axis 0 is C long."""
    own = getattr(group, "all_to_all_single", None)
    if own is not None:
        own(output, input)
    else:
        dist.all_to_all_single(output, input, group=group.device_group)


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group: DCPGroup) -> None:
    """Every rank's `input` [...], stacked in rank order in `output` [C, ...]."""
    own = getattr(group, "all_gather_into_tensor", None)
    if own is not None:
        own(output, input)
    else:
        # Some back ends want the ranks concatenated on axis 0, so hand over flat views: same bytes, no shape to
        # misread.
        dist.all_gather_into_tensor(output.view(-1), input.view(-1), group=group.device_group)


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group: DCPGroup) -> None:
    """Sum over the ranks of chunk c of `input` [C, ...], delivered to rank c in `output` [...]."""
    own = getattr(group, "reduce_scatter_tensor", None)
    if own is not None:
        own(output, input)
    else:
        dist.reduce_scatter_tensor(output.view(-1), input.view(-1), group=group.device_group)
