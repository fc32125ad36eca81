"""Runs the suite in two tiers, the one that answers fast first: `python tests/tiers.py [pytest's arguments]`.

The first tier (unit, faults, meta) takes about a minute on two cores and finds most mistakes; when it fails, the second is
not run. With arguments of the caller's own, pytest runs once, with these.
"""

from __future__ import annotations

import subprocess
import sys

TIERS = (
    ("tests/meta", "tests/unit", "tests/faults"),
    ("tests/sim", "tests/fuzz", "tests/contract", "tests/gpu"),
)


def main(arguments: list[str]) -> int:
    """Run the tiers; the exit code of the first that fails. `--first-tier` leaves the second one out."""
    first_only = "--first-tier" in arguments
    rest = [argument for argument in arguments if argument != "--first-tier"]
    if rest:
        return _pytest(*rest)
    for tier in TIERS[:1] if first_only else TIERS:
        code = _pytest(*tier)
        if code:
            return code
    return 0


def _pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "-n", "2", *arguments]
    print("+", *command[1:], flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
