"""The text form of a schedule: one statement a line, `#` starts a comment, an indented line continues the one above.

    schedule NAME                 required
    description WORDS…
    alias NAME…                   other names
    backends BACKEND…             required: where it may be used
    yields N                      per layer; checked against every program
    offset N                      0 unless given
    layer ITEM…                   the program: A0 A1 hook D.send | D.recv MLP hook C.send S | C.recv
    layer[BACKEND,…] ITEM…        the program of these backends; `layer` without brackets serves the others

An item is a point (`D.send`, on another stream `D.send@comm`), `|` (yield) or `hook` (run the peer's receive hook).
`C.recv` (and `copy`) in front of `A0` are those of the layer before.

Instead of `layer`, a file may give the steady state of all ubatches, from which program and offset follow:

    order[BACKEND,…] D1.send A0_0 A1_0 D1.recv …      dbo.schedule.order; also `Order: D₁ send, A0₀, …`
    comp[BACKEND,…] |-A0_0-A1_0-||…|                  dbo.schedule.drawing; also `Comp:`, `Comm:`
    comm[BACKEND,…] |----D1----||…|
"""

from __future__ import annotations

from collections.abc import Sequence

from dbo.errors import ScheduleSyntaxError
from dbo.schedule.drawing import read_drawing
from dbo.schedule.model import (
    BACKENDS,
    HOOK_BACKENDS,
    POINTS,
    REQUIRED_POINTS,
    STREAMS,
    Item,
    LayerProgram,
    Point,
    RunRecvHook,
    Schedule,
    Yield,
)
from dbo.schedule.order import Mark, read_marks
from dbo.schedule.period import derive
from dbo.schedule.statements import ONCE, SECTIONS, Statement, Word, read_statements, syntax_error


def parse_schedule(
    text: str, *, source: str = "<schedule>", name: str | None = None, backends: Sequence[str] | None = None
) -> Schedule:
    """Read a schedule; `name` and `backends` stand in for statements that the text lacks (a bare drawing, say).

    Raises:
        ScheduleSyntaxError: with the line and column of the first character that does not fit.
    """
    return _Parser(text, source).schedule(name, backends)


def to_text(schedule: Schedule) -> str:
    """The text of `schedule`; `parse_schedule` reads it back to an equal value."""
    lines = [f"schedule {schedule.name}"]
    if schedule.description:
        lines.append(f"description {schedule.description}")
    if schedule.aliases:
        lines.append(f"alias {' '.join(schedule.aliases)}")
    lines.append(f"backends {' '.join(schedule.backends)}")
    if schedule.declared_yields is not None:
        lines.append(f"yields {schedule.declared_yields}")
    if schedule.offset:
        lines.append(f"offset {schedule.offset}")
    for program in schedule.programs:
        bracket = f"[{','.join(program.backends)}]" if program.backends else ""
        lines.append(f"layer{bracket} {' '.join(item_text(item) for item in program.items)}")
    return "\n".join(lines) + "\n"


def item_text(item: Item) -> str:
    """`A0`, `D.send@comm`, `|` or `hook`."""
    if isinstance(item, Point):
        return item.name if item.stream == "compute" else f"{item.name}@{item.stream}"
    return "|" if isinstance(item, Yield) else "hook"


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.statements = read_statements(text, source)
        self.end = Word("", max(1, len(text.splitlines())), 1)

    def error(self, at: Word, message: str) -> ScheduleSyntaxError:
        return syntax_error(at, message, self.source)

    def schedule(self, name: str | None, backends: Sequence[str] | None) -> Schedule:
        once = self._single_statements()
        if "schedule" in once:
            name = self._words(once["schedule"], "a name", only=1)[0].text
        if name is None:
            raise self.error(self.end, "a schedule has a name: schedule missing; start with schedule NAME")
        if "backends" in once:
            backends = [self._backend(word) for word in self._words(once["backends"], "backends")]
        if not backends:
            raise self.error(self.end, "a schedule names its backends: backends missing; add backends NAME…")
        offset, declared_yields = self._number(once, "offset"), self._number(once, "yields")
        programs, derived_offset = self._programs(tuple(backends))
        if derived_offset is not None and offset is not None and derived_offset != offset:
            raise self.error(
                once["offset"].keyword,
                f"the order fixes the offset: offset={offset}, order={derived_offset}; drop the offset line",
            )
        description = once.get("description")
        return Schedule(
            name=name,
            aliases=tuple(w.text for w in self._words(once["alias"], "names")) if "alias" in once else (),
            backends=tuple(backends),
            declared_yields=declared_yields,
            offset=offset or derived_offset or 0,
            description=" ".join(w.text for w in description.words) if description else "",
            programs=programs,
        )

    def _single_statements(self) -> dict[str, Statement]:
        once: dict[str, Statement] = {}
        for statement in self.statements:
            word = statement.keyword.text
            if word in once:
                raise self.error(statement.keyword, f"a statement is given once: keyword={word}; drop one")
            if word in ONCE:
                once[word] = statement
        return once

    def _words(self, statement: Statement, what: str, only: int | None = None) -> list[Word]:
        words = statement.words
        if not words:
            raise self.error(statement.end, f"{statement.keyword.text} needs {what}: nothing given; add it")
        if only is not None and len(words) > only:
            raise self.error(words[only], f"{statement.keyword.text} takes {what}: text={words[only].text!r}; drop it")
        return words

    def _number(self, once: dict[str, Statement], keyword: str) -> int | None:
        if keyword not in once:
            return None
        word = self._words(once[keyword], "a number", only=1)[0]
        if not word.text.isascii() or not word.text.isdigit():
            raise self.error(word, f"{keyword} is a number >= 0: {keyword}={word.text!r}; use digits")
        return int(word.text)

    def _backend(self, word: Word) -> str:
        if word.text not in BACKENDS:
            raise self.error(word, f"unknown backend: backend={word.text!r}; use one of {', '.join(BACKENDS)}")
        return word.text

    def _programs(self, backends: tuple[str, ...]) -> tuple[tuple[LayerProgram, ...], int | None]:
        """The programs, and the offset where an order gives one."""
        sections = self._sections(backends)
        named = {backend for key in sections for backend in key}
        left = tuple(backend for backend in backends if backend not in named)
        if () not in sections and left:
            raise self.error(self.end, f"every backend has a program: missing={','.join(left)}; add a layer line")
        if () in sections and not left:
            at = next(iter(sections[()].values())).keyword
            raise self.error(at, f"a program serves a backend: backends={','.join(backends)} are in brackets; drop it")
        programs: list[LayerProgram] = []
        fixed: int | None = None
        for key, section in sections.items():
            items, offset = self._section(section, key or left)
            programs.append(LayerProgram(items=items, backends=key))
            if offset is not None and fixed not in (None, offset):
                at = next(iter(section.values())).keyword
                raise self.error(at, f"one offset serves all programs: offsets={fixed},{offset}; make them agree")
            fixed = fixed if offset is None else offset
        return tuple(programs), fixed

    def _sections(self, backends: tuple[str, ...]) -> dict[tuple[str, ...], dict[str, Statement]]:
        """Bracketed backends (none: the others) to the statements, by keyword, that give their program."""
        sections: dict[tuple[str, ...], dict[str, Statement]] = {}
        named: set[str] = set()
        for statement in self.statements:
            keyword = statement.keyword
            if keyword.text not in SECTIONS:
                continue
            key = tuple(self._backend(word) for word in statement.bracket)
            if key not in sections:
                for word in statement.bracket:
                    if word.text not in backends:
                        fix = "add it to backends"
                        raise self.error(word, f"a program is for declared backends: backend={word.text}; {fix}")
                    if word.text in named:
                        raise self.error(word, f"a backend has one program: backend={word.text}; drop one")
                    named.add(word.text)
            section = sections.setdefault(key, {})
            if keyword.text in section or (section and "layer" in (keyword.text, *section)):
                raise self.error(keyword, f"a backend has one program: keyword={keyword.text}; drop one")
            section[keyword.text] = statement
        return sections

    def _section(self, section: dict[str, Statement], backends: tuple[str, ...]) -> tuple[tuple[Item, ...], int | None]:
        if "layer" in section:
            return self._layer(section["layer"]), None
        hooks = not HOOK_BACKENDS.isdisjoint(backends)
        found = []
        if "order" in section:
            found.append(derive(self._order_marks(section["order"]), hooks=hooks, source=self.source))
        if "comp" in section or "comm" in section:
            found.append(derive(self._drawing_marks(section), hooks=hooks, source=self.source))
        if len(found) == 2 and found[0] != found[1]:
            raise self.error(section["order"].keyword, "drawing and order agree: they differ; drop one")
        return found[0]

    def _order_marks(self, statement: Statement) -> list[Mark]:
        lines = [read_marks(w.text, line=w.line, column=w.column, source=self.source) for w in statement.body]
        marks = [mark for line in lines for mark in line]
        if not marks:
            raise self.error(statement.end, "order needs points: nothing given; add them")
        return marks

    def _drawing_marks(self, section: dict[str, Statement]) -> list[Mark]:
        for keyword, other in (("comp", "comm"), ("comm", "comp")):
            if keyword not in section:
                raise self.error(section[other].keyword, f"a drawing has two rows: missing={keyword}; add it")
        comp, comm = self._row(section["comp"]), self._row(section["comm"])
        comp_at, comm_at = (comp.line, comp.column), (comm.line, comm.column)
        marks = read_drawing(comp.text, comm.text, comp_at=comp_at, comm_at=comm_at, source=self.source)
        if not marks:
            raise self.error(comp, "a drawing has points: nothing drawn; add them")
        return marks

    def _row(self, statement: Statement) -> Word:
        if len(statement.body) > 1:
            raise self.error(statement.body[1], "a row is one line: it is continued; join the lines")
        part = statement.body[0]
        stripped = part.text.lstrip()
        return Word(stripped, part.line, part.column + len(part.text) - len(stripped))

    def _layer(self, statement: Statement) -> tuple[Item, ...]:
        items: list[Item] = []
        seen: set[str] = set()
        for word in self._words(statement, "points"):
            if word.text == "|":
                items.append(Yield())
                continue
            if word.text == "hook":
                items.append(RunRecvHook())
                continue
            name, at, stream = word.text.partition("@")
            if name not in POINTS:
                raise self.error(word, f"unknown point: point={name!r}; use {' '.join(POINTS)}, | or hook")
            if at and stream not in STREAMS:
                place = Word(stream, word.line, word.column + len(name) + 1)
                raise self.error(place, f"unknown stream: stream={stream!r}; use {' or '.join(STREAMS)}")
            if name in seen:
                raise self.error(word, f"a layer reaches a point once: point={name}; drop one")
            seen.add(name)
            items.append(Point(name, stream or "compute"))
        for name in REQUIRED_POINTS:
            if name not in seen:
                raise self.error(statement.end, f"a layer reaches every point: missing={name}; add it")
        return tuple(items)
