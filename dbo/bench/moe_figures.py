"""What `dbo bench moe` derives from its samples, and which targets that reaches. No torch.

ideal gain       (compute + comm) / max(compute of the halves, comm)
own gain         without DBO / with DBO, same backend, same SMs
realised         own gain / ideal gain
hidden           (compute of the halves + comm - DBO) / comm, between 0 and 1
marginal         (time of 2L layers - time of L layers) / L: what a layer in the middle takes
hidden, steady   hidden, from marginal times
beside compute   share of the time in which bytes are under way, in layers that are neither first nor last, that kernels of the
                 layers run beside it, as a profiler saw one pass. It says that nothing waits; `hidden` also counts what the
                 exchange takes of the device: bandwidth, and the kernels around it
serial overhead  without DBO / (compute + comm)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NO_DBO, DBO, COMPUTE, HALVES, COMM, COMM_HALVES = "no_dbo", "dbo", "compute", "halves", "comm", "comm_halves"
VARIANTS = (NO_DBO, DBO, COMPUTE, HALVES, COMM, COMM_HALVES)
Span = tuple[float, float]
"""Beginning and end."""
LONG = ".long"
"""Ending of a variant's name: the same over twice the layers."""

LEAST_TOKENS = 4096
"""Targets are for batches of at least so many tokens a rank; smaller ones are told."""
SWEEP = (0.2, 1.0)
"""Communication over compute, where the share of the ideal is judged."""
LEAST_REALISED, MOST_SERIAL, LEAST_GAIN, LEAST_STEADY, LEAST_LITE, LEAST_HOST = 0.90, 1.05, 1.35, 0.95, 1.05, 2.0


@dataclass(frozen=True, kw_only=True)
class MoERow:
    """One schedule on one backend.

    Attributes:
        comm_sms: of the exchanges, with DBO and without; 0: the library's choice, or none.
        layers: L, of the short stack. what: of the batch, a few words.
        error: largest error of a row of the stack's output against the step without DBO, by norm. limit: above it the
            row counts as wrong.
        bit_equal: DBO gave the very bits of its two halves run one after the other.
        samples_ms: of a pass over the stack, by variant and repetition, of the slowest rank; empty when wrong.
        beside_compute: see above; None: not profiled.
        note: why there are no samples, or what to know.
    """

    shape: str
    tokens: int
    mode: str
    backend: str
    comm_sms: int
    schedule: str
    layers: int
    what: str = ""
    error: float = 0.0
    limit: float = 0.0
    bit_equal: bool = False
    samples_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    beside_compute: float | None = None
    note: str = ""

    @property
    def correct(self) -> bool:
        return self.error <= self.limit

    @property
    def timed(self) -> bool:
        return all(self.samples_ms.get(variant) for variant in VARIANTS)

    @property
    def has_long(self) -> bool:
        return all(self.samples_ms.get(variant + LONG) for variant in VARIANTS)

    def ms(self, variant: str) -> float:
        """Median time of a pass."""
        return statistics.median(self.samples_ms[variant])

    def marginal_ms(self, variant: str) -> float:
        """What one more layer takes."""
        return (self.ms(variant + LONG) - self.ms(variant)) / self.layers

    @property
    def ratio(self) -> float:
        """Communication over compute."""
        return self.ms(COMM) / self.ms(COMPUTE)

    @property
    def ideal_gain(self) -> float:
        return (self.ms(COMPUTE) + self.ms(COMM)) / max(self.ms(HALVES), self.ms(COMM))

    @property
    def own_gain(self) -> float:
        return self.ms(NO_DBO) / self.ms(DBO)

    @property
    def realised(self) -> float:
        return self.own_gain / self.ideal_gain

    @property
    def serial_overhead(self) -> float:
        return self.ms(NO_DBO) / (self.ms(COMPUTE) + self.ms(COMM))

    @property
    def hidden(self) -> float:
        return hidden_share(self.ms(HALVES), self.ms(COMM), self.ms(DBO))

    @property
    def steady_hidden(self) -> float | None:
        """None: the longer stack was not measured."""
        if not self.has_long:
            return None
        return hidden_share(self.marginal_ms(HALVES), self.marginal_ms(COMM), self.marginal_ms(DBO))

    def to_json(self) -> dict[str, Any]:
        derived = {}
        if self.timed:
            names = ("ratio", "ideal_gain", "own_gain", "realised", "serial_overhead", "hidden", "steady_hidden")
            derived = {name: getattr(self, name) for name in names}
            derived["median_ms"] = {name: self.ms(name) for name in self.samples_ms}
        return asdict(self) | derived | {"correct": self.correct}


def hidden_share(halves_ms: float, comm_ms: float, dbo_ms: float) -> float:
    """How much of the communication did not add to the time of computing the halves, between 0 and 1."""
    return min(1.0, max(0.0, (halves_ms + comm_ms - dbo_ms) / comm_ms)) if comm_ms > 0 else 0.0


def beside(moving: Sequence[Span], computing: Sequence[Span], layers: int) -> float | None:
    """The share of `moving` during which some of `computing` ran, the first and the last of `layers` left out.

    None: nothing moves in the layers between.
    """
    moving = sorted(moving)
    each = len(moving) // layers
    steady = moving[each : len(moving) - each]
    total = sum(end - start for start, end in steady)
    if not total:
        return None
    busy = _union(computing)
    shared = sum(max(0.0, min(end, e) - max(start, s)) for start, end in steady for s, e in busy)
    return shared / total


def _union(spans: Sequence[Span]) -> list[Span]:
    """The same time in spans that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


Batch = tuple[str, int, str]
"""Shape, tokens and mode."""


def by_batch(rows: Sequence[MoERow]) -> Iterator[tuple[Batch, list[MoERow]]]:
    """Rows that were timed, with those that they compete with, in order."""
    found: dict[Batch, list[MoERow]] = {}
    for row in rows:
        if row.timed:
            found.setdefault((row.shape, row.tokens, row.mode), []).append(row)
    yield from found.items()


def best_without(rows: Sequence[MoERow], shape: str, tokens: int) -> MoERow:
    """The fastest run without DBO of this batch on any backend, with any SMs, eager or in a graph."""
    return min((r for r in rows if r.timed and (r.shape, r.tokens) == (shape, tokens)), key=lambda r: r.ms(NO_DBO))


def gain_over_best(row: MoERow, rows: Sequence[MoERow]) -> float:
    """What a user gains who would otherwise run the best configuration without DBO."""
    return best_without(rows, row.shape, row.tokens).ms(NO_DBO) / row.ms(DBO)


@dataclass(frozen=True, kw_only=True)
class GainVerdict:
    """One target. `reached` is None where nothing was measured that it speaks of."""

    target: str
    reached: bool | None
    detail: str

    def __str__(self) -> str:
        word = {True: "reached", False: "MISSED", None: "not measured"}[self.reached]
        return f"{word}: {self.target}{f' ({self.detail})' if self.detail else ''}"


def verdicts(rows: Sequence[MoERow], host_ratio: float | None = None) -> list[GainVerdict]:
    """Which targets are reached. Each batch is judged by its fastest run, with and without DBO.

    Args:
        host_ratio: host cost a step of a ring of `threading.Event` and new threads, over ours.
    """
    batches = {batch: found for batch, found in by_batch(rows) if batch[1] >= LEAST_TOKENS}
    wide = {b: min(found, key=lambda r: r.ms(DBO)) for b, found in batches.items() if b[0].startswith(("wide", "thin"))}
    lite = {b: min(found, key=lambda r: r.ms(DBO)) for b, found in batches.items() if b[0] == "lite"}
    sweep = {b: row for b, row in wide.items() if SWEEP[0] <= row.ratio <= SWEEP[1]}
    without = {b: min(found, key=lambda r: r.ms(NO_DBO)) for b, found in batches.items()}
    steady = {b: row.beside_compute for b, row in wide.items()}
    gains = {b: gain_over_best(row, rows) for b, row in (wide | lite).items()}
    return [
        _all(
            f"DBO realises >= {LEAST_REALISED:.0%} of the ideal gain, comm/compute {SWEEP[0]} to {SWEEP[1]}",
            {b: row.realised for b, row in sweep.items()},
            LEAST_REALISED,
            "{:.0%}",
        ),
        _all(
            f"the best run without DBO is within {MOST_SERIAL - 1:.0%} of its compute + comm",
            {b: row.serial_overhead for b, row in without.items()},
            MOST_SERIAL,
            "{:.3f}",
            at_most=True,
        ),
        _any(
            f"gain >= {LEAST_GAIN} over the best run without DBO on any backend, for one shape",
            {b: gains[b] for b in wide},
            LEAST_GAIN,
        ),
        _all(
            f">= {LEAST_STEADY:.0%} of communication runs beside compute in steady layers",
            {b: share for b, share in steady.items() if share is not None},
            LEAST_STEADY,
            "{:.0%}",
        ),
        _all(
            f"DeepSeek-V2-Lite's shape gains >= {LEAST_LITE} over the best run without DBO",
            {b: gains[b] for b in lite},
            LEAST_LITE,
            "{:.3f}",
        ),
        _all(
            f"a step's hand-overs cost the host >= {LEAST_HOST:g} times less than events and new threads",
            {} if host_ratio is None else {("host", 0, ""): host_ratio},
            LEAST_HOST,
            "{:.1f}",
        ),
    ]


def _all(target: str, found: Mapping[Batch, float], bound: float, form: str, *, at_most: bool = False) -> GainVerdict:
    """Every batch reaches the bound; those that do not are named, else the one that is nearest to it."""
    if not found:
        return GainVerdict(target=target, reached=None, detail="")
    missed = {b: value for b, value in found.items() if (value > bound if at_most else value < bound)}
    pick = max if at_most else min
    told = missed or {b: found[b] for b in [pick(found, key=found.__getitem__)]}
    detail = ", ".join(f"{_name(batch)} {form.format(value)}".strip() for batch, value in told.items())
    return GainVerdict(target=target, reached=not missed, detail=detail)


def _any(target: str, found: Mapping[Batch, float], bound: float) -> GainVerdict:
    if not found:
        return GainVerdict(target=target, reached=None, detail="")
    best = max(found, key=found.__getitem__)
    return GainVerdict(target=target, reached=found[best] >= bound, detail=f"{_name(best)} {found[best]:.3f}")


def _name(batch: Batch) -> str:
    shape, tokens, mode = batch
    return f"{shape} {tokens} {mode}" if tokens else shape
