"""What runs of the command line leave, as digests: the same before and after a change that only moves or renames.

    python tests/meta/trace_snapshot.py > before.json        in the tree before
    python tests/meta/trace_snapshot.py > after.json         in the tree after
    diff before.json after.json                              empty, or the runs that differ

Only `python -m dbo.cli` of the tree in the current folder is used, so that the script of today also reads older trees. A
digest leaves out source lines (`src`), which move, and counts buffers in the order of their first use, since a world may
make more of them than a run touches.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ORDERING = ["check", "--mode", "ordering"]


def runs() -> Iterator[list[str]]:
    """Command lines of the runs whose traces are compared: the default run, presets on their backends, graphs, DCP."""
    yield ["check"]
    yield ORDERING
    for backend in ("nccl", "deepep_low_latency", "deepep_high_throughput", "deepep_v2", "symm_copy"):
        yield [*ORDERING, "--all2all-backend", backend]
        yield [*ORDERING, "--all2all-backend", backend, "--cudagraph-mode", "FULL"]
    for file in sorted(Path("dbo/presets").glob("*.schedule")):
        for backend in sorted(set(re.findall(r"\w+", " ".join(re.findall(r"layer\[([^\]]*)\]", file.read_text()))))):
            yield [*ORDERING, "--dbo-schedule", file.stem, "--all2all-backend", backend]
    yield [*ORDERING, "--decode-context-parallel-size", "2"]
    yield [*ORDERING, "--decode-context-parallel-size", "2", "--dcp-comm-backend", "a2a", "--cudagraph-mode", "FULL"]
    for fault in ("drop-hook", "drop-wait", "drop-yield"):
        yield [*ORDERING, "--inject", fault]


def digest(trace: dict[str, Any]) -> str:
    """Of the records of a stored trace."""
    numbers: dict[int, int] = {}

    def access(one: list[Any]) -> list[Any]:
        return [numbers.setdefault(one[0], len(numbers)), *one[1:]]

    total = hashlib.sha256()
    for row in trace["records"]:
        *head, after, reads, writes, _, attrs = row
        attrs = {name: value for name, value in attrs.items() if name != "buffer"}
        line = [*head, after, [access(a) for a in reads], [access(a) for a in writes], attrs]
        total.update(json.dumps(line, sort_keys=True).encode())
    return f"{len(trace['records'])} records {total.hexdigest()[:16]}"


def command_line(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run this tree's command line."""
    return subprocess.run([sys.executable, "-m", "dbo.cli", *words], capture_output=True, text=True, check=False)


def main() -> None:
    """Print one JSON object: a line a run, a line a case of the fuzzer's corpus."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        for words in runs():
            done = command_line([*words, "--trace", str(path)])
            verdict = re.search(r"^verdict: (.*)$", done.stdout, re.MULTILINE)
            said = verdict.group(1) if verdict else done.stderr.strip()[-200:]
            kept = digest(json.loads(path.read_text())["dbo"]) if path.exists() else "no trace"
            path.unlink(missing_ok=True)
            found[" ".join(words)] = [done.returncode, said, kept]
    for line in Path("fuzz/corpus/fixed.tokens").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            done = command_line(["fuzz", "--case", line, "--json"])
            told = json.loads(done.stdout)
            counts = told["invariants"]["by_id"]
            failed = [id for id, count in counts.items() if count["failed"]]
            found[line] = [done.returncode, told["verdict_text"], failed]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
