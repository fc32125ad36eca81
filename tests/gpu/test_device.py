"""World gpu on devices: the conformance suite, the main job eager and from graphs, the watchdog, a long run."""

from __future__ import annotations

import pytest

from gpu import probe
from gpu.check import command as check


def run(capsys, *words):
    code = check.main([*words])
    out = capsys.readouterr().out
    assert code == 0, out
    return out


@pytest.mark.gpu(min_devices=1)
def test_two_ranks_on_one_device(capsys):
    which, why = probe.deep_ep_version()
    if which != "V1":
        pytest.skip(f"ranks share a device only with DeepEP V1 ({probe.DEEPEP_V1}): {why or which or 'not installed'}")
    out = run(capsys, "--share-device", "--soak", "400")
    for backend in ("deepep_low_latency", "deepep_high_throughput"):
        parts = ("job {}", "job {}, graph", "graph = eager {}", "trace {}", "leftovers {}", "watchdog {}", "soak {}")
        for part in parts:
            assert part.format(backend) in out, out
    assert "nothing here says anything about speed" in out


@pytest.mark.gpu(min_devices=2)
def test_a_device_a_rank(capsys):
    out = run(capsys, "--soak", "400")
    assert "job nccl" in out and "graph = eager nccl" in out, out


@pytest.mark.gpu(min_devices=1)
def test_ubatches_as_greenlets_say_the_same(capsys):
    pytest.importorskip("greenlet", reason="ubatches as greenlets need it")
    if probe.deep_ep_version()[0] != "V1":
        pytest.skip(f"ranks share a device only with DeepEP V1: {probe.DEEPEP_V1}")
    out = run(capsys, "--share-device", "--vehicle", "greenlet", "--only", "job", "--only", "graph")
    assert "serial bits equal" in out, out
