"""Needs torch and transformers. The unchanged DeepSeek-V2 of transformers, with its parameters on sim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

from sim.tensors import is_poison, raw, register_device, to_sim, unregister_all
from tests.sim.fifo_device import FifoDevice

transformers = pytest.importorskip("transformers", reason="a test dependency: the judge of the model")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )
    return transformers.DeepseekV2ForCausalLM(config).eval()


@pytest.fixture
def device() -> Iterator[FifoDevice]:
    made = FifoDevice(0)
    register_device(0, made)
    yield made
    unregister_all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm", "eager"])
def test_deepseek_v2(device: FifoDevice, model: torch.nn.Module, experts: str, mode: Callable[[], object]) -> None:
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(12)[None].expand(2, -1).clone()
    model.set_experts_implementation(experts)
    on_sim = copy.deepcopy(model).to("sim:0")
    on_sim.set_experts_implementation(experts)
    with mode():
        wanted = model(ids, position_ids=positions, use_cache=False).logits
        ids_sim, positions_sim = to_sim(ids, 0), to_sim(positions, 0)
        device.drain()
        device.log.clear()
        got = on_sim(ids_sim, position_ids=positions_sim, use_cache=False).logits
        assert bool(is_poison(raw(got)).all())
        pending = device.pending
        device.drain()
    assert torch.allclose(raw(got), wanted, atol=1e-5, rtol=1e-5)
    assert all(op.src.startswith("transformers/") for op in device.log)
    reads_in_layers = [why for why, _ in device.host_reads][1:]  # the first is the attention mask's, before the layers
    if experts == "eager":  # loops over the experts that were hit, so it must ask
        assert "shape:nonzero" in reads_in_layers
    else:
        assert reads_in_layers == []
        assert pending > 100
