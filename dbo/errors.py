"""The one exception tree.

Every message says the rule, ``name=value``, and the fix, in one sentence. The command line maps `UsageError` to exit
code 2, `NotAvailable` to 3, and everything else that a run reports to 1.
"""

from __future__ import annotations

from typing import Self


class DBOError(Exception):
    """Root of everything this project raises on purpose."""

    @classmethod
    def of(cls, rule: str, *, fix: str, **values: object) -> Self:
        """The error whose message is `rule: name=value, name=value; fix`."""
        return cls(refusal(rule, fix, **values))


class UsageError(DBOError):
    """Bad input: a flag, a file, a prompt. Exit code 2."""


class ArgumentError(DBOError, ValueError):
    """A value that a function of this project cannot take."""


class ConfigError(UsageError):
    """A configuration that cannot work, or that the ranks do not share."""


class ModelFormatError(UsageError):
    """A model folder that cannot be read: missing, corrupt, pickled, or of another architecture."""


class PromptError(UsageError):
    """A prompt that is empty, too long, or holds a token outside the vocabulary."""


class ScheduleError(UsageError):
    """A schedule that the validator refuses."""


class ScheduleSyntaxError(ScheduleError):
    """A schedule text that does not parse.

    Attributes:
        line, column: 1-based position of the first character that does not fit.
    """

    def __init__(self, message: str, *, line: int, column: int, source: str = "<schedule>") -> None:
        super().__init__(f"{source}:{line}:{column}: {message}")
        self.line = line
        self.column = column
        self.source = source


class NotAvailable(DBOError):
    """Something that this machine or this build does not have. Exit code 3."""


class UBatchError(DBOError):
    """A ubatch raised; the original error is the `__cause__`.

    Attributes:
        rank, ubatch: who raised first.
    """

    def __init__(self, *, rank: int, ubatch: int, cause: BaseException) -> None:
        super().__init__(f"ubatch {ubatch} of rank {rank} raised {type(cause).__name__}: {cause}")
        self.rank = rank
        self.ubatch = ubatch
        self.__cause__ = cause


class EngineError(DBOError):
    """A misuse of the request side: a step scheduled twice, a block freed twice, a row of logits nobody computed."""


class Unwinding(BaseException):
    """Base of what ends a host task from outside (a peer's error, the end of the world); never an error of its own."""


class RingError(DBOError):
    """A misuse of the ring: a hook registered while one is pending, a context entered twice, a stream not current."""


class PeerFailed(DBOError):
    """An exchange cannot complete because another rank ended its step with an error.

    Attributes:
        rank: the rank that failed.
    """

    def __init__(self, rank: int, why: str = "") -> None:
        super().__init__(f"rank {rank} failed in this step{': ' + why if why else ''}; the exchange cannot complete")
        self.rank = rank


class MetadataError(DBOError):
    """A batch's metadata that cannot be cut for ubatches: a field without a rule, or without what its rule needs."""


class StepDrift(DBOError):
    """Ranks coordinate different steps.

    Attributes:
        steps: the step number of every rank, by rank.
    """

    def __init__(self, steps: list[int]) -> None:
        listed = ", ".join(f"rank{r}={s}" for r, s in enumerate(steps))
        super().__init__(
            f"all ranks must coordinate the same step: {listed}; the rank that skipped a coordination is ahead"
        )
        self.steps = steps


class WorkspaceError(DBOError):
    """A misuse of the staging workspace: growth after the lock, capture without a graph's own staging, a stale replay."""


class DeviceTensorError(DBOError, RuntimeError):
    """A misuse of a device tensor that a real device refuses too, for example operands on two devices."""


class HostAccessError(DeviceTensorError, TypeError):
    """The host asked for the memory of a device tensor without copying it to the host first."""


class CaptureError(DeviceTensorError):
    """Something that an open graph capture forbids: a host read, a copy from pageable host memory."""


def refusal(rule: str, fix: str, **values: object) -> str:
    """One sentence: the rule, the offending ``name=value`` pairs, the fix."""
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{rule}: {shown}; {fix}"
