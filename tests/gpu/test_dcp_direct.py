"""The direct exchange of a run: what it allocates and how it is launched, without a device; whole steps on two."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when a kernel is defined, also for those who import Triton after this file
    )

from dbo.dcp.direct import STATE_MISSING
from dbo.dcp.interface import DCPShape
from dbo.errors import PeerFailed
from gpu.check import dcp_model

pytest.importorskip("triton", reason="triton is not installed (extra `kernels`)")

from gpu.dcp import direct as dcp_direct  # noqa: E402
from gpu.kernels.exchange import DirectExchange, new_region  # noqa: E402

SHAPE = DCPShape(size=2, backend="a2a_direct", max_rows=48, num_ubatches=2, heads=4, head_dim=20, dtype="bfloat16")


@pytest.fixture
def direct(monkeypatch):
    """The end of rank 3, peer 1 of the group of ranks 2 and 3."""
    prepared = []

    def region_of(layout, process_group):
        region = new_region(layout, "cpu")
        return region, [region.data_ptr() + 2**20 * 256, region.data_ptr()]

    monkeypatch.setattr(dcp_direct, "symmetric_region", region_of)
    monkeypatch.setattr(DirectExchange, "prepare", lambda self, *a, **k: prepared.append(self))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=132))
    world = SimpleNamespace(device=torch.device("cpu"), rank=3)
    launched = []
    group = SimpleNamespace(
        world=world,
        rank=1,
        members=(2, 3),
        device_group=None,
        launched=launched,
        exchange=lambda op, out: launched.append((op, tuple(out.shape))) or nullcontext(),
    )
    made = dcp_direct.DeviceDirect(group, SHAPE)
    assert prepared == made.ends[:1]
    return made


def test_each_ubatch_has_its_own_region_for_the_largest_batch(direct):
    first, second = direct.ends
    assert first._region.data_ptr() != second._region.data_ptr()
    largest = torch.empty((48, 4, 20), dtype=torch.bfloat16)
    assert first.fits(largest) and not first.fits(torch.empty((4096, 4, 20), dtype=torch.bfloat16))
    assert first.tuning.programs + dcp_direct.SPARED_SMS == 132


def test_a_call_takes_the_end_of_its_ubatch_and_is_an_exchange(direct, monkeypatch):
    taken = []

    def reduce(out, lse, group, *, seq_lens, query_start_loc, exchange):
        taken.append(exchange)
        return out[:, :2]

    monkeypatch.setattr(dcp_direct, "dcp_direct_lse_reduce", reduce)
    out, lens = torch.zeros(5, 4, 20), torch.zeros(3, dtype=torch.int32)
    for ubatch in (1, 0):
        assert direct.reduce(out, out[..., 0], lens[:2], lens, ubatch=ubatch).shape == (5, 2, 20)
    assert taken == [direct.ends[1], direct.ends[0]]
    assert direct.group.launched == [("dcp.direct", (5, 4, 20))] * 2


def test_who_did_not_come_is_named_as_the_run_counts_ranks(direct):
    direct.check()
    direct.ends[1]._state[STATE_MISSING] = 1  # the first tile of peer 0
    with pytest.raises(PeerFailed) as caught:
        direct.check()
    assert caught.value.rank == 2 and "rank 3 waited in vain" in str(caught.value)


@pytest.mark.gpu(min_devices=2)
def test_whole_steps_on_two_devices(capsys):
    code = dcp_model.main([])
    out = capsys.readouterr().out
    assert code == 0 and "a2a_direct DBO graphs" in out, out
