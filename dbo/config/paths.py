"""Reading files that a user names: regular ones of a bounded size, so that a device or a pipe is refused at once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dbo.errors import UsageError

MIB = 2**20


def refuse_irregular(path: Path, *, what: str, error: type[UsageError] = UsageError) -> None:
    """Refuse what is no regular file, without opening it: opening a pipe waits for its other end.

    Raises:
        UsageError: of the given class. OSError: there is nothing to look at.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder says by itself that it is one
        raise error.of(f"{what} is a regular file", fix="name a file, no device or pipe", path=path)


def read_bounded(path: Path, *, limit_bytes: int, what: str, error: type[UsageError] = UsageError) -> bytes:
    """The bytes of a regular file of at most `limit_bytes`.

    Raises:
        UsageError: of the given class; not regular, or larger. OSError: it cannot be read.
    """
    refuse_irregular(path, what=what, error=error)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise error.of(f"{what} is of a bounded size", fix="name a smaller file", path=path, limit_bytes=limit_bytes)
    return data
