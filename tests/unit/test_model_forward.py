"""The forward pass: points, paging, padding, and that it never asks the device for a value."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dbo.errors import ConfigError
from dbo.model.config import load_model_config
from dbo.model.deepseek_v2 import DeepseekV2ForCausalLM
from dbo.model.generator import generate_model_folder
from dbo.model.loader import load_weights
from dbo.model.paging import plan_paged_batch
from dbo.moe.experts import make_experts
from dbo.moe.interface import ExpertInputs
from dbo.ubatching.forward_context import ForwardContext, override_forward_context
from tests.unit.model_harness import SMALL, LocalKernel, Paged, build_model

GENERATOR = torch.Generator().manual_seed(5)
PROMPT = torch.randint(0, 256, (21,), generator=GENERATOR).tolist()
OTHER = torch.randint(0, 256, (6,), generator=GENERATOR).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    generate_model_folder(path, seed=3, **SMALL)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> DeepseekV2ForCausalLM:
    return build_model(folder)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-4) -> None:
    assert (actual - expected).abs().max() <= relative * expected.abs().max()


def test_points_of_a_step(model: DeepseekV2ForCausalLM) -> None:
    paged = Paged(model)
    paged.step([("a", PROMPT)])
    assert paged.player.points == [(point, layer) for layer in range(4) for point in ("A0", "A1")]


@pytest.mark.parametrize("cut", [1, 4, 7, 20])
@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_a_prefill_in_two_chunks_equals_one(model: DeepseekV2ForCausalLM, cut: int, block_size: int) -> None:
    whole = Paged(model, block_size=block_size).step([("a", PROMPT)])
    paged = Paged(model, block_size=block_size)
    parts = [paged.step([("a", PROMPT[:cut])]), paged.step([("b", OTHER), ("a", PROMPT[cut:])])[len(OTHER) :]]
    assert_close(torch.cat(parts), whole)


def test_the_second_chunk_needs_the_first_ones_cache(model: DeepseekV2ForCausalLM) -> None:
    """The check above can fail: caches start as NaN, so a cache that was not written shows."""
    paged = Paged(model)
    paged.step([("a", PROMPT[:7])])
    for cache in paged.caches:
        cache.fill_(float("nan"))
    assert paged.step([("a", PROMPT[7:])]).isnan().all()


@pytest.mark.parametrize("fill", [0.0, 1e30, float("nan")])
@pytest.mark.parametrize("layout", ["flat", "batched"])
def test_padding_rows_never_influence_real_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fill: float, layout: str
) -> None:
    """Metamorphic: whatever fills the padding, real rows stay bit-equal and no padding row is routed."""
    model = build_model(folder, layout=layout)
    batch, padding = [("a", PROMPT), ("b", OTHER)], {"pad_rows": 5, "pad_reqs": 2}
    num_real = len(PROMPT) + len(OTHER)
    expected = Paged(model).step(batch, **padding)[:num_real]

    embed = model.embed

    def garbage(input_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([embed(input_ids)[:num_real], torch.full((5, 64), fill)])

    monkeypatch.setattr(model, "embed", garbage)
    found = Paged(model).step(batch, **padding, pad_id=-77, pad_position=10**6)
    assert torch.equal(found[:num_real], expected)
    assert not expected.isnan().any()
    for layer in model.layers[1:]:
        for topk_ids in layer.kernel.routed:
            assert (topk_ids[num_real:] == -1).all() and (topk_ids[:num_real] >= 0).all()


def test_attention_of_padding_rows_is_zero(model: DeepseekV2ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for layer in model.layers:
        attend = layer.attention.attend
        monkeypatch.setattr(
            layer.attention, "attend", lambda *args, attend=attend: outputs.append(attend(*args)) or outputs[-1]
        )
    Paged(model).step([("a", OTHER)], pad_rows=3)
    assert len(outputs) == 4
    assert all((out[:6] != 0).any(-1).all() and (out[6:] == 0).all() for out in outputs)


@pytest.mark.parametrize("bounds", [{"num_actual_tokens": 9}, {"query_start_loc": torch.tensor([0, 9])}])
def test_both_bounds_tell_padding(model: DeepseekV2ForCausalLM, bounds: dict[str, object]) -> None:
    """A captured graph has the bucket as its host bound, and the device's offsets tell the padding; or the reverse."""
    metadata = Paged(model).metadata([("a", 6)], pad_rows=3)
    plan = plan_paged_batch(SimpleNamespace(**(vars(metadata) | bounds)), metadata.positions, block_size=4)
    assert plan.padding_rows.flatten().tolist() == [False] * 6 + [True] * 3


def test_rows_and_padded_queries_are_inverse(model: DeepseekV2ForCausalLM) -> None:
    """Ragged requests, an empty one among them: each row finds its query, and each query its row."""
    paged = Paged(model)
    metadata = paged.metadata([("a", 3), ("b", 0), ("c", 5), ("d", 1)], pad_rows=2, pad_reqs=1)
    plan = plan_paged_batch(metadata, metadata.positions, block_size=4)
    assert plan.query_rows[plan.row_queries[:9]].tolist() == list(range(9))
    assert (plan.row_queries[:9] // metadata.max_query_len).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 3]


def test_padding_does_not_change_results(model: DeepseekV2ForCausalLM) -> None:
    batch = [("a", PROMPT), ("b", OTHER)]
    bare = Paged(model).step(batch)
    padded = Paged(model).step(batch, pad_rows=9, pad_reqs=3)
    assert_close(padded[: bare.shape[0]], bare)


@pytest.mark.parametrize(("pad_rows", "pad_reqs"), [(4, 0), (4, 2), (1, 1), (0, 0)])
def test_an_idle_rank_takes_part(model: DeepseekV2ForCausalLM, pad_rows: int, pad_reqs: int) -> None:
    paged = Paged(model)
    for layer in model.layers[1:]:
        layer.kernel.routed.clear()
    assert paged.step([], pad_rows=pad_rows, pad_reqs=pad_reqs).shape == (pad_rows, 64)
    assert len(paged.player.points) == 8
    assert all((ids == -1).all() for layer in model.layers[1:] for ids in layer.kernel.routed)


def test_bf16_stays_near_fp32(folder: Path, model: DeepseekV2ForCausalLM) -> None:
    """Same expert choices are not guaranteed in bf16, so most rows, not all, must be near."""
    exact = Paged(model).logits([("a", PROMPT)])["a"]
    half = Paged(build_model(folder, dtype=torch.bfloat16), dtype=torch.bfloat16).logits([("a", PROMPT)])["a"]
    assert half.dtype == torch.float32
    errors = (half - exact).abs().amax(-1) / exact.abs().max()
    assert errors.median() < 0.05


@pytest.mark.parametrize("scheduled", [[("a", 9), ("b", 1)], []])
def test_nothing_is_read_from_the_device(folder: Path, scheduled: list[tuple[str, int]]) -> None:
    """On `meta` there are no values: an `.item()`, a `nonzero`, a boolean index or a copy to the host would raise."""
    model = build_model(folder, device="meta")
    on_host = Paged(model)
    metadata = on_host.metadata(scheduled, pad_rows=3, pad_reqs=1)
    fields = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in vars(metadata).items()}
    context = ForwardContext(
        attn_metadata=SimpleNamespace(**fields),
        kv_caches=[cache.to("meta") for cache in on_host.caches],
        player=on_host.player,
    )
    num_rows = fields["positions"].shape[0]
    with torch.inference_mode(), override_forward_context(context):
        hidden = model(input_ids=torch.zeros(num_rows, dtype=torch.int64, device="meta"), positions=fields["positions"])
    assert hidden.device.type == "meta" and hidden.shape == (num_rows, 64)
    assert model.compute_logits(hidden).shape == (num_rows, 259)


def test_experts_of_two_ranks_add_up() -> None:
    """Each half of the experts, with the other half's ids as -1, sums to the whole; an unrouted NaN row gives 0."""
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(4, 12, 8, generator=generator), torch.randn(4, 6, 8, generator=generator)
    x, weights = torch.randn(5, 8, generator=generator), torch.rand(5, 2, generator=generator)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [-1, -1]])
    x[4] = float("nan")
    whole = make_experts("flat", gate_up, down).apply(
        ExpertInputs(layout="flat", x=x, topk_ids=ids, topk_weights=weights)
    )
    parts = []
    for first in (0, 2):
        local = (ids - first).masked_fill((ids < first) | (ids >= first + 2), -1)
        experts = make_experts("flat", gate_up[first : first + 2], down[first : first + 2])
        parts.append(experts.apply(ExpertInputs(layout="flat", x=x, topk_ids=local, topk_weights=weights)))
    by_hand = torch.zeros(4, 8)
    for row in range(4):
        for k in range(2):
            gate, up = (gate_up[ids[row, k]] @ x[row]).chunk(2)
            by_hand[row] += weights[row, k] * ((torch.nn.functional.silu(gate) * up) @ down[ids[row, k]])
    torch.testing.assert_close(whole[:4], by_hand, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts[0][:4] + parts[1][:4], by_hand, rtol=1e-4, atol=1e-4)
    assert (whole[4] == 0).all() and (parts[0][1] != 0).any() and (parts[0][4] == 0).all()


def test_weights_of_another_expert_split_are_refused(folder: Path) -> None:
    config = load_model_config(folder)
    weights = load_weights(folder, config, ep_rank=0, ep_size=2, dtype=torch.float32)
    with pytest.raises(ConfigError, match="experts=4, ep_size=4"):
        DeepseekV2ForCausalLM(
            config,
            weights,
            make_prepare_finalize=lambda *, layer: SimpleNamespace(layout="flat"),
            make_kernel=LocalKernel,
            ep_rank=1,
            ep_size=4,
        )
    with pytest.raises(ConfigError, match="layout=ragged"):
        make_experts("ragged", torch.zeros(1), torch.zeros(1))
