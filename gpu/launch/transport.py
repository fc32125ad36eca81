"""What ranks hand back to the launcher, through files. Exceptions travel whatever arguments their class takes."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from dbo.errors import DBOError, refusal


class RankError(DBOError):
    """Stands for an error of a rank that cannot be sent between processes; its text is all that is left."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return _rebuild, (type(obj), obj.args, _sendable(obj.__dict__), obj.__cause__)
        return NotImplemented


def _rebuild(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any], cause: BaseException | None
) -> BaseException:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    error.__cause__ = cause
    return error


def _sendable(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.startswith("__")}


def dumps(value: Any) -> bytes:
    """`value` as bytes for `pickle.loads`.

    Raises:
        Exception: something in it cannot be sent.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def sendable(error: BaseException) -> BaseException:
    """`error`, or a `RankError` with its text where it cannot be sent or read back."""
    try:
        pickle.loads(dumps(error))
    except Exception:
        return RankError(f"{type(error).__name__}: {error}")
    return error


def sendable_left(left: Any) -> Any:
    """What a rank leaves (`gpu.launch.process.Left`), or the same with an error in place of a value that cannot be sent."""
    try:
        dumps(left)
    except Exception as error:
        rule = "what a rank's program returns is pickled for the launcher"
        why = refusal(rule, "return values of importable types", type=type(left.value).__name__, error=error)
        return replace(left, value=None, error=left.error or RankError(why))
    return left


def write(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees all of it or no file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(dumps(value))
    os.replace(partial, path)


def read(path: Path) -> Any:
    """What `write` wrote there, or None when there is nothing."""
    return pickle.loads(path.read_bytes()) if path.exists() else None
