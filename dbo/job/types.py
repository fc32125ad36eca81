"""What the main job is asked and what it answers: the request, the result, and the two things it calls back. No torch.

The result's fields are the keys of `dbo check --json` (`dbo.cli.render.to_json`): both change together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dbo.check.verdict import Verdict
    from dbo.check.violation import Violation
    from dbo.export.rows import Span


class PromptSource(Protocol):
    """Prompts that were read but not yet encoded: only the model folder knows the tokenizer and the limits."""

    @property
    def name(self) -> str:
        """Where they come from, as `--prompts` takes it."""

    def encode(self, *, encode: Callable[[str], Sequence[int]], vocab_size: int, max_tokens: int) -> list[list[int]]:
        """Token ids, one list a prompt.

        Raises:
            PromptError: a prompt encodes to nothing, to more than `max_tokens`, or to an id outside the vocabulary.
        """


class Progress(Protocol):
    """Told what happens while the job runs, so that an interrupted run can say how far it came."""

    def stage(self, text: str) -> None:
        """A new part of the job begins ("loading the model")."""

    def step(self, report: StepReport) -> None:
        """An engine step is over."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """One `dbo check`.

    Attributes:
        flags: configuration fields that the user set, by field name (`dbo.config.FLAGS`); the rest has its defaults.
        model: a Hugging Face folder; None: the generated one.
        prompts: None: the eight default prompts.
        steps: decode steps after the prefill.
        mode: whether tensors have data ("numeric") or not ("ordering").
        inject: the fault to plant, as `--inject` spells it.
        trace: where the trace goes; None: a place of the job's own choice.
        device: what tensors world gpu uses: "auto", "cpu" (over gloo) or "cuda".
        share_device: all ranks of world gpu on the first device.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None
    prompts: PromptSource | None = None
    steps: int = 8
    mode: str = "numeric"
    inject: str | None = None
    trace: Path | None = None
    device: str = "auto"
    share_device: bool = False

    @property
    def world(self) -> str:
        """Where it runs."""
        return str(self.flags.get("world", "sim"))

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""
        return int(self.flags.get("seed", 0))


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One engine step, over all ranks.

    Attributes:
        step: its number.
        phase: "prefill", "decode", "mixed", "idle"; "failed" where an error ended it, and `why` names that.
        split: whether it ran in ubatches.
        tokens: real tokens, by rank.
        padded_tokens: rows that each rank ran, by rank.
        votes: who wanted the split, by rank.
        ubatches: how many; 1 when not split.
        slices: by rank, the half-open token range `(start, stop)` of each ubatch; empty when not split.
        graph: "NONE" or "FULL".
        why: the rule that decided, in a few words.
    """

    step: int
    split: bool
    tokens: tuple[int, ...]
    padded_tokens: tuple[int, ...]
    ubatches: int = 1
    votes: tuple[bool, ...] = ()
    slices: tuple[tuple[tuple[int, int], ...], ...] = ()
    graph: str = "NONE"
    phase: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class SteadyLayer:
    """One layer of a split step away from the first and the last layer: what ran on the compute and comm rows."""

    rank: int
    step: int
    layer: int
    comp: tuple[Span, ...]
    comm: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class OverlapFigures:
    """How much of the communication the other ubatch's compute hides.

    Attributes:
        hidden_share: hidden / all communication time, 0 to 1; None: no step was split.
        ideal_share: what the schedule itself allows with the same durations.
        exposed_us: communication time that nothing hides, summed over ranks and split steps.
    """

    hidden_share: float | None
    ideal_share: float | None
    exposed_us: float


@dataclass(frozen=True, kw_only=True)
class Invariants:
    """How many facts the detectors checked, and how many of them failed."""

    checked: int
    failed: int
    by_detector: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the run was compared with; None fields: not compared.

    Attributes:
        tokens_equal, max_rel_err: the same requests unsplit on one rank; `why_not` says why there was no comparison.
        ties: requests that left the reference's text where its own margin is below the dtype's.
        serial_equal: the same run with the halves of each step one after another, bit for bit.
        order_as_simulated: the steady order is the one that the simulator gives.
        twin_failed: why one of these two runs gave nothing to compare with.
    """

    tokens_equal: bool | None
    max_rel_err: float | None
    why_not: str = ""
    ties: int = 0
    serial_equal: bool | None = None
    order_as_simulated: bool | None = None
    twin_failed: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What `dbo check` found.

    Attributes:
        verdict, violations: as `dbo.check` made them; each violation with the command that shows it again.
        order: one steady layer in the seed's spelling ("D1.send", "A0_0", …); empty when no step was split.
        order_exchanged: the ubatches are exchanged against the seed's line (context 0 leads).
        forced_drains: waits of a host for a device line inside a layer that nobody declared.
        device: what tensors were on, where it was not the simulator.
        trace: the file that holds the trace, or "not written: " and why.
        replay: the command that runs the same again.
    """

    verdict: Verdict
    violations: tuple[Violation, ...] = ()
    ranks: int
    steps: tuple[StepReport, ...] = ()
    order: tuple[str, ...] = ()
    order_exchanged: bool = False
    steady_layer: SteadyLayer | None = None
    overlap: OverlapFigures
    invariants: Invariants
    reference: Reference
    forced_drains: int = 0
    replay: str
    trace: str | None = None
    seed: int = 0
    world: str = "sim"
    mode: str = "numeric"
    device: str = ""
    backend: str = ""
    schedule: str = ""
    model: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 for a verdict that says the run is good, else 1: a run that decided nothing is not good."""
        return 0 if self.verdict.good else 1
