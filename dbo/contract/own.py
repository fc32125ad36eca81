"""A world orders its own streams and events only."""

from __future__ import annotations

from typing import TypeVar

from dbo.errors import UsageError

T = TypeVar("T")


def own(thing: object, type_: type[T]) -> T:
    """`thing` as this world's own stream or event.

    Raises:
        UsageError: it comes from another world.
    """
    if not isinstance(thing, type_):
        rule = "streams and events of one world order each other"
        raise UsageError.of(rule, fix="make them with the world that uses them", got=type(thing).__name__)
    return thing
