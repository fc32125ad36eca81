"""Importer for lists of operations with yield markers, the form in which some engines write two-batch overlap.

    # comments and blank lines are skipped; quotes, brackets, commas and call parentheses too
    offset 2                          how many stages apart the ubatches run
    alias mixer = A1                  what an operation is: a point, or - for work without a point of its own
    layer.op_comm_prepare_attn
    layer.self_attn.op_prepare
    yield                             or YIELD, YieldOperation(), |
    layer.self_attn.op_core
    …

An operation's name is its last component, without `op_`. Names in `ALIASES`, and points themselves, need no alias.
Operations without a point belong to the one before. What a list does not say follows from the backends: without receive
hooks sends go on the comm stream; with them all is on compute, and a hook is run before each send and each yield, so
that a receive is launched before its owner gets the baton back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from dbo.errors import ScheduleSyntaxError, UsageError
from dbo.schedule.model import (
    BACKENDS,
    HOOK_BACKENDS,
    POINTS,
    RECV_OF,
    REQUIRED_POINTS,
    Item,
    LayerProgram,
    Point,
    RunRecvHook,
    Schedule,
    Yield,
)

NO_POINT = "-"
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "comm_prepare_attn": NO_POINT,
        "prepare": "A0",
        "attn_prepare": "A0",
        "core": "A1",
        "attn_core": "A1",
        "comm_prepare_mlp": NO_POINT,
        "gate": NO_POINT,
        "select_experts": NO_POINT,
        "dispatch_a": "D.send",
        "shared_experts": "S",
        "dispatch_b": "D.recv",
        "experts": "MLP",
        "combine_a": "C.send",
        "combine_b": "C.recv",
        "output": NO_POINT,
        "comm_postprocess_layer": NO_POINT,
    }
)
"""Names of operations that are in use, without the `op_` in front."""

_YIELDS = frozenset({"|", "yield", "yieldoperation"})
_WORD = re.compile(r"\||[\w.]+")
_SKIPPED = re.compile(r"[\s,\[\]()\"']*")
_ALIAS = re.compile(r"\s*alias\s+(?P<name>[\w.]+)\s*=\s*(?P<point>\S+)\s*$")
_OFFSET = re.compile(r"\s*offset\s+(?P<offset>\d+)\s*$")


def parse_operations(
    text: str,
    *,
    name: str,
    backends: Sequence[str] = BACKENDS,
    aliases: Mapping[str, str] | None = None,
    offset: int = 0,
    source: str = "<operations>",
) -> Schedule:
    """A schedule from one layer's list of operations.

    Args:
        name: of the schedule.
        backends: where it may be used.
        aliases: names of operations to points, or to "-"; they win over `ALIASES`, lines of the text win over them.
        offset: between the ubatches, in yields; a line of the text wins.

    Raises:
        ScheduleSyntaxError: with line and column: an operation that no alias knows, a point named twice or missing.
        UsageError: `backends` or `aliases` name something unknown.
    """
    _check_arguments(backends, aliases or {})
    reader = _Reader(source, {**ALIASES, **(aliases or {})}, offset)
    for number, line in enumerate(text.splitlines(), start=1):
        reader.line(number, line.split("#", 1)[0])
    reader.check_complete()
    hooked = tuple(b for b in backends if b in HOOK_BACKENDS)
    plain = tuple(b for b in backends if b not in HOOK_BACKENDS)
    programs = (
        [LayerProgram(items=tuple(_with_hooks(reader.items)), backends=hooked if plain else ())] if hooked else []
    )
    programs += [LayerProgram(items=tuple(_on_streams(reader.items)))] if plain else []
    return Schedule(
        name=name,
        backends=tuple(backends),
        programs=tuple(programs),
        offset=reader.offset,
        declared_yields=programs[0].yields,
    )


def _check_arguments(backends: Sequence[str], aliases: Mapping[str, str]) -> None:
    for backend in backends or ("",):
        if backend not in BACKENDS:
            raise UsageError.of("the backend is known", fix=f"use one of {', '.join(BACKENDS)}", backend=backend)
    for operation, point in aliases.items():
        if point != NO_POINT and point not in POINTS:
            fix = f"use one of {' '.join(POINTS)}, or {NO_POINT}"
            raise UsageError.of("an alias names a point", fix=fix, operation=operation, point=point)


class _Reader:
    """The items of a list, as far as it has been read."""

    def __init__(self, source: str, aliases: dict[str, str], offset: int) -> None:
        self.source = source
        self.aliases = aliases
        self.offset = offset
        self.items: list[Point | Yield] = []
        self.end = (1, 1)

    def line(self, number: int, text: str) -> None:
        if text.strip():
            self.end = number, len(text.rstrip()) + 1
        if (alias := _ALIAS.match(text)) is not None:
            point = alias["point"]
            if point != NO_POINT and point not in POINTS:
                fix = f"use one of {' '.join(POINTS)}, or {NO_POINT}"
                raise self._error(number, alias.start("point"), f"an alias names a point: point={point!r}; {fix}")
            self.aliases[_plain(alias["name"])] = point
        elif (offset := _OFFSET.match(text)) is not None:
            self.offset = int(offset["offset"])
        else:
            self._operations(number, text)

    def _operations(self, number: int, text: str) -> None:
        at = _skip(text, 0)
        while at < len(text):
            found = _WORD.match(text, at)
            if found is None:
                message = f"expected an operation or a yield marker: text={text[at]!r}; one name a line is enough"
                raise self._error(number, at, message)
            self._word(found.group(), number, at)
            at = _skip(text, found.end())

    def _word(self, word: str, line: int, at: int) -> None:
        if word.rpartition(".")[2].lower() in _YIELDS:
            self.items.append(Yield())
            return
        point = word if word in POINTS else self.aliases.get(_plain(word), "")
        if not point:
            fix = f"add a line `alias {_plain(word)} = POINT`, or = {NO_POINT} for work without a point of its own"
            raise self._error(line, at, f"every operation is known: operation={word!r}; {fix}")
        if point == NO_POINT:
            return
        if Point(point) in self.items:
            fix = f"give the others the alias {NO_POINT}"
            raise self._error(line, at, f"a layer reaches a point once: operation={word!r}, point={point}; {fix}")
        self.items.append(Point(point))

    def check_complete(self) -> None:
        for name in REQUIRED_POINTS:
            if Point(name) not in self.items:
                line, column = self.end
                raise self._error(
                    line, column - 1, f"a layer reaches every point: missing={name}; add an operation for it"
                )

    def _error(self, line: int, at: int, message: str) -> ScheduleSyntaxError:
        return ScheduleSyntaxError(message, line=line, column=at + 1, source=self.source)


def _skip(text: str, at: int) -> int:
    """The next place with something to read."""
    found = _SKIPPED.match(text, at)
    return found.end() if found is not None else at


def _plain(operation: str) -> str:
    """The name that aliases go by."""
    return operation.rpartition(".")[2].removeprefix("op_")


def _on_streams(items: Sequence[Point | Yield]) -> Iterator[Item]:
    """Sends, and the copy behind a receive, on the comm stream."""
    for item in items:
        on_comm = isinstance(item, Point) and (item.name in RECV_OF or item.name == "copy")
        yield Point(item.name, "comm") if isinstance(item, Point) and on_comm else item


def _with_hooks(items: Sequence[Point | Yield]) -> Iterator[Item]:
    """Everything on compute; a hook before each send, and before each yield whose run has had none."""
    ran = False
    for item in items:
        if (isinstance(item, Point) and item.name in RECV_OF) or (isinstance(item, Yield) and not ran):
            yield RunRecvHook()
            ran = True
        yield item
        if isinstance(item, Yield):
            ran = False
