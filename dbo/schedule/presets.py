"""Schedules by name: the presets that ship with the package, or a file."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from dbo.config.paths import MIB, read_bounded
from dbo.errors import ScheduleError, refusal
from dbo.schedule.model import Schedule
from dbo.schedule.oplist import parse_operations
from dbo.schedule.text import parse_schedule


@cache
def presets() -> MappingProxyType[str, Schedule]:
    """Every preset by its name, in order of names; aliases are not keys.

    Raises:
        ScheduleError: a preset that does not parse, or a name that two of them claim.
    """
    found: dict[str, Schedule] = {}
    taken: set[str] = set()
    folder = resources.files("dbo.presets")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".schedule"):
            continue
        schedule = parse_schedule(entry.read_text(encoding="utf-8"), source=entry.name)
        for name in (schedule.name, *schedule.aliases):
            if name in taken:
                raise ScheduleError.of("a schedule's name is its own", fix="rename one", name=name, file=entry.name)
            taken.add(name)
        found[schedule.name] = schedule
    return MappingProxyType(found)


def load_schedule(name_or_path: str | Path) -> Schedule:
    """A preset by name or alias, else a file: a schedule, or with the suffix `.ops` a list of operations.

    Raises:
        ScheduleError: neither a preset nor a file that can be read; the message lists the presets.
        ScheduleSyntaxError: a file that does not parse.
    """
    for schedule in presets().values():
        if name_or_path in (schedule.name, *schedule.aliases):
            return schedule
    path = Path(name_or_path)
    try:
        text = read_bounded(path, limit_bytes=MIB, what="a schedule", error=ScheduleError).decode()
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(name for s in presets().values() for name in (s.name, *s.aliases))
        raise ScheduleError(
            refusal("a schedule is a preset or a file", f"use one of {names}, or a path", schedule=name_or_path)
            + f" ({type(error).__name__})"
        ) from error
    if path.suffix == ".ops":
        return parse_operations(text, name=path.stem, source=str(path))
    return parse_schedule(text, source=str(path))
