"""Needs torch (only for its path). Where in the user's code an operation was issued: ``dbo/model/attention.py:88``."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from types import CodeType, FrameType

import torch

import sim

_SKIPPED_FOLDERS = tuple(os.path.dirname(os.path.abspath(m.__file__ or "")) + os.sep for m in (torch, sim))
_SKIPPED_FILES = frozenset(m.__file__ for m in (contextlib, functools, threading))
_shown: dict[CodeType, str] = {}  # "" for code that is never the user's


def issued_at() -> str:
    """``file.py:line`` of the nearest frame that is neither torch's nor the simulator's; "" if there is none.

    The path is the module's, from its top-level package on, and never absolute.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        shown = _shown.get(code)
        if shown is None:
            shown = _shown[code] = _describe(frame)
        if shown:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _describe(frame: FrameType) -> str:
    filename = frame.f_code.co_filename
    absolute = os.path.abspath(filename)
    if filename in _SKIPPED_FILES or absolute.startswith(_SKIPPED_FOLDERS):
        return ""
    module = frame.f_globals.get("__name__") or "__main__"
    base = os.path.basename(filename)
    if "." not in module:
        return base
    parts = module.split(".")
    if base == "__init__.py":
        return "/".join([*parts, base])
    return "/".join([*parts[:-1], base])
