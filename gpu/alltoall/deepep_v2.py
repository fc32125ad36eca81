"""DeepEP V2 behind `World.elastic` (needs torch, `deep_ep` 2 and its NCCL, and a device a rank).

Facts the code below relies on, with DeepEP 2.1.0: NCCL 2.30.7 has to be loaded before torch loads another one; without
a network card `EP_DISABLE_GIN=1` and no hybrid mode; the buffer is made for a number of tokens, a width and a top-k; each
`num_max_tokens_per_rank` is compiled on its own, by nvcc, with the first call that names it.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from dbo.errors import CaptureError, NotAvailable, refusal
from gpu.group import Exchanges
from gpu.probe import DEEPEP_V2, V2_NCCL, deep_ep_version, nccl_version

if TYPE_CHECKING:
    from gpu.device import GpuWorld

NAME = "deepep_v2"
LEAST_TOKENS = 4096
"""Tokens a rank that a buffer has room for, whatever the first call brings: there is one a process."""

_KEPT: dict[str, Any] = {}


def load() -> Any:
    """The library.

    Raises:
        NotAvailable: it is missing, another version, or the wrong NCCL is loaded.
    """
    os.environ.setdefault("EP_DISABLE_GIN", "1")
    which, why = deep_ep_version()
    if which != "V2":
        found = f"DeepEP {which}" if which else why or "nothing"
        raise NotAvailable(refusal("backend deepep_v2 needs DeepEP V2", f"install {DEEPEP_V2}", found=found))
    loaded = nccl_version()
    if loaded[:3] != V2_NCCL:
        needed, found = (".".join(map(str, version)) for version in (V2_NCCL, loaded))
        rule = "DeepEP V2 runs with the NCCL it was compiled against"
        raise NotAvailable(refusal(rule, f"load NCCL {needed} before torch (LD_PRELOAD)", nccl=found))
    return importlib.import_module("deep_ep")


class DeepEPElastic:
    """`deep_ep.ElasticBuffer`, made with the first dispatch; every method is the library's."""

    def __init__(self, world: GpuWorld, process_group: Any) -> None:
        if process_group is None:
            rule = "DeepEP V2 runs over NCCL, which refuses two ranks on one device"
            raise NotAvailable(refusal(rule, "use one device a rank, or a DeepEP V1 backend", device=world.device))
        self.world = world
        self.library = load()
        self.process_group = process_group
        self._exchanges = Exchanges(world, NAME)

    def buffer_for(self, tokens: int, hidden: int, num_topk: int) -> Any:
        """The process's buffer; a collective call when there is none yet, or only a smaller one.

        Raises:
            CaptureError: it would have to be made inside a capture.
        """
        buffer, made_for = _KEPT.get(NAME, (None, (LEAST_TOKENS, 0, 0)))
        asked = tuple(max(pair) for pair in zip((tokens, hidden, num_topk), made_for, strict=True))
        if buffer is None or asked != made_for:
            if self.world.trace.capturing:
                rule = "the elastic buffer is made before a capture, since graphs keep its address"
                raise CaptureError(refusal(rule, "run the largest step once before", made_for=made_for, asked=asked))
            if buffer is not None:
                buffer.destroy()  # graphs with its address are those of a smaller model, of a run that has ended
            buffer = self.library.ElasticBuffer(
                self.process_group, num_max_tokens_per_rank=asked[0], hidden=asked[1], num_topk=asked[2],
                allow_hybrid_mode=False, explicitly_destroy=True,
            )  # fmt: skip
            _KEPT[NAME] = buffer, asked
        return buffer

    def dispatch(self, x: torch.Tensor, *, topk_idx: torch.Tensor, num_max_tokens_per_rank: int, **options: Any) -> Any:
        buffer = self.buffer_for(num_max_tokens_per_rank, x.shape[1], topk_idx.shape[1])
        with self._exchanges.of_rows("dispatch", x):
            return buffer.dispatch(x, topk_idx=topk_idx, num_max_tokens_per_rank=num_max_tokens_per_rank, **options)

    def combine(self, x: torch.Tensor, handle: Any, **options: Any) -> Any:
        buffer, _ = _KEPT[NAME]
        with self._exchanges.of_rows("combine", x):
            return buffer.combine(x, handle, **options)
