"""Say what this machine has and lacks, backend by backend, and what to install."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import asdict
from typing import Any

from dbo.cli.answer import Answer
from dbo.cli.parser import Parser
from dbo.cli.progress import Reached
from dbo.errors import NotAvailable

HELP = "what this machine has and lacks"


def add_arguments(parser: Parser) -> None:
    """Doctor takes no options of its own."""


def run(args: argparse.Namespace, reached: Reached) -> Answer:
    """Probe and tell. Never fails for what is missing: that is what it is asked for."""
    reached.stage("probing")
    found = _probe().probe()
    return Answer(text=text(found), data=asdict(found))


def text(found: Any) -> str:
    """The probe's answers as lines: devices, libraries, backends."""
    lines = [f"python {found.python}", "devices:"]
    for device in found.devices:
        reach = f"reaches {', '.join(map(str, device.peers))}" if device.peers else "reaches no other"
        memory = device.memory_bytes / 2**30
        lines.append(f"  {device.index}: {device.name}, {device.num_sms} SMs, {memory:.0f} GiB, {reach}")
    if not found.devices:
        lines.append("  none visible; world sim needs none, world gpu runs on CPU tensors with --device cpu")
    if len(found.devices) == 1:
        lines.append("  one: ranks that share it (--share-device) are for correctness, never for speed")
    for title, answers in (("libraries", found.libraries), ("all-to-all backends in world gpu", found.backends)):
        lines.append(f"{title}:")
        width = max(map(len, answers), default=0)
        for name, answer in answers.items():
            fix = f"; {answer.fix}" if answer.fix and not answer.there else ""
            lines.append(f"  {'yes' if answer.there else 'no '} {name:<{width}}  {answer.what}{fix}")
    return "\n".join(lines)


def _probe() -> Any:
    # By name: nothing in dbo imports a world.
    try:
        return importlib.import_module("gpu.probe")
    except ModuleNotFoundError as error:
        rule = "the doctor asks world gpu what it needs"
        raise NotAvailable.of(rule, fix="install the whole distribution", missing=error.name) from error
