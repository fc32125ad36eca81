"""What the tests of `dbo check` in process share: its answers, a model folder without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbo.model.tokenizer import write_byte_tokenizer
from tests.sim.job_harness import SMALL

# A model that every backend takes (hidden 2048); without numbers its size costs nothing.
CONFIG = SMALL | {"hidden_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 4096}


@dataclass(frozen=True)
class Answer:
    exit: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)


Dbo = Callable[..., Answer]


def write_folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    write_byte_tokenizer(path, max_length=4096)
    return path


def assert_refused(answer: Answer, *words: str, code: int = 2) -> None:
    """One clear sentence that says all of `words`; the same in the JSON object; no traceback."""
    assert answer.exit == code, answer.err or answer.out
    assert "Traceback" not in answer.err
    data = answer.data
    assert data["exit"] == code
    (line,) = answer.err.splitlines()
    assert line == f"dbo: {data['error']}"
    for word in words:
        assert word in line, f"{word!r} is missing in: {line}"
