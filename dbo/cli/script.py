"""The console's way in: `main` as a process of its own, which ends with `main`'s exit code whatever still runs."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from dbo.cli.answer import Exit
from dbo.cli.dispatch import main

ONE_PRESS_S = 1.0
"""Interrupts so close to the last one are the same one: `timeout -s INT` sends two, and so does a nervous finger."""

_pressed_s = -ONE_PRESS_S


def script() -> NoReturn:
    """Run `main` on the process's arguments and end the process."""
    _hold_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = main()
    except KeyboardInterrupt:  # one more, while the answer to the first was made
        code = Exit.INTERRUPTED
    if code == Exit.INTERRUPTED or any(thread.daemon for thread in threading.enumerate()):
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """End without the interpreter's end: threads of the simulator that stand inside torch would make that an abort."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _pressed_s
    now, before = time.monotonic(), _pressed_s
    if now - before >= ONE_PRESS_S:
        _pressed_s = now
        raise KeyboardInterrupt


def _hold_standard_streams() -> None:
    """Put nothing in the place of streams that the caller closed (`>&-`): else the next file opened would be stdout."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
