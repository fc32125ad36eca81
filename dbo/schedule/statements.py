"""The lines of a schedule file, cut into keyword, bracketed backends and body, each piece with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dbo.errors import ScheduleSyntaxError

ONCE = ("schedule", "description", "alias", "backends", "yields", "offset")
SECTIONS = ("layer", "order", "comp", "comm")
_KEYWORD = re.compile(r"([A-Za-z]+)(?:\[([^\]]*)\])?:?")


@dataclass(frozen=True)
class Word:
    """Some text and the line and column of its first character, both from 1."""

    text: str
    line: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement: `body` has a piece for each physical line."""

    keyword: Word
    bracket: tuple[Word, ...]
    body: tuple[Word, ...]

    @property
    def words(self) -> list[Word]:
        """The body's words."""
        return [
            Word(found.group(), part.line, part.column + found.start())
            for part in self.body
            for found in re.finditer(r"\S+", part.text)
        ]

    @property
    def end(self) -> Word:
        """Where something that is missing would stand."""
        last = self.body[-1]
        return Word("", last.line, last.column + len(last.text))


def syntax_error(at: Word, message: str, source: str) -> ScheduleSyntaxError:
    return ScheduleSyntaxError(message, line=at.line, column=at.column, source=source)


def read_statements(text: str, source: str) -> list[Statement]:
    """The statements of `text`; a line that starts with a blank continues the one above.

    Raises:
        ScheduleSyntaxError: an unknown keyword, a bracket where none belongs, a continuation of nothing.
    """
    statements: list[Statement] = []
    for line, content in _lines(text):
        if not content[0].isspace():
            statements.append(_statement(line, content, source))
        elif statements:
            last = statements[-1]
            statements[-1] = replace(last, body=(*last.body, Word(content, line, 1)))
        else:
            at = Word(content, line, len(content) - len(content.lstrip()) + 1)
            raise syntax_error(at, "an indented line continues a statement: none is above; start at column 1", source)
    return statements


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for line, raw in enumerate(text.splitlines(), start=1):
        content = raw.split("#", 1)[0].rstrip()
        if content:
            yield line, content


def _statement(line: int, content: str, source: str) -> Statement:
    found = _KEYWORD.match(content)
    keyword = found.group(1).lower() if found else ""
    if found is None or keyword not in ONCE + SECTIONS:
        choices = ", ".join(ONCE + SECTIONS)
        at = Word(content, line, 1)
        raise syntax_error(at, f"unknown keyword: keyword={content.split()[0]!r}; use one of {choices}", source)
    bracket: list[Word] = []
    if found.group(2) is not None:
        start = found.start(2)
        if keyword not in SECTIONS:
            at = Word(content, line, start)
            raise syntax_error(at, f"only a program has backends in brackets: keyword={keyword}; drop them", source)
        # An empty bracket keeps one empty word, so that it is refused as an unknown backend, in its place.
        names = list(re.finditer(r"[^,\s]+", found.group(2)))
        bracket = [Word(name.group(), line, start + name.start() + 1) for name in names] or [Word("", line, start + 1)]
    body = Word(content[found.end() :], line, found.end() + 1)
    if body.text and not body.text[0].isspace():
        raise syntax_error(body, f"a keyword ends with a blank: text={body.text.split()[0]!r}; add one", source)
    return Statement(keyword=Word(keyword, line, 1), bracket=tuple(bracket), body=(body,))
