"""What the model's tests share: a local MoE kernel, a paged cache with scattered blocks, a recording player."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dbo.model.config import ModelConfig, load_model_config
from dbo.model.deepseek_v2 import DeepseekV2ForCausalLM
from dbo.model.loader import load_weights
from dbo.model.router import Router
from dbo.moe.interface import ExpertInputs
from dbo.ubatching.forward_context import ForwardContext, override_forward_context

SMALL = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 16}


class LocalKernel:
    """All experts on this rank, no exchange."""

    def __init__(
        self, *, layer: int, prepare_finalize: Any, experts: Any, shared_experts: Callable[[Any], Any]
    ) -> None:
        self.layout, self.experts, self.shared_experts = prepare_finalize.layout, experts, shared_experts
        self.routed: list[torch.Tensor] = []

    def input_buffer(self, like: torch.Tensor) -> None:
        return None

    def parts(self, hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *, layer: int) -> Any:
        self.routed.append(topk_ids)
        shared = self.shared_experts(hidden)
        if self.layout == "flat":
            inputs = ExpertInputs(layout="flat", x=hidden, topk_ids=topk_ids, topk_weights=topk_weights)
            return self.experts.apply(inputs), shared
        num_local = self.experts.down.shape[0]
        everything = hidden.expand(num_local, *hidden.shape).contiguous()
        out_LMH = self.experts.apply(ExpertInputs(layout="batched", x=everything))
        rows = torch.arange(hidden.shape[0])[:, None]
        chosen = out_LMH[topk_ids.clamp(min=0), rows].float() * topk_weights[:, :, None]
        chosen = chosen.masked_fill((topk_ids < 0)[:, :, None], 0.0)
        return chosen.sum(1).to(hidden.dtype), shared


@dataclass
class RecordingPlayer:
    points: list[tuple[str, int]] = field(default_factory=list)

    def reach(self, point: str, *, layer: int) -> None:
        self.points.append((point, layer))

    def play(self, thunks: dict[str, Any], *, layer: int) -> None:
        raise AssertionError("the local kernel plays nothing")


def build_model(
    folder: Path, *, layout: str = "flat", dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> DeepseekV2ForCausalLM:
    config = load_model_config(folder)
    weights = {name: w.to(device) for name, w in load_weights(folder, config, dtype=dtype).items()}
    backend = SimpleNamespace(layout=layout)
    return DeepseekV2ForCausalLM(
        config, weights, make_prepare_finalize=lambda *, layer: backend, make_kernel=LocalKernel
    )


def empty_caches(config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Poisoned: whatever is read before it was written turns into NaN."""
    shape = (num_blocks, block_size, config.kv_cache_dim)
    return [torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.num_hidden_layers)]


class Paged:
    """Requests over a paged cache whose blocks are handed out in random order; block 0 is the null block."""

    def __init__(
        self,
        model: DeepseekV2ForCausalLM,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.block_size = model, block_size
        self.caches = empty_caches(model.config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.player = RecordingPlayer()

    def metadata(
        self, scheduled: Sequence[tuple[str, int]], *, pad_rows: int = 0, pad_reqs: int = 0
    ) -> SimpleNamespace:
        """`scheduled`: (request, number of tokens), in batch order."""
        positions, slots, starts = [], [], [0]
        for name, count in scheduled:
            begin = self.computed.get(name, 0)
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * self.block_size < begin + count:
                blocks.append(self.free.pop())
            for position in range(begin, begin + count):
                positions.append(position)
                slots.append(blocks[position // self.block_size] * self.block_size + position % self.block_size)
            starts.append(starts[-1] + count)
        seq_lens = [self.computed.get(name, 0) + count for name, count in scheduled] + [0] * pad_reqs
        widest = max([len(self.blocks[name]) for name, _ in scheduled], default=1)
        rows = [self.blocks[name] for name, _ in scheduled] + [[]] * pad_reqs
        table = [row + [0] * (widest - len(row)) for row in rows]
        num_tokens = starts[-1]
        starts += [num_tokens] * pad_reqs
        num_reqs = len(scheduled) + pad_reqs
        return SimpleNamespace(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=num_reqs,
            dcp_layout=None,
            num_actual_tokens=num_tokens,
            max_query_len=max([count for _, count in scheduled], default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table_tensor=torch.tensor(table, dtype=torch.int32).view(num_reqs, widest),
            slot_mapping=torch.tensor(slots + [0] * pad_rows, dtype=torch.int64),
            positions=torch.tensor(positions + [0] * pad_rows, dtype=torch.int64),
        )

    def step(
        self,
        scheduled: Sequence[tuple[str, Sequence[int]]],
        *,
        pad_rows: int = 0,
        pad_reqs: int = 0,
        pad_id: int = 0,
        pad_position: int = 0,
    ) -> torch.Tensor:
        """Run the tokens of each request; hidden states of all rows, padding included."""
        metadata = self.metadata([(n, len(ids)) for n, ids in scheduled], pad_rows=pad_rows, pad_reqs=pad_reqs)
        num_real = metadata.num_actual_tokens
        metadata.positions[num_real:] = pad_position
        ids = torch.tensor([i for _, row in scheduled for i in row] + [pad_id] * pad_rows, dtype=torch.int64)
        context = ForwardContext(attn_metadata=metadata, kv_caches=self.caches, player=self.player)
        with torch.inference_mode(), override_forward_context(context):
            hidden = self.model(input_ids=ids, positions=metadata.positions)
        for name, row in scheduled:
            self.computed[name] = self.computed.get(name, 0) + len(row)
        return hidden

    def logits(self, scheduled: Sequence[tuple[str, Sequence[int]]], **padding: int) -> dict[str, torch.Tensor]:
        """Logits of every scheduled token, by request."""
        counts = [len(ids) for _, ids in scheduled]
        with torch.inference_mode():
            logits = self.model.compute_logits(self.step(scheduled, **padding)[: sum(counts)])
        return dict(zip([name for name, _ in scheduled], logits.split(counts), strict=True))


@dataclass(frozen=True)
class Margins:
    """Smallest gap over rows, its first and second percentile, and its median."""

    least: float
    p01: float
    p02: float
    median: float

    @classmethod
    def of(cls, gaps: torch.Tensor) -> Margins:
        gaps = gaps.flatten().double()
        return cls(*(float(gaps.quantile(q)) for q in (0.0, 0.01, 0.02, 0.5)))


class RoutingGaps:
    """A router that also notes by how much the last chosen expert's score exceeds the next."""

    def __init__(self, router: Router) -> None:
        self.router, self.gaps = router, []

    def __call__(self, hidden: torch.Tensor, padding_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.router.top_k
        ordered = (hidden.float() @ self.router.weight.t()).softmax(-1).sort(dim=-1, descending=True).values
        self.gaps.append(ordered[:, k - 1] - ordered[:, k])
        return self.router(hidden, padding_rows)


def margins(model: DeepseekV2ForCausalLM, *, num_prompts: int, prompt_tokens: int, seed: int) -> dict[str, Margins]:
    """Gaps that decide: top-1 to top-2 logit, and K-th to next routing probability, on random byte prompts."""
    for layer in model.layers:
        if layer.mlp is None and not isinstance(layer.router, RoutingGaps):
            layer.router = RoutingGaps(layer.router)
    generator = torch.Generator().manual_seed(seed)
    blocks_each = -(-prompt_tokens // 16)
    paged = Paged(model, block_size=16, num_blocks=1 + num_prompts * blocks_each)
    prompts = torch.randint(0, 256, (num_prompts, prompt_tokens), generator=generator).tolist()
    logits = torch.cat(list(paged.logits([(str(i), ids) for i, ids in enumerate(prompts)]).values()))
    gaps = [gap for layer in model.layers if layer.mlp is None for gap in layer.router.gaps]
    best = logits.topk(2, dim=-1).values
    return {"logits": Margins.of(best[:, 0] - best[:, 1]), "routing": Margins.of(torch.cat(gaps))}
