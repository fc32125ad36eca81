"""Reserving SMs for exchanges, around a call and not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from dbo.errors import ConfigError


class SmSetting(Protocol):
    """A library whose kernels run on a number of SMs that is set, not passed; DeepEP's `Buffer` is one."""

    num_sms: int

    def set_num_sms(self, new_num_sms: int) -> None:
        """Set the SM count of every later call of this process."""


@contextmanager
def reserved_comm_sms(library: SmSetting, sms: int) -> Iterator[None]:
    """Let `library` use `sms` SMs inside the block, and what it used before after it; 0 changes nothing.

    The setting belongs to the whole process, so a block that left its own value behind would slow every unsplit step.

    Raises:
        ConfigError: an odd or negative count; the library's channels take two SMs each.
    """
    if sms < 0 or sms % 2:
        raise ConfigError.of("comm SMs come in pairs", fix="use an even count, or 0 for the default", sms=sms)
    previous = library.num_sms
    if sms:
        library.set_num_sms(sms)
    try:
        yield
    finally:
        if sms:
            library.set_num_sms(previous)
