"""Names of worlds, and the lazy way from a name to the world: `dbo` never imports `sim` or `gpu` before it is asked to.

`sim` and `gpu` are generic names, so a package of another project may answer to them. The registry takes only the one
that lies beside `dbo`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from dbo.contract.benchmark import Benchmark
from dbo.errors import NotAvailable, UsageError

if TYPE_CHECKING:
    from dbo.trace import Trace

WORLDS = {"sim": "sim.world:launch", "gpu": "gpu.world:launch"}
FAULTS = {"sim": "sim.faults:catalogue"}
BENCHMARKS = {"sim": "sim.bench.suite:benchmarks"}
FUZZER = "fuzz.command"
MACHINES = {"gpu": "gpu.probe:machine"}
DCP_BENCH_DEVICE = "gpu.bench.dcp"
MOE_BENCH = "gpu.bench.moe"
LAYER_KERNELS = {"cuda": "gpu.kernels.layer:LAYER"}

_EXTRAS = {"torch": "torch", "safetensors": "torch", "triton": "kernels", "hypothesis": "test"}
"""Which extra of the distribution brings an import name."""


@dataclass(frozen=True, kw_only=True)
class WorldEntry:
    """A world by name; `launch(program, ...)` runs a program on all of its ranks."""

    name: str
    launch: Callable[..., Any]


class FaultInfo(Protocol):
    """A fault that `--inject` can plant.

    Attributes:
        name: what `--inject` takes.
        sentence: what it does to the program.
        backends: the all-to-all backends that it applies to; empty: every one.
        exchanges: the exchanges of a DCP group that it applies to; empty: it needs no group.
        numeric: only a run with numbers has what it changes.
    """

    @property
    def name(self) -> str: ...
    @property
    def sentence(self) -> str: ...
    @property
    def backends(self) -> Sequence[str]: ...
    @property
    def exchanges(self) -> Sequence[str]: ...
    @property
    def numeric(self) -> bool: ...
    def programs(self, config: Any, where: str) -> Callable[[int], Any]:
        """Every rank's program with the fault planted at `where` ("rank=1,ubatch=0").

        Raises:
            UsageError: the fault does not apply to this configuration.
        """

    def require_effect(self, trace: Trace, where: str) -> None:
        """Refuse a run, by its trace, in which the fault never came into effect.

        Raises:
            UsageError: says what the run would have to offer.
        """


def load(name: str) -> WorldEntry:
    """The world called `name`.

    Raises:
        UsageError: no world has this name; the message lists the choices.
        NotAvailable: this build or machine does not have it, or another package answers to its import name.
    """
    noun = "a world"
    return WorldEntry(name=name, launch=_load(_choice(WORLDS, name, f"--world names {noun}"), noun))


def faults(world: str) -> Sequence[FaultInfo]:
    """The faults that can be planted in programs of `world`.

    Raises:
        UsageError: the world has no catalogue of faults; the message lists those that have one.
        NotAvailable: as for `load`.
    """
    noun = "a world with a catalogue of faults"
    catalogue: Sequence[FaultInfo] = _load(_choice(FAULTS, world, f"--inject needs {noun}"), noun)()
    return catalogue


def benchmarks(world: str) -> Sequence[Benchmark]:
    """What `dbo bench` times in `world`.

    Raises:
        UsageError: the world has no benchmarks; the message lists those that have some.
        NotAvailable: as for `load`.
    """
    noun = "a world with benchmarks"
    found: Sequence[Benchmark] = _load(_choice(BENCHMARKS, world, f"dbo bench times {noun}"), noun)()
    return found


def dcp_bench_device() -> Any:
    """The module that gives `dbo bench dcp` kernels, graphs and the direct path on CUDA devices.

    Raises:
        NotAvailable: as for `load`.
    """
    return _load(DCP_BENCH_DEVICE, "the DCP exchange on devices", instead="pass --device cpu")


def moe_bench() -> ModuleType:
    """What `dbo bench moe` measures with: `cuda_devices()` and `measure(bench)`.

    Raises:
        NotAvailable: as for `load`.
    """
    return _load(MOE_BENCH, "the benchmark of MoE layers")


def machine(world: str, *, device: str, ranks: int, share_device: bool) -> Any:
    """What a run in `world` may count on: an object with `limits`, `capabilities` and `options` (for `launch`).

    None for a world that is the same on every machine.

    Raises:
        UsageError, NotAvailable: the world takes no devices, or this machine has too few of them.
    """
    if world in MACHINES:
        return _load(MACHINES[world], "a world with devices")(device=device, ranks=ranks, share_device=share_device)
    if device != "auto" or share_device:
        raise UsageError.of("only world gpu takes devices", fix="drop --device and --share-device", world=world)
    return None


@cache
def layer_kernels(device_type: str) -> Any:
    """Fused kernels for a layer on devices of this torch type; None where torch's own operations are all there is.

    That is a device without kernels here, or a machine without Triton or without package `gpu`.
    """
    if device_type not in LAYER_KERNELS or importlib.util.find_spec("triton") is None:
        return None
    try:
        return _load(LAYER_KERNELS[device_type], "a layer of fused kernels")
    except NotAvailable:
        return None


def fuzzer() -> ModuleType:
    """What `dbo fuzz` runs; the fuzzer lies above the worlds, so `dbo` knows it by name only.

    Raises:
        NotAvailable: as for `load`.
    """
    return _load(FUZZER, "the fuzzer")


def _choice(table: dict[str, str], name: str, rule: str) -> str:
    if name not in table:
        raise UsageError.of(rule, fix=f"choose one of {', '.join(sorted(table))}", world=name)
    return table[name]


def _load(target: str, noun: str, *, instead: str = "") -> Any:
    """The module "a.b", or what "a.b:c" names in it.

    Args:
        noun: who needs it, for refusals.
        instead: what else the user can do.

    Raises:
        NotAvailable: as for `load`.
    """
    module_name, _, attribute = target.partition(":")
    package = module_name.partition(".")[0]
    _refuse_foreign(package, noun)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        fix = _fix(missing, package) + (f", or {instead}" if instead else "")
        raise NotAvailable.of(f"{noun} needs its modules", fix=fix, module=module_name, missing=missing) from error
    return getattr(module, attribute) if attribute else module


def _fix(missing: str, package: str) -> str:
    name = missing.partition(".")[0]
    if name in ("dbo", package):  # a build without that part
        return "this build does not have it"
    return f"install the extra `{_EXTRAS[name]}`" if name in _EXTRAS else f"install {missing}"


def _refuse_foreign(package: str, noun: str) -> None:
    here = Path(__file__).resolve().parent
    found = _location(package)
    if found is None:
        rule = f"{noun} lies beside dbo"
        raise NotAvailable.of(rule, fix="install the whole distribution", missing=package, dbo=here)
    if found.parent != here.parent:
        raise NotAvailable.of(
            f"the package {package} must be the one beside dbo",
            fix=f"take the other {package} off the import path",
            **{package: found, "dbo": here},
        )


def _location(package: str) -> Path | None:
    """The folder of an import package, without importing it."""
    loaded = sys.modules.get(package)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(package)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    where = folders[0] if folders else spec.origin
    return Path(where).resolve() if where else None
