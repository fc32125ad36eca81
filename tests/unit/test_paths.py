"""What is no regular file, or too large, is refused by whoever reads it, and nobody waits for a pipe's other end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dbo.cli.prompts import read_prompts
from dbo.config.paths import read_bounded
from dbo.errors import UsageError
from dbo.export.profile import read_any
from dbo.model.config import load_model_config
from dbo.schedule import load_schedule


@pytest.mark.parametrize("read", [load_schedule, read_prompts, lambda path: read_any([path])])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_refused(read, kind, tmp_path):
    path = Path("/dev/zero") if kind == "device" else tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(UsageError, match="is a regular file"):
        read(path)


def test_a_model_folder_with_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match="is a regular file"):
        load_model_config(tmp_path)


def test_a_file_above_its_limit_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", limit_bytes=5, what="it") == b"12345"
    with pytest.raises(UsageError, match="limit_bytes=4"):
        read_bounded(tmp_path / "file", limit_bytes=4, what="it")
