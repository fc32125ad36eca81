"""What this machine has and lacks for world `gpu`. Nothing raises but `machine`; only a question imports torch."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dbo.config import DeviceLimits
from dbo.errors import NotAvailable, UsageError

DEEPEP_V1 = "tokenspeed-deepep==1.2.1.post20251110"
DEEPEP_V2 = "tokenspeed-deepep==2.1.0.post20260801"
V2_NCCL = (2, 30, 7)
"""The one NCCL that this build of DeepEP V2 runs with: until 2.31 it wants the very version it was compiled against."""
NCCL_LIBRARY = "libnccl.so.2"
CPU_BACKENDS = ("nccl", "deepep_low_latency", "symm_copy")
"""What runs on CPU tensors, over gloo."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run in world `gpu` may count on.

    Attributes:
        limits: of the devices, as the configuration's rules want them.
        capabilities: beyond the backends' limits.
        options: for `gpu.world.launch`.
        backends: that can run here.
    """

    limits: DeviceLimits
    capabilities: tuple[str, ...]
    options: dict[str, Any]
    backends: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """One question: whether it is there, what there is, and what to do where it is not."""

    there: bool
    what: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One visible device."""

    index: int
    name: str
    num_sms: int
    memory_bytes: int
    capability: tuple[int, int]
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that was asked.

    Attributes:
        devices: visible CUDA devices; `peers` are those that they can copy to and from directly.
        libraries: by name.
        backends: by all-to-all backend, with at least two ranks.
    """

    python: str
    devices: tuple[Device, ...] = ()
    libraries: dict[str, ProbeAnswer] = field(default_factory=dict)
    backends: dict[str, ProbeAnswer] = field(default_factory=dict)


def device_count() -> int:
    """Visible CUDA devices; 0 also where torch is missing."""
    return len(_try(_devices, ())[0])


def machine(*, device: str, ranks: int, share_device: bool) -> Machine:
    """What a run of `ranks` ranks may count on.

    Raises:
        UsageError: an option that contradicts another one.
        NotAvailable: there are too few devices.
    """
    options = {"device": device, "share_device": share_device}
    if device == "cpu":
        if share_device:
            rule = "CPU tensors are nobody's device"
            raise UsageError.of(rule, fix="drop --share-device", device=device, share_device=share_device)
        # Over gloo any dtype and any size travels; the limits are those of the library's kernels.
        limits = DeviceLimits(num_devices=ranks)
        return Machine(
            limits=limits, capabilities=("any_dtype", "any_hidden_size"), options=options, backends=CPU_BACKENDS
        )
    devices, why = _try(_devices, ())
    needed = 1 if share_device else ranks
    if len(devices) < needed:
        rule = "world gpu needs one visible device a rank"
        share = " --share-device," if devices else ""
        fix = f"show more devices, use --device cpu (gloo, CPU tensors),{share} or --world sim"
        values = {"num_devices": len(devices), "num_ranks": ranks} | ({"torch": why} if why else {})
        raise NotAvailable.of(rule, fix=fix, **values)
    used = devices[:needed]
    limits = DeviceLimits(
        num_sms=min(d.num_sms for d in used),
        num_devices=ranks,
        memory_bytes=min(d.memory_bytes for d in used) // (ranks if share_device else 1),
    )
    shared: tuple[str, ...] = ("symm_copy",) if _cuda_bindings().there else ()
    library = deep_ep_version()[0]
    shared += ("deepep_low_latency", "deepep_high_throughput") if library == "V1" else ()
    alone = ("nccl", "deepep_v2") if library == "V2" and nccl_version()[:3] == V2_NCCL else ("nccl",)
    backends = shared if share_device else (*alone, *shared)
    return Machine(
        limits=limits, capabilities=(), options={"device": "cuda", "share_device": share_device}, backends=backends
    )


def probe() -> Found:
    """Ask everything. Never raises."""
    devices, _ = _try(_devices, ())
    libraries = {
        "torch": _library("torch", "pip install 'dual-batch-overlap[torch]'"),
        "numpy": _library("numpy", "pip install numpy"),
        "greenlet": _library("greenlet", "pip install greenlet; without it tasks of the simulator are threads"),
        "triton": _library("triton", "pip install 'dual-batch-overlap[kernels]'"),
        "cuda": _cuda(devices),
        "cuda_bindings": _cuda_bindings(),
        "gloo": _gloo(),
        "nccl": _nccl(),
        "deep_ep": _deep_ep(),
    }
    return Found(
        python=platform.python_version(), devices=devices, libraries=libraries, backends=_backends(devices, libraries)
    )


def nccl_version() -> tuple[int, ...]:
    """(major, minor, patch) of the NCCL that this process runs with; empty where there is none.

    Asked of the library: `torch.cuda.nccl.version()` names the one that torch was built with, whatever was loaded before it.
    """

    def ask() -> tuple[int, ...]:
        import torch  # loads its own NCCL where none of that name is loaded yet

        built_with: tuple[int, ...] = torch.cuda.nccl.version()
        return _try(_loaded_nccl, built_with)[0]

    return _try(ask, ())[0]


def _loaded_nccl() -> tuple[int, ...]:
    library = ctypes.CDLL(NCCL_LIBRARY, mode=os.RTLD_NOLOAD)
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def deep_ep_version() -> tuple[str, str]:
    """("V1" | "V2" | "", why not): which of DeepEP's interfaces can be imported."""

    def ask() -> str:
        import torch  # noqa: F401  its libraries are what deep_ep links to

        module = importlib.import_module("deep_ep")
        if hasattr(module, "ElasticBuffer"):
            return "V2"
        return "V1" if hasattr(module, "Buffer") else ""

    return _try(ask, "")


def _backends(devices: tuple[Device, ...], libraries: dict[str, ProbeAnswer]) -> dict[str, ProbeAnswer]:
    deep_ep, two = libraries["deep_ep"], len(devices) >= 2
    peers = two and all(len(d.peers) == len(devices) - 1 for d in devices)
    no_device = ProbeAnswer(
        there=False, what="no device", fix="gloo does not carry it: show a device, or use --world sim"
    )
    on_cpu = libraries["gloo"].there
    backends = {
        "nccl": ProbeAnswer(there=on_cpu, what="CPU tensors over gloo: --device cpu", fix=libraries["gloo"].fix)
    }
    backends |= dict.fromkeys(CPU_BACKENDS, backends["nccl"])
    if not devices:
        return backends | dict.fromkeys(("deepep_high_throughput", "deepep_v2"), no_device)
    backends["nccl"] = ProbeAnswer(
        there=two and libraries["nccl"].there,
        what=f"{len(devices)} devices, NCCL {libraries['nccl'].what}",
        fix="" if two else "NCCL refuses two ranks on one device: show a second one, or --device cpu",
    )
    v1 = deep_ep.there and deep_ep.what.startswith("V1")
    shared = "" if two else ", ranks share the device (--share-device): for correctness, never for speed"
    for name in ("deepep_low_latency", "deepep_high_throughput"):
        backends[name] = ProbeAnswer(
            there=v1,
            what=f"DeepEP {deep_ep.what}{shared}" if v1 else deep_ep.what,
            fix="" if v1 else f"install {DEEPEP_V1}",
        )
    v2 = deep_ep.there and deep_ep.what.startswith("V2")
    right_nccl = nccl_version()[:3] == V2_NCCL
    needs = [f"install {DEEPEP_V2}"] * (not v2) + [f"load NCCL {'.'.join(map(str, V2_NCCL))} first"] * (not right_nccl)
    backends["deepep_v2"] = ProbeAnswer(
        there=v2 and right_nccl and two, what=deep_ep.what, fix="; ".join(needs + ["show a second device"] * (not two))
    )
    reach = "every device reaches every other" if peers else "no peer access between devices"
    driver = libraries["cuda_bindings"]
    backends["symm_copy"] = ProbeAnswer(
        there=driver.there and (peers or not two),
        what=f"{reach}{shared}" if two else f"one device{shared}",
        fix=driver.fix if peers or not two else "use nccl, or --share-device",
    )
    return backends


def _devices() -> tuple[Device, ...]:
    import torch

    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        peers = tuple(p for p in range(count) if p != index and torch.cuda.can_device_access_peer(index, p))
        found.append(
            Device(
                index=index,
                name=properties.name,
                num_sms=properties.multi_processor_count,
                memory_bytes=properties.total_memory,
                capability=(properties.major, properties.minor),
                peers=peers,
            )
        )
    return tuple(found)


def _library(name: str, fix: str) -> ProbeAnswer:
    if importlib.util.find_spec(name) is None:
        return ProbeAnswer(there=False, what="not installed", fix=fix)
    version, why = _try(lambda: importlib.metadata.version(name), "")
    return ProbeAnswer(there=True, what=version or why or "installed")


def _cuda(devices: tuple[Device, ...]) -> ProbeAnswer:
    def ask() -> str:
        import torch

        return f"CUDA {torch.version.cuda}" if torch.version.cuda else ""

    version, why = _try(ask, "")
    if devices:
        return ProbeAnswer(there=True, what=f"{version}, {len(devices)} × {devices[0].name}")
    return ProbeAnswer(
        there=False,
        what=why or f"{version or 'torch without CUDA'}, no visible device",
        fix="install torch for CUDA and a driver, and set CUDA_VISIBLE_DEVICES",
    )


def _cuda_bindings() -> ProbeAnswer:
    """The driver's stream memory operations, behind backend symm_copy; CUDA builds of torch bring the package."""
    answer, why = _try(lambda: importlib.import_module("cuda.bindings.driver") is not None, False)
    return ProbeAnswer(
        there=answer, what="installed" if answer else why, fix="" if answer else "pip install cuda-bindings"
    )


def _gloo() -> ProbeAnswer:
    def ask() -> bool:
        import torch.distributed as dist

        return bool(dist.is_available() and dist.is_gloo_available())

    there, why = _try(ask, False)
    return ProbeAnswer(
        there=there, what="with torch" if there else why or "not built", fix="" if there else "install torch"
    )


def _nccl() -> ProbeAnswer:
    version = nccl_version()
    if version:
        return ProbeAnswer(there=True, what=".".join(map(str, version)))
    return ProbeAnswer(there=False, what="not with this torch", fix="install torch for CUDA")


def _deep_ep() -> ProbeAnswer:
    which, why = deep_ep_version()
    if which:
        return ProbeAnswer(there=True, what=f"{which}")
    fix = (
        f"install {DEEPEP_V1} (V1) or {DEEPEP_V2} (V2): Python 3.12, CUDA 13; the package named deep-ep is another one"
    )
    return ProbeAnswer(there=False, what=why or "not installed", fix=fix)


def _try(ask: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """(answer, "") or (otherwise, why). Libraries fail at import in every way there is, AssertionError included."""
    try:
        return ask(), ""
    except Exception as error:
        return otherwise, f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
