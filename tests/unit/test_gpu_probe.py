"""The probe and the doctor: nothing raises, and what is missing is said with what to install."""

from __future__ import annotations

import json

import pytest

from dbo.cli import dispatch as frame
from dbo.cli.doctor import text
from dbo.errors import NotAvailable, UsageError
from gpu import probe
from gpu.probe import Device, Found, ProbeAnswer


def device(index, peers=()):
    return Device(index=index, name="H200", num_sms=132, memory_bytes=2**37, capability=(9, 0), peers=peers)


def backends_of(monkeypatch, devices, *, deep_ep="", nccl=(2, 28, 9)):
    monkeypatch.setattr(probe, "_devices", lambda: devices)
    monkeypatch.setattr(probe, "deep_ep_version", lambda: (deep_ep, "" if deep_ep else "AssertionError: no NVSHMEM"))
    monkeypatch.setattr(probe, "nccl_version", lambda: nccl)
    return probe.probe().backends


def test_without_devices_only_what_gloo_carries_is_there(monkeypatch):
    pytest.importorskip("torch", reason="gloo and the devices are torch's")
    backends = backends_of(monkeypatch, (), nccl=())
    assert {name for name, answer in backends.items() if answer.there} == set(probe.CPU_BACKENDS)
    for name in ("deepep_high_throughput", "deepep_v2"):
        assert "--device cpu" not in backends[name].fix and "--world sim" in backends[name].fix


def test_one_device_runs_deepep_v1_shared_and_no_nccl(monkeypatch):
    backends = backends_of(monkeypatch, (device(0),), deep_ep="V1")
    assert backends["deepep_low_latency"].there and "never for speed" in backends["deepep_low_latency"].what
    assert not backends["nccl"].there and "two ranks on one device" in backends["nccl"].fix
    assert not backends["symm_copy"].there


def test_two_devices_without_deepep_say_what_to_install(monkeypatch):
    backends = backends_of(monkeypatch, (device(0, (1,)), device(1, (0,))))
    assert backends["nccl"].there and "reaches every other" in backends["symm_copy"].what
    assert not backends["deepep_low_latency"].there and probe.DEEPEP_V1 in backends["deepep_low_latency"].fix
    assert "no NVSHMEM" in backends["deepep_low_latency"].what


@pytest.mark.parametrize(("nccl", "there"), [((2, 28, 9), False), ((2, 30, 7), True), ((2, 30, 8), False)])
def test_v2_needs_its_nccl(monkeypatch, nccl, there):
    backends = backends_of(monkeypatch, (device(0, (1,)), device(1, (0,))), deep_ep="V2", nccl=nccl)
    assert backends["deepep_v2"].there is there
    assert there or "NCCL 2.30.7" in backends["deepep_v2"].fix


def test_the_nccl_that_counts_is_the_one_that_was_loaded(monkeypatch):
    torch = pytest.importorskip("torch", reason="the version that torch was built with is what is not asked for")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))

    class Library:
        def ncclGetVersion(self, place):
            place._obj.value = 23007

    monkeypatch.setattr(probe.ctypes, "CDLL", lambda name, mode: Library())
    assert probe.nccl_version() == (2, 30, 7)

    def none(name, mode):
        raise OSError("not loaded")

    monkeypatch.setattr(probe.ctypes, "CDLL", none)
    assert probe.nccl_version() == (2, 28, 9)


def test_a_library_that_fails_in_any_way_is_an_answer(monkeypatch):
    def fail():
        raise AssertionError("import failed\nsecond line")

    assert probe._try(fail, 7) == (7, "AssertionError: import failed")
    monkeypatch.setattr(probe, "_devices", fail)
    assert probe.probe().devices == () and probe.device_count() == 0


def test_a_run_is_refused_by_name_where_devices_are_missing(monkeypatch):
    monkeypatch.setattr(probe, "_devices", lambda: (device(0),))
    with pytest.raises(NotAvailable, match="num_devices=1, num_ranks=2; .*--share-device"):
        probe.machine(device="auto", ranks=2, share_device=False)
    shared = probe.machine(device="auto", ranks=2, share_device=True)
    assert shared.options == {"device": "cuda", "share_device": True} and shared.limits.num_devices == 2
    assert shared.limits.memory_bytes == 2**36 and shared.capabilities == ()
    monkeypatch.setattr(probe, "_devices", lambda: ())
    with pytest.raises(NotAvailable, match="num_devices=0, num_ranks=2; .*--device cpu") as none:
        probe.machine(device="auto", ranks=2, share_device=False)
    assert "--share-device" not in str(none.value)
    with pytest.raises(UsageError, match="device=cpu, share_device=True"):
        probe.machine(device="cpu", ranks=2, share_device=True)
    assert probe.machine(device="cpu", ranks=2, share_device=False).capabilities == ("any_dtype", "any_hidden_size")


def test_the_doctor_tells_what_it_was_told():
    found = Found(
        python="3.12.1",
        devices=(device(0),),
        libraries={
            "torch": ProbeAnswer(there=True, what="2.11.0"),
            "deep_ep": ProbeAnswer(there=False, what="no", fix="get it"),
        },
        backends={"nccl": ProbeAnswer(there=False, what="one device", fix="show another")},
    )
    lines = text(found).splitlines()
    assert "  0: H200, 132 SMs, 128 GiB, reaches no other" in lines
    assert any("--share-device" in line for line in lines)
    assert "  no  deep_ep  no; get it" in lines and "  yes torch    2.11.0" in lines
    assert "  no  nccl  one device; show another" in lines


def test_the_doctor_answers_in_json(capsys):
    pytest.importorskip("torch", reason="gloo and the devices are torch's")
    assert frame.main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["libraries"]["torch"]["there"] is True and set(data["backends"]) >= {"nccl", "deepep_v2", "symm_copy"}


def test_conform_runs_the_suite_and_counts(capsys):
    assert frame.main(["conform", "--mode", "ordering", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == 0 and len(data["cases"]) >= 9
    assert frame.main(["conform", "--device", "cpu"]) == 2
    assert "only world gpu takes devices" in capsys.readouterr().err
