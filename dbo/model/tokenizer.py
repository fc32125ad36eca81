"""Text to token ids and back. Torch-free.

The generator's folder has a byte tokenizer in the format of the field (`tokenizer.json`, byte-level BPE without
merges), read here without any package. Other tokenizers are read by the package `tokenizers`, where it is installed.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dbo.errors import NotAvailable, PromptError
from dbo.model.fields import bad_model, read_json

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
SPECIAL_TOKENS = {"<|bos|>": BOS_ID, "<|eos|>": EOS_ID, "<|pad|>": PAD_ID}
BYTE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


class Tokenizer(Protocol):
    """Text to ids and back; `encode` adds no token of its own."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ModelFormatError: tokenizer.json is missing or corrupt.
        NotAvailable: it is no byte tokenizer, and the package `tokenizers` is not installed.
    """
    path = Path(folder) / "tokenizer.json"
    data = read_json(path)
    if _is_byte_tokenizer(data):
        return ByteTokenizer({token["content"]: token["id"] for token in data.get("added_tokens", [])})
    return _PackageTokenizer(path)


class ByteTokenizer:
    """Token id = byte value; special tokens follow, and are recognised inside text."""

    def __init__(self, special_tokens: dict[str, int] = SPECIAL_TOKENS) -> None:
        self.special_tokens = dict(special_tokens)
        self.vocab_size = 1 + max([255, *self.special_tokens.values()])
        self._special_text = {token_id: text.encode() for text, token_id in self.special_tokens.items()}
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def encode(self, text: str) -> list[int]:
        """Raises: PromptError: a lone surrogate, which no UTF-8 can hold."""
        pieces = self._split.split(text) if self._split else [text]
        ids: list[int] = []
        for piece in pieces:
            ids.extend([self.special_tokens[piece]] if piece in self.special_tokens else _utf8(piece))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD.

        Raises:
            PromptError: an id outside the vocabulary.
        """
        return b"".join(map(self._bytes_of, ids)).decode(errors="replace")

    def _bytes_of(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return bytes([token_id])
        if token_id not in self._special_text:
            raise PromptError.of(
                "a token id is below the vocabulary's size",
                fix="check where the id comes from",
                token_id=token_id,
                vocab_size=self.vocab_size,
            )
        return self._special_text[token_id]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        character = ascii(text[error.start])
        raise PromptError.of("a prompt is Unicode text", fix="remove it", lone_surrogate=character) from error


class _PackageTokenizer:
    def __init__(self, path: Path) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise NotAvailable.of(
                "a tokenizer other than the byte tokenizer needs the package tokenizers",
                fix="install it, or give token ids",
                file=path,
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for every malformed file
            raise bad_model(
                "tokenizer.json is one that its package reads", "download it again", file=path, error=error
            ) from error
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where it prints, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def write_byte_tokenizer(folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text, **flags} for text, token_id in SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {char: byte for byte, char in enumerate(byte_alphabet())},
            "merges": [],
        },
    }
    names = {f"{text[2:-2]}_token": text for text in SPECIAL_TOKENS}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, **names}
    for name, data in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _is_byte_tokenizer(data: dict[str, Any]) -> bool:
    """Byte-level, one token a byte, ids equal to byte values: then no package is needed to read it."""
    model, pre, added = data.get("model"), data.get("pre_tokenizer"), data.get("added_tokens", [])
    return (
        isinstance(model, dict)
        and isinstance(pre, dict)
        and isinstance(added, list)
        and all(isinstance(token, dict) and {"content", "id"} <= token.keys() for token in added)
        and data.get("normalizer") is None
        and data.get("post_processor") is None
        and (model.get("type"), pre.get("type"), pre.get("add_prefix_space")) == ("BPE", "ByteLevel", False)
        and model.get("merges") == []
        and model.get("vocab") == {char: byte for byte, char in enumerate(byte_alphabet())}
    )
