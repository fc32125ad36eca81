"""Prompt files: what is read, and every refusal with its place."""

import json
from pathlib import Path

import pytest

from dbo.cli.prompts import read_prompts
from dbo.errors import PromptError

VOCAB = 256


def encoded(path, max_tokens=8):
    return read_prompts(path).encode(encode=lambda text: list(text.encode()), vocab_size=VOCAB, max_tokens=max_tokens)


def written(folder, content, name="prompts.txt"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("content", ["a b\nc\n", "a b\nc", "a b\r\nc\r\n", b"\xef\xbb\xbfa b\nc\n"])
def test_text_is_one_prompt_a_line(tmp_path, content):
    assert encoded(written(tmp_path, content)) == [list(b"a b"), list(b"c")]


@pytest.mark.parametrize(
    "content", ["[1, 2]\n[3]\n", '{"prompt_token_ids": [1, 2]}\n\n{"token_ids": [3]}\n'], ids=["lists", "objects"]
)
def test_json_lines_are_token_ids(tmp_path, content):
    assert encoded(written(tmp_path, content)) == [[1, 2], [3]]


def test_the_file_name_can_say_that_it_is_json_lines(tmp_path):
    with pytest.raises(PromptError, match=r"p\.jsonl:1:1: malformed JSON"):
        read_prompts(written(tmp_path, "hello\n", name="p.jsonl"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "at least one prompt"),
        (" \n\n", "at least one prompt"),
        ("a\n\nb\n", r":2: a prompt has at least one token"),
        ("a\n   \n", r":2: a prompt has at least one token"),
        (b"\xff\xfe", "first_bad_byte=0"),
        ("[1]\n[2,\n", r":2:4: malformed JSON: Expecting value"),
        ("[1]\n[]\n", r":2: a prompt has at least one token"),
        ("[1]\n7\n", r":2: a line is a list of token ids"),
        ('{"text": "x"}\n', r":1: a line is a list of token ids, or an object with prompt_token_ids"),
        ("[1, true]\n", r":1: a token id is an integer, not true"),
        ("[1.0]\n", "not 1.0"),
        ('["a"]\n', 'not "a"'),
        ("[" * 100_000 + "\n", r":1:1: malformed JSON: nested too deeply"),
    ],
)
def test_what_the_file_alone_can_tell_is_refused_on_reading(tmp_path, content, says):
    with pytest.raises(PromptError, match=says):
        read_prompts(written(tmp_path, content))


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(PromptError, match="must be readable: prompts="):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([VOCAB], r":1: a token id lies in the vocabulary: token_id=256, index=0, vocab_size=256; ids are 0 to 255"),
        ([0, -1], "token_id=-1, index=1"),
        ([1] * 9, r":1: a prompt fits the limit: tokens=9, max_tokens=8"),
    ],
)
def test_what_the_model_knows_is_refused_on_encoding(tmp_path, ids, says):
    with pytest.raises(PromptError, match=says):
        encoded(written(tmp_path, json.dumps(ids)))


def test_the_limits_themselves_are_taken(tmp_path):
    ids = [0, VOCAB - 1, *[1] * 6]
    assert encoded(written(tmp_path, json.dumps(ids))) == [ids]


def test_text_over_the_limit_or_without_a_token_is_refused(tmp_path):
    with pytest.raises(PromptError, match="tokens=9, max_tokens=8"):
        encoded(written(tmp_path, "123456789"))
    with pytest.raises(PromptError, match=r":1: a prompt has at least one token"):
        read_prompts(written(tmp_path, "x")).encode(encode=lambda text: [], vocab_size=VOCAB, max_tokens=8)


def test_a_path_is_shown_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PromptError, match=r"prompts=gone\.txt"):
        read_prompts(Path("gone.txt"))
