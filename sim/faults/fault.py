"""What a fault is: a transformation of one rank's program. The detectors see the trace only, never the fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dbo.engine.components import Components
from dbo.errors import UsageError

if TYPE_CHECKING:
    from dbo.config import DBOConfig
    from dbo.trace import Trace
    from sim.faults.clean_run import CleanRun


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a fault is planted.

    Attributes:
        rank, ubatch: whose program. at: which occurrence (a yield, a hook, a step), from 0.
        field: the metadata field that `whole-metadata` leaves whole.
    """

    rank: int = 1
    ubatch: int = 0
    at: int = 0
    field: str = "seq_lens"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the catalogue.

    Attributes:
        name: what `--inject` takes, optionally followed by `:rank=R,ubatch=U,at=K`.
        sentence: what it does.
        id: the fault class that a detector must report.
        plant: (program, site) -> the program with the fault.
        backends: where it applies; empty: everywhere.
        exchanges: it breaks a DCP group that uses one of these; empty: it needs no group.
        everywhere: it is planted on every rank, not on `site.rank` only.
        split: it needs a step that is split (so DBO on).
        defaults: of the site, where they differ.
        keys: the parts of the site that it uses.
        numeric: it breaks something that only runs with numbers have.
        also: ids of detectors that may name it instead: the same missing order, seen from another side.
        needs: what a run must offer for the fault to come into effect at all, in words.
        sites: the same as a function: where a run, given by its clean twin, offers it. Planted at one of these
            sites it must be found; planted elsewhere it may change nothing.
    """

    name: str
    sentence: str
    id: str
    plant: Callable[[Components, Site], Components]
    needs: str
    sites: Callable[[CleanRun], Iterator[Site]]
    backends: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ()
    everywhere: bool = False
    split: bool = True
    numeric: bool = False
    also: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    keys: tuple[str, ...] = ("rank", "ubatch", "at")

    def programs(self, config: DBOConfig, where: str = "") -> Callable[[int], Components]:
        """Every rank's program with the fault planted at `where` ("rank=1,ubatch=0,at=2").

        Raises:
            UsageError: the fault does not apply to this configuration; the message says what would make it apply.
        """
        site = self.site(where)
        self._require(config, site)
        clean, planted = Components(), self.plant(Components(), site)
        return lambda rank: planted if self.everywhere or rank == site.rank else clean

    def require_effect(self, trace: Trace, where: str = "") -> None:
        """Refuse a run in which the fault never came into effect; `trace` is that run's, and so the clean one's.

        Raises:
            UsageError: the run does not offer what the fault breaks; the message says what that is.
        """
        from sim.faults.clean_run import CleanRun

        site = self.site(where)
        offered = {self.inject(other) for other in self.sites(CleanRun(trace))}
        if self.inject(site) not in offered:
            rule = f"--inject {self.name} breaks something that happens in the run: it needs {self.needs}"
            places = ", ".join(sorted(offered)[:3])
            fix = f"plant it elsewhere, for example {places}" if places else "change the run so that it has that"
            raise UsageError.of(rule, fix=fix, inject=self.inject(site))

    def inject(self, site: Site) -> str:
        """What `--inject` takes to plant this fault at `site`."""
        where = ",".join(f"{key}={getattr(site, key)}" for key in self.keys)
        return f"{self.name}:{where}" if where else self.name

    def site(self, where: str) -> Site:
        """Parse "rank=1,ubatch=0"."""
        values: dict[str, object] = dict(self.defaults)
        for part in filter(None, where.split(",")):
            key, equals, text = part.partition("=")
            if key not in self.keys or not equals or (key != "field" and not text.isdigit()):
                rule = f"--inject {self.name} takes {', '.join(f'{k}=…' for k in self.keys)}"
                raise UsageError.of(rule, fix="write it so", part=part)
            values[key] = text if key == "field" else int(text)
        return Site(**values)  # type: ignore[arg-type]

    def _require(self, config: DBOConfig, site: Site) -> None:
        if self.backends and config.all2all_backend not in self.backends:
            rule = f"--inject {self.name} needs {_one_of(self.backends)}"
            fix = f"pass --all2all-backend {self.backends[0]}"
            raise UsageError.of(rule, fix=fix, all2all_backend=config.all2all_backend)
        if self.exchanges and config.decode_context_parallel_size < 2:
            rule = f"--inject {self.name} breaks a DCP group"
            fix = f"pass --decode-context-parallel-size 2 --dcp-comm-backend {self.exchanges[0]}"
            raise UsageError.of(rule, fix=fix, decode_context_parallel_size=config.decode_context_parallel_size)
        if self.exchanges and config.dcp_comm_backend not in self.exchanges:
            rule = f"--inject {self.name} needs {_one_of(self.exchanges)}"
            fix = f"pass --dcp-comm-backend {self.exchanges[0]}"
            raise UsageError.of(rule, fix=fix, dcp_comm_backend=config.dcp_comm_backend)
        if self.split and not config.enable_dbo:
            rule = f"--inject {self.name} needs a step that is split"
            raise UsageError.of(rule, fix="pass --enable-dbo", enable_dbo=config.enable_dbo)
        limits = {"rank": config.num_ranks, "ubatch": config.num_ubatches}
        for key, limit in limits.items():
            if key in self.keys and getattr(site, key) >= limit:
                rule = f"--inject {self.name} names a {key} that exists"
                raise UsageError.of(rule, fix=f"use one below {limit}", **{key: getattr(site, key)})


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
