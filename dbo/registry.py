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

from dbo.bench.timing import Benchmark
from dbo.errors import NotAvailable, UsageError, refusal

if TYPE_CHECKING:
    from dbo.trace import Trace

WORLDS = {"sim": "sim.world:launch", "gpu": "gpu.world:launch"}
FAULTS = {"sim": "sim.faults:catalogue"}
BENCHMARKS = {"sim": "sim.benchmarks:benchmarks"}
FUZZER = "fuzz.command"
MACHINES = {"gpu": "gpu.probe:machine"}
DCP_BENCH_DEVICE = "gpu.dcp_bench"
MOE_BENCH = "gpu.bench_moe"
LAYER_KERNELS = {"cuda": "gpu.layer:LAYER"}


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
    """

    @property
    def name(self) -> str: ...
    @property
    def sentence(self) -> str: ...
    @property
    def backends(self) -> Sequence[str]: ...
    @property
    def exchanges(self) -> Sequence[str]: ...
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
    return WorldEntry(name=name, launch=_resolve(_target(WORLDS, name), name))


def faults(world: str) -> Sequence[FaultInfo]:
    """The faults that can be planted in programs of `world`.

    Raises:
        UsageError: the world has no catalogue of faults; the message lists those that have one.
        NotAvailable: as for `load`.
    """
    catalogue: Sequence[FaultInfo] = _resolve(_target(FAULTS, world), world)()
    return catalogue


def benchmarks(world: str) -> Sequence[Benchmark]:
    """What `dbo bench` times in `world`.

    Raises:
        UsageError, NotAvailable: as for `faults`.
    """
    found: Sequence[Benchmark] = _resolve(_target(BENCHMARKS, world), world)()
    return found


def dcp_bench_device() -> Any:
    """The module that gives `dbo bench dcp` kernels, graphs and the direct path on CUDA devices.

    Raises:
        NotAvailable: it cannot be loaded here.
    """
    try:
        return importlib.import_module(DCP_BENCH_DEVICE)
    except ImportError as error:
        rule = "the exchange on a device needs its kernels"
        raise NotAvailable(refusal(rule, "install the extra `kernels`, or pass --device cpu", error=error)) from error


def moe_bench() -> ModuleType:
    """What `dbo bench moe` measures with: `cuda_devices()` and `measure(bench)`.

    Raises:
        NotAvailable: torch or another part of it is missing here.
    """
    _refuse_foreign(MOE_BENCH.partition(".")[0])
    try:
        return importlib.import_module(MOE_BENCH)
    except ImportError as error:
        rule = "the layers of this benchmark are real ones"
        raise NotAvailable(refusal(rule, "install the extra `torch`", error=error)) from error


def machine(world: str, *, device: str, ranks: int, share_device: bool) -> Any:
    """What a run in `world` may count on: an object with `limits`, `capabilities` and `options` (for `launch`).

    None for a world that is the same on every machine.

    Raises:
        UsageError, NotAvailable: the world takes no devices, or this machine has too few of them.
    """
    if world in MACHINES:
        return _resolve(MACHINES[world], world)(device=device, ranks=ranks, share_device=share_device)
    if device != "auto" or share_device:
        raise UsageError(refusal("only world gpu takes devices", "drop --device and --share-device", world=world))
    return None


@cache
def layer_kernels(device_type: str) -> Any:
    """Fused kernels for a layer on devices of this torch type; None where torch's own operations are all there is.

    That is a device without kernels here, or a machine without Triton or without package `gpu`.
    """
    if device_type not in LAYER_KERNELS or importlib.util.find_spec("triton") is None:
        return None
    try:
        return _resolve(LAYER_KERNELS[device_type], device_type)
    except NotAvailable:
        return None


def fuzzer() -> ModuleType:
    """What `dbo fuzz` runs; the fuzzer lies above the worlds, so `dbo` knows it by name only.

    Raises:
        NotAvailable: as for `load`.
    """
    _refuse_foreign(FUZZER.partition(".")[0])
    return importlib.import_module(FUZZER)


def _target(table: dict[str, str], name: str) -> str:
    if name not in table:
        what = "a world" if table is WORLDS else "a world with a catalogue of faults"
        raise UsageError(refusal(f"--world names {what}", f"choose one of {', '.join(sorted(table))}", world=name))
    return table[name]


def _resolve(target: str, world: str) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    package = module_name.partition(".")[0]
    _refuse_foreign(package)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        # A module of the world itself is a build without that world; anything else is a dependency to install.
        fix = "this build does not have it" if missing.partition(".")[0] == package else f"install {missing}"
        raise NotAvailable(refusal("a world needs its modules", fix, world=world, missing=missing)) from error
    resolved: Callable[..., Any] = getattr(module, attribute)
    return resolved


def _refuse_foreign(package: str) -> None:
    here = Path(__file__).resolve().parent
    found = _location(package)
    if found is None:
        raise NotAvailable(
            refusal("a world lies beside dbo", "install the whole distribution", missing=package, dbo=here)
        )
    if found.parent != here.parent:
        raise NotAvailable(
            refusal(
                f"the package {package} must be the one beside dbo",
                f"take the other {package} off the import path",
                **{package: found, "dbo": here},
            )
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
