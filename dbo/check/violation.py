"""What a detector hands back: the violations that it found, and how much it looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dbo.check.happens import HappensBefore
from dbo.errors import UsageError
from dbo.trace import Record, Trace


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One thing that is wrong in a trace. `rank`, `ubatch` and `step` are -1 where they do not apply.

    Attributes:
        id: the fault class, for example "stream-race".
        sentence: what happened, in one sentence; a wait-for report may follow on further lines.
        records: ids of the records that show it, the decisive one first.
        replay: the command that shows it again; filled in by whoever knows it.
        handled: the system dealt with it as promised (an error that ended its step with that error).
    """

    id: str
    sentence: str
    rank: int = -1
    ubatch: int = -1
    step: int = -1
    records: tuple[int, ...] = ()
    replay: str = ""
    handled: bool = False


@dataclass
class Findings:
    """A detector's answer for one trace.

    Attributes:
        checked: things looked at, in the detector's own unit (`Detector.UNIT`); 0 means that it had nothing to say.
    """

    id: str
    checked: int = 0
    violations: list[Violation] = field(default_factory=list)

    def violate(self, sentence: str, at: Record | None = None, *others: int, **where: Any) -> None:
        """Add a violation that record `at` shows; `where` overrides its rank, ubatch and step."""
        place: dict[str, Any] = {}
        if at is not None:
            place = {"rank": at.rank, "ubatch": at.ubatch, "step": at.step, "records": (at.id, *others)}
        self.violations.append(Violation(id=self.id, sentence=sentence, **{**place, **where}))


class Detector(Protocol):
    """One file of this package: an id, what it means, and a pure function of the trace.

    Attributes:
        ID: the fault class.
        SENTENCE: what a violation of it means.
        UNIT: what `Findings.checked` counts.
        READS: kinds of records that it looks at.
        NEEDS: those without which it has checked nothing.
    """

    @property
    def ID(self) -> str: ...
    @property
    def SENTENCE(self) -> str: ...
    @property
    def UNIT(self) -> str: ...
    @property
    def READS(self) -> Sequence[str]: ...
    @property
    def NEEDS(self) -> Sequence[str]: ...
    def detect(self, trace: Trace, happens: HappensBefore) -> Findings:
        """What is wrong in `trace`, and how much was looked at."""
        ...


def need(record: Record, name: str) -> Any:
    """The record's attribute `name`.

    Raises:
        UsageError: the record lacks it; a detector that skipped it would pass without having looked.
    """
    try:
        return record.attrs[name]
    except KeyError:
        raise UsageError.of(
            f"a record of kind {record.kind} carries attrs {name}",
            fix="record the trace with a world that writes it",
            record=record.id,
            rank=record.rank,
            line=record.line,
        ) from None
