"""Each option by itself: its choices and its bounds, as declared. The rules about several options rely on these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dbo.config.case import ConfigUnderTest
from dbo.config.flags import FLAGS, Flag
from dbo.config.options import DBOConfig
from dbo.errors import refusal

_MAY_BE_NONE = frozenset(flag.field for flag in FLAGS if DBOConfig.__annotations__[flag.field].endswith("| None"))


def values(case: ConfigUnderTest) -> Iterator[str]:
    """Each option by itself: its type, its choices, its bounds."""
    given = [(flag, getattr(case.config, flag.field)) for flag in FLAGS]
    for flag, value in given:
        if value is None and flag.field in _MAY_BE_NONE:
            continue
        choices = flag.choices
        if choices is not None and value not in choices:
            rule = f"{flag.field} is one of {', '.join(choices)}"
            yield refusal(rule, "choose one of these", **{flag.field: value})
    for flag, value in given:
        if flag.type is int:
            yield from _bounded(flag, value)
    for flag, value in given:
        if isinstance(value, tuple):
            yield from _sizes(flag, value)


def _bounded(flag: Flag, value: Any) -> Iterator[str]:
    least, most = flag.declared.least, flag.declared.most
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        rule = f"{flag.field} is an integer of at least {least}"
        yield refusal(rule, f"raise it to {least}", **{flag.field: value})
    elif most is not None and value > most:
        yield _too_large(flag, value)


def _sizes(flag: Flag, sizes: tuple[int, ...]) -> Iterator[str]:
    if not _increasing(sizes):
        rule = f"{flag.field} are increasing integers above 0"
        yield refusal(rule, "sort them and drop repetitions", **{flag.field: sizes})
    elif sizes and flag.declared.most is not None and sizes[-1] > flag.declared.most:
        yield _too_large(flag, sizes)


def _too_large(flag: Flag, value: Any) -> str:
    most = flag.declared.most
    rule = f"{flag.field} is at most {most}, since {flag.declared.why}"
    return refusal(rule, f"lower it to {most}", **{flag.field: value})


def _increasing(sizes: tuple[int, ...]) -> bool:
    whole = all(isinstance(s, int) and not isinstance(s, bool) for s in sizes)
    return whole and all(a < b for a, b in zip((0, *sizes), sizes, strict=False))
