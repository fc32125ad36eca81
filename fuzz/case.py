"""A fuzz case: one frozen value that fixes a whole run, and its one-line token.

    f1:ll.r2.u2.d1.m2.e8.k2.t4+12.b24.s8.g4x33:abhD.dmhCs.c:5+3,7+2/4+4@1-3:o:drop-yield:rank=1,at=2

A token has the version, sizes, the schedule, the requests, the mode and, if one is planted, the fault as `--inject`
spells it. It has no character that a shell would touch. Equal cases have equal tokens, and a token reads back to an
equal case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dbo.errors import UsageError, refusal
from dbo.schedule import Hook, Item, Point, Program, Schedule, Yield

VERSION = "f1"
BACKENDS = {
    "ll": "deepep_low_latency",
    "ht": "deepep_high_throughput",
    "v2": "deepep_v2",
    "nccl": "nccl",
    "symm": "symm_copy",
}
MODES = {"o": "ordering", "n": "numeric"}

_POINTS = {"a": "A0", "b": "A1", "D": "D.send", "d": "D.recv", "m": "MLP", "C": "C.send", "c": "C.recv", "s": "S"}
_POINTS["y"] = "copy"
_LETTERS = {name: letter for letter, name in _POINTS.items()}
_SIZES = re.compile(
    r"(?P<backend>\w+)\.r(?P<ranks>\d+)\.u(?P<ubatches>\d+)\.d(?P<dense>\d+)\.m(?P<moe>\d+)\.e(?P<experts>\d+)"
    r"\.k(?P<top_k>\d+)\.t(?P<decode>\d+)\+(?P<prefill>\d+)\.b(?P<batched>\d+)\.s(?P<seqs>\d+)"
    r"\.g(?P<block>\d+)x(?P<blocks>\d+)(?:\.x(?P<points>\d+(?:\+\d+)*))?"
)
_REQUEST = re.compile(r"(\d+)\+(\d+)(?:@(\d+))?(?:-(\d+))?")
_SCHEDULE = re.compile(r"((?:[abDdmCcsy]@?|\.|h)+)(?:\+(\d+))?")


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """One request of one rank.

    Attributes:
        prompt_tokens, new_tokens: at least 1 each.
        arrives: the engine step before which it is added.
        aborted: the step before which it is aborted, if it still lives; None: never.
    """

    prompt_tokens: int
    new_tokens: int
    arrives: int = 0
    aborted: int | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that a run depends on.

    Attributes:
        backend, ranks, ubatches: as in the configuration; every rank is a DP replica.
        dense_layers, moe_layers, experts, top_k: of the model.
        decode_threshold, prefill_threshold: tokens from which a batch votes for a split.
        max_batched_tokens, max_seqs, block_size, num_kv_blocks, split_points: as in the configuration.
        items, offset: the schedule: one ubatch's layer, and how many yields the ubatches lie apart.
        requests: by rank; a rank without requests is idle.
        mode: "ordering" or "numeric".
        fault: as `--inject` takes it ("drop-yield:rank=1,at=2"); empty: the run is clean.
    """

    backend: str
    ranks: int
    ubatches: int
    dense_layers: int
    moe_layers: int
    experts: int
    top_k: int
    decode_threshold: int
    prefill_threshold: int
    max_batched_tokens: int
    max_seqs: int
    block_size: int
    num_kv_blocks: int
    split_points: tuple[int, ...] | None = None
    items: tuple[Item, ...]
    offset: int = 0
    requests: tuple[tuple[RequestPlan, ...], ...]
    mode: str = "ordering"
    fault: str = ""

    @property
    def schedule(self) -> Schedule:
        """The schedule as a value, for this case's backend alone."""
        programs = (Program(items=self.items),)
        return Schedule(name="fuzzed", backends=(self.backend,), programs=programs, offset=self.offset)

    @property
    def last_event(self) -> int:
        """The last step before which something arrives or is aborted."""
        plans = [plan for rank in self.requests for plan in rank]
        return max((max(plan.arrives, plan.aborted or 0) for plan in plans), default=0)

    @property
    def token(self) -> str:
        """The one-line form; `parse_token` reads it back."""
        sections = [
            VERSION,
            self._sizes(),
            "".join(map(_item, self.items)) + (f"+{self.offset}" if self.offset else ""),
            "/".join(",".join(map(_request, rank)) for rank in self.requests),
            _key(MODES, self.mode),
        ]
        return ":".join(sections + ([self.fault] if self.fault else []))

    @property
    def command(self) -> str:
        """The command line that runs this case."""
        return f"dbo fuzz --case {self.token}"

    def _sizes(self) -> str:
        points = f".x{'+'.join(map(str, self.split_points))}" if self.split_points else ""
        return (
            f"{_key(BACKENDS, self.backend)}.r{self.ranks}.u{self.ubatches}.d{self.dense_layers}.m{self.moe_layers}"
            f".e{self.experts}.k{self.top_k}.t{self.decode_threshold}+{self.prefill_threshold}"
            f".b{self.max_batched_tokens}.s{self.max_seqs}.g{self.block_size}x{self.num_kv_blocks}{points}"
        )


def parse_token(token: str) -> Case:
    """The case that a token stands for.

    Raises:
        UsageError: another version, or a section that does not parse; the message names the section.
    """
    version, *sections = token.strip().split(":", 5)
    if version != VERSION or len(sections) < 4:
        rule = f"a case token starts with {VERSION} and has sizes, schedule, requests and mode"
        raise UsageError(refusal(rule, "copy it whole, from a run of this version", case=token))
    sizes = _match(_SIZES, sections[0], "sizes", token).groupdict()
    schedule = _match(_SCHEDULE, sections[1], "schedule", token)
    requests = tuple(
        tuple(_plan(text, token) for text in filter(None, rank.split(","))) for rank in sections[2].split("/")
    )
    number = {name: int(text) for name, text in sizes.items() if text and name not in ("backend", "points")}
    if len(requests) != number["ranks"]:
        raise _bad("requests", sections[2], token)
    return Case(
        backend=_named(BACKENDS, sizes["backend"], "sizes", token),
        ranks=number["ranks"],
        ubatches=number["ubatches"],
        dense_layers=number["dense"],
        moe_layers=number["moe"],
        experts=number["experts"],
        top_k=number["top_k"],
        decode_threshold=number["decode"],
        prefill_threshold=number["prefill"],
        max_batched_tokens=number["batched"],
        max_seqs=number["seqs"],
        block_size=number["block"],
        num_kv_blocks=number["blocks"],
        split_points=tuple(map(int, sizes["points"].split("+"))) if sizes["points"] else None,
        items=_items(schedule[1]),
        offset=int(schedule[2] or 0),
        requests=requests,
        mode=_named(MODES, sections[3], "mode", token),
        fault=sections[4] if len(sections) > 4 else "",
    )


def _item(item: Item) -> str:
    if isinstance(item, Yield):
        return "."
    if isinstance(item, Hook):
        return "h"
    return _LETTERS[item.name] + ("@" if item.stream == "comm" else "")


def _items(text: str) -> tuple[Item, ...]:
    make: dict[str, Callable[[], Item]] = {".": Yield, "h": Hook}
    return tuple(
        make[word]() if word in make else Point(_POINTS[word[0]], "comm" if word.endswith("@") else "compute")
        for word in re.findall(r"\w@?|\.", text)
    )


def _request(plan: RequestPlan) -> str:
    arrives = f"@{plan.arrives}" if plan.arrives else ""
    aborted = "" if plan.aborted is None else f"-{plan.aborted}"
    return f"{plan.prompt_tokens}+{plan.new_tokens}{arrives}{aborted}"


def _plan(text: str, token: str) -> RequestPlan:
    found = _match(_REQUEST, text, "requests", token)
    prompt, new, arrives, aborted = found.groups()
    return RequestPlan(
        prompt_tokens=int(prompt), new_tokens=int(new), arrives=int(arrives or 0),
        aborted=None if aborted is None else int(aborted),
    )  # fmt: skip


def _key(names: dict[str, str], value: str) -> str:
    return next(key for key, name in names.items() if name == value)


def _named(names: dict[str, str], key: str, section: str, token: str) -> str:
    if key not in names:
        raise _bad(section, key, token)
    return names[key]


def _match(pattern: re.Pattern[str], text: str, section: str, token: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise _bad(section, text, token)
    return found


def _bad(section: str, text: str, token: str) -> UsageError:
    return UsageError(refusal(f"the {section} of a case token parse", "copy the token whole", text=text, case=token))
