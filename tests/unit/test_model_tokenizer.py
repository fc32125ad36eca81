"""The byte tokenizer, and what happens with any other."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo.errors import ModelFormatError, NotAvailable, PromptError
from dbo.model.tokenizer import BYTE_VOCAB_SIZE, ByteTokenizer, byte_alphabet, load_tokenizer, write_byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path, max_length=100)
    return tmp_path


def other(folder: Path) -> dict[str, object]:
    """A tokenizer that merges: no byte tokenizer any more."""
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["ab"] = 300
    data["model"]["merges"] = ["a b"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return data


@given(st.text())
def test_text_survives(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_bytes_and_special_tokens_follow(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.vocab_size == BYTE_VOCAB_SIZE == 259
    assert tokenizer.encode("é<|eos|>") == [0xC3, 0xA9, 257]
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert len(set(byte_alphabet())) == 256


@pytest.mark.parametrize("token_id", [-1, 259])
def test_an_id_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(PromptError, match=f"token_id={token_id}, vocab_size=259"):
        ByteTokenizer().decode([token_id])


def test_without_special_tokens() -> None:
    assert ByteTokenizer({}).vocab_size == 256 and ByteTokenizer({}).encode("<|eos|>") == list(b"<|eos|>")


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(PromptError, match="udc80"):
        ByteTokenizer().encode("a\udc80")


def test_another_tokenizer_is_read_by_its_package(folder: Path) -> None:
    pytest.importorskip("tokenizers", reason="reads every other tokenizer")
    other(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("abc") == [300, ord("c")]
    assert tokenizer.decode([300, ord("c")]) == "abc"


def test_another_tokenizer_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other(folder)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(NotAvailable, match="tokenizers"):
        load_tokenizer(folder)


def test_missing_and_corrupt(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="another tokenizer than the byte tokenizer is read by that package")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(ModelFormatError, match="tokenizer.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFormatError, match="tokenizer.json"):
        load_tokenizer(folder)
