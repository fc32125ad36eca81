"""Checked values out of a model folder's JSON files. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbo.config.paths import MIB, read_bounded
from dbo.errors import ModelFormatError


def bad_model(rule: str, fix: str, **values: object) -> ModelFormatError:
    """The error for a model folder that breaks `rule`, to be raised."""
    return ModelFormatError.of(rule, fix=fix, **values)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelFormatError: the file is missing, unreadable, no JSON, or JSON but no object.
    """
    try:
        data = json.loads(
            read_bounded(path, limit_bytes=128 * MIB, what="a file of a model folder", error=ModelFormatError).decode()
        )
    except OSError as error:
        fix = "download the folder again"
        raise bad_model("a model folder needs this file", fix, file=path, error=error.strerror) from error
    except ValueError as error:
        raise bad_model("this file holds JSON", "download the file again", file=path, error=error) from error
    if not isinstance(data, dict):
        raise bad_model(
            "this file holds a JSON object", "download the file again", file=path, found=type(data).__name__
        )
    return data


def whole(raw: Mapping[str, Any], name: str, *, default: int | None = None, least: int = 1) -> int:
    """The integer `raw[name]`, at least `least`; null or no such key means `default`."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise bad_model(f"config.json gives an integer >= {least} here", "correct config.json", **{name: repr(value)})
    return value


def real(raw: Mapping[str, Any], name: str, *, default: float | None = None, positive: bool = True) -> float:
    """The finite number `raw[name]`, above 0 (or not below it); null or no such key means `default`."""
    value: Any = raw.get(name)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        kind = "positive" if positive else "non-negative"
        raise bad_model(f"config.json gives a {kind} number here", "correct config.json", **{name: repr(value)})
    return float(value)


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids, or null, as config.json writes `eos_token_id`."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise bad_model("a token id is an integer", "correct config.json", eos_token_id=repr(value))
    return tuple(ids)
