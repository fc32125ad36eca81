"""Who computes a layer: torch's operations on CPUs and in the simulator, fused kernels on devices."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dbo import registry
from dbo.errors import NotAvailable
from dbo.model.attention import MLAttention, make_attention
from dbo.model.dcp_attention import DCPAttention, make_dcp_attention
from dbo.moe import grouped_experts
from dbo.moe.experts import BatchedExperts, FlatExperts, make_experts
from dbo.moe.grouped_experts import GroupedBatchedExperts, GroupedFlatExperts
from tests.gpu.layer_config import CONFIG, attention_weights


@pytest.mark.parametrize("device_type", ["cpu", "sim", "meta"])
def test_only_devices_have_kernels(device_type: str) -> None:
    assert registry.layer_kernels(device_type) is None


def test_without_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: str, noun: str) -> None:
        raise NotAvailable("no such package")

    monkeypatch.setattr(registry, "_load", refuse)
    assert registry.layer_kernels.__wrapped__("cuda") is None


def test_devices_get_the_fused_layer() -> None:
    """In a process of its own: Triton may have been imported here, and for its interpreter."""
    pytest.importorskip("triton", reason="triton is not installed (extra `kernels`)")
    script = (
        "from dbo.registry import layer_kernels; found = layer_kernels('cuda'); "
        "assert found.attention.__name__ == 'FusedMLAttention' and found.dcp_attention.__name__ == 'FusedDCPAttention'"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


def test_cpu_layers_are_the_plain_ones() -> None:
    assert type(make_attention(CONFIG, attention_weights(), "a")) is MLAttention
    assert type(make_dcp_attention(CONFIG, attention_weights(), "a", SimpleNamespace(size=1, rank=0))) is DCPAttention
    gate_up, down = torch.zeros(2, 32, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 16, dtype=torch.bfloat16)
    kinds = {layout: type(make_experts(layout, gate_up, down)) for layout in ("batched", "flat")}
    assert kinds == {"batched": BatchedExperts, "flat": FlatExperts}


def test_grouped_experts_where_the_product_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "available", lambda weights: True)
    gate_up, down = torch.zeros(2, 32, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 16, dtype=torch.bfloat16)
    kinds = {layout: type(make_experts(layout, gate_up, down)) for layout in ("batched", "flat")}
    assert kinds == {"batched": GroupedBatchedExperts, "flat": GroupedFlatExperts}
