"""`--prompts FILE`: one prompt a line, or JSON lines with token ids. What the file alone can tell is refused at once.

A file is JSON lines when its name ends in `.jsonl` or `.json`, or when its first line begins with `[` or `{`. A line is
a list of token ids, or an object with `prompt_token_ids` (or `token_ids`). Limits and vocabulary are the model's, so
`PromptFile.encode` applies them later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.config.paths import MIB, read_bounded
from dbo.errors import PromptError, refusal

ID_KEYS = ("prompt_token_ids", "token_ids")


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One prompt: `content` is text, or token ids; `where` names its line for messages."""

    where: str
    content: str | list[int]


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """Prompts of a file, in its order. Implements `dbo.job.types.PromptSource`."""

    lines: tuple[PromptLine, ...]
    name: str = ""

    def encode(self, *, encode: Callable[[str], Sequence[int]], vocab_size: int, max_tokens: int) -> list[list[int]]:
        """Token ids, one list a prompt.

        Args:
            encode: the folder's tokenizer.
            vocab_size: ids are in `range(vocab_size)`.
            max_tokens: the longest prompt that the run can take, in tokens.

        Raises:
            PromptError: a prompt without a token, over the limit, or with an id outside the vocabulary.
        """
        return [_encode(line, encode, vocab_size, max_tokens) for line in self.lines]


def read_prompts(path: Path) -> PromptFile:
    """Read a prompt file.

    Raises:
        PromptError: missing, unreadable, not UTF-8, without a prompt, an empty prompt, malformed JSON (with its line).
    """
    try:
        text = read_bounded(path, limit_bytes=64 * MIB, what="a prompt file", error=PromptError).decode("utf-8-sig")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise PromptError.of(
            "a prompt file must be readable", fix=error.strerror or str(error), prompts=path
        ) from error
    except UnicodeDecodeError as error:
        raise PromptError.of(
            "a prompt file is UTF-8 text", fix="convert it", prompts=path, first_bad_byte=error.start
        ) from error
    if not text.strip():
        raise PromptError.of("a prompt file holds at least one prompt", fix="write one a line", prompts=path)
    numbered = [(f"{path}:{number}", line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    if not numbered[-1][1]:
        numbered.pop()
    is_json = path.suffix in (".jsonl", ".json") or text.lstrip()[0] in "[{"
    read = _json_line if is_json else _text_line
    lines = tuple(read(where, line) for where, line in numbered if not is_json or line.strip())
    return PromptFile(lines=lines, name=str(path))


def _text_line(where: str, line: str) -> PromptLine:
    if not line.strip():
        raise PromptError(_empty(where))
    return PromptLine(where=where, content=line)


def _json_line(where: str, line: str) -> PromptLine:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        column = error.colno if isinstance(error, json.JSONDecodeError) else 1
        why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise PromptError(f"{where}:{column}: malformed JSON: {why}; a line is a list of token ids") from error
    ids = next((value[key] for key in ID_KEYS if key in value), None) if isinstance(value, dict) else value
    if not isinstance(ids, list):
        raise PromptError(f"{where}: a line is a list of token ids, or an object with {ID_KEYS[0]}, not {line[:60]!r}")
    for token in ids:
        if type(token) is not int:
            raise PromptError(f"{where}: a token id is an integer, not {_short(token)}; encode the prompt first")
    if not ids:
        raise PromptError(_empty(where))
    return PromptLine(where=where, content=ids)


def _encode(line: PromptLine, encode: Callable[[str], Sequence[int]], vocab_size: int, max_tokens: int) -> list[int]:
    ids = list(line.content) if isinstance(line.content, list) else [int(token) for token in encode(line.content)]
    if not ids:
        raise PromptError(_empty(line.where))
    if len(ids) > max_tokens:
        fix = "shorten it, or take a model with more positions"
        raise PromptError(
            f"{line.where}: {refusal('a prompt fits the limit', fix, tokens=len(ids), max_tokens=max_tokens)}"
        )
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            fix = f"ids are 0 to {vocab_size - 1}"
            rule = "a token id lies in the vocabulary"
            raise PromptError(f"{line.where}: {refusal(rule, fix, token_id=token, index=index, vocab_size=vocab_size)}")
    return ids


def _empty(where: str) -> str:
    return f"{where}: a prompt has at least one token: tokens=0; remove the line or write a prompt"


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
