"""DeepEP V2 behind `World.elastic` (needs torch, `deep_ep` 2 and its NCCL, and a device a rank).

Facts the code below relies on, with DeepEP 2.1.0: NCCL 2.30.7 has to be loaded before torch loads another one; without
a network card `EP_DISABLE_GIN=1` and no hybrid mode; the buffer is made for a number of tokens, a width and a top-k; each
`num_max_tokens_per_rank` is compiled on its own, by nvcc, with the first call that names it.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dbo.errors import ConfigError, NotAvailable
from gpu.group import Exchanges
from gpu.probe import DEEPEP_V2, V2_NCCL, deep_ep_version, nccl_version

if TYPE_CHECKING:
    from gpu.device import GpuWorld

NAME = "deepep_v2"
LEAST_TOKENS = 4096
"""Tokens a rank that a buffer has room for at least: there is one a process, and small runs one after another share it."""


class Room(NamedTuple):
    """What a buffer has room for: tokens a rank, elements of a row, experts a token."""

    tokens: int
    hidden: int
    num_topk: int

    def holds(self, other: Room) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


_KEPT: dict[str, tuple[Any, Room]] = {}


def load() -> Any:
    """The library.

    Raises:
        NotAvailable: it is missing, another version, or the wrong NCCL is loaded.
    """
    os.environ.setdefault("EP_DISABLE_GIN", "1")
    which, why = deep_ep_version()
    if which != "V2":
        found = f"DeepEP {which}" if which else why or "nothing"
        raise NotAvailable.of("backend deepep_v2 needs DeepEP V2", fix=f"install {DEEPEP_V2}", found=found)
    loaded = nccl_version()
    if loaded[:3] != V2_NCCL:
        needed, found = (".".join(map(str, version)) for version in (V2_NCCL, loaded))
        rule = "DeepEP V2 runs with the NCCL it was compiled against"
        raise NotAvailable.of(rule, fix=f"load NCCL {needed} before torch (LD_PRELOAD)", nccl=found)
    return importlib.import_module("deep_ep")


class DeepEPElastic:
    """`deep_ep.ElasticBuffer`, one a process; `dispatch` and `combine` are the library's."""

    def __init__(self, world: GpuWorld, process_group: Any) -> None:
        if process_group is None:
            rule = "DeepEP V2 runs over NCCL, which refuses two ranks on one device"
            raise NotAvailable.of(rule, fix="use one device a rank, or a DeepEP V1 backend", device=world.device)
        self.world = world
        self.library = load()
        self.process_group = process_group
        self._exchanges = Exchanges(world, NAME)

    def reserve(self, *, tokens: int, hidden: int, num_topk: int) -> None:
        """Make the process's buffer, for steps of so many tokens a rank. A collective call, before the first exchange."""
        kept = _KEPT.get(NAME)
        asked = Room(tokens=max(tokens, LEAST_TOKENS), hidden=hidden, num_topk=num_topk)
        if kept is not None:
            buffer, room = kept
            if room.holds(asked):
                return
            torch.cuda.synchronize(self.world.device)
            buffer.destroy()  # of a smaller model's run, which has ended, and its graphs with it
            asked = Room(*map(max, asked, room))
        buffer = self.library.ElasticBuffer(
            self.process_group,
            num_max_tokens_per_rank=asked.tokens,
            hidden=asked.hidden,
            num_topk=asked.num_topk,
            allow_hybrid_mode=False,
            explicitly_destroy=True,
        )
        _KEPT[NAME] = buffer, asked

    def dispatch(self, x: torch.Tensor, *, topk_idx: torch.Tensor, num_max_tokens_per_rank: int, **options: Any) -> Any:
        buffer, room = _KEPT.get(NAME, (None, Room(0, 0, 0)))
        asked = Room(num_max_tokens_per_rank, x.shape[1], topk_idx.shape[1])
        if not room.holds(asked):
            rule = "the elastic buffer has room for the largest step before the first exchange, since graphs keep its address"
            raise ConfigError.of(rule, fix="reserve it", reserved=tuple(room), asked=tuple(asked))
        with self._exchanges.of_rows("dispatch", x):
            return buffer.dispatch(x, topk_idx=topk_idx, num_max_tokens_per_rank=num_max_tokens_per_rank, **options)

    def combine(self, x: torch.Tensor, handle: Any, **options: Any) -> Any:
        buffer, _ = _KEPT[NAME]
        with self._exchanges.of_rows("combine", x):
            return buffer.combine(x, handle, **options)
