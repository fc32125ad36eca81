"""What a long command reached: shown while it runs, where somebody watches, and told when it is interrupted."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

from dbo.job.types import StepReport


@dataclass(kw_only=True)
class Reached:
    """Implements `dbo.job.types.Progress`. Shows one line, rewritten in place, on a terminal only.

    Attributes:
        judges: the command ends in a verdict on steps, so an interrupt says how far it came.
    """

    judges: bool = False
    stream: TextIO | None = field(default_factory=lambda: sys.stderr)
    stages: list[str] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)

    def stage(self, text: str) -> None:
        self.stages.append(text)
        self._show(text)

    def step(self, report: StepReport) -> None:
        self.steps.append(report)
        self._show(f"step {report.step}: {report.phase or 'done'}")

    def clear(self) -> None:
        """Remove the progress line before anything else is printed."""
        self._rewrite("")

    def _show(self, text: str) -> None:
        self._rewrite(f"{text[:100]} …")

    def _rewrite(self, line: str) -> None:
        if self.stream is not None and self.stream.isatty():
            self.stream.write(f"\r\x1b[K{line}")
            self.stream.flush()
