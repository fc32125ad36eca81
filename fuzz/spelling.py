"""A case spelt out, in letters and numbers that a person reads:

    f1:ll.r2.u2.d1.m2.e8.k2.t4+12.b24.s8.g4x33:abhD.dmhCs.c:5+3,7+2/4+4@1-3:o:drop-yield:rank=1,at=2

It has the version, sizes, the schedule, the requests by DP replica, the mode and, if one is planted, the fault as
`--inject` spells it. Behind the sizes comes what a plain case lacks: `.x1+3` split points, `.F` graphs (`.F2+4` of these
sizes), `.c2a` a DCP group of two that exchanges by a2a (`i4`: four positions stay on one peer), `.hb` or `.hs` shared
experts before the dispatch or on the side stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dbo.errors import UsageError
from dbo.schedule import Item, Point, RunRecvHook, Yield
from fuzz.case import SPELLING_VERSION, Case, RequestPlan

BACKENDS = {
    "ll": "deepep_low_latency",
    "ht": "deepep_high_throughput",
    "v2": "deepep_v2",
    "nccl": "nccl",
    "symm": "symm_copy",
}
MODES = {"o": "ordering", "n": "numeric"}
EXCHANGES = {"g": "ag_rs", "a": "a2a", "d": "a2a_direct"}
SHARED = {"o": "overlap", "b": "before", "s": "stream"}

POINTS = {"a": "A0", "b": "A1", "D": "D.send", "d": "D.recv", "m": "MLP", "C": "C.send", "c": "C.recv", "s": "S"}
POINTS["y"] = "copy"
_LETTERS = {name: letter for letter, name in POINTS.items()}
_SIZES = re.compile(
    r"(?P<backend>\w+)\.r(?P<ranks>\d+)\.u(?P<ubatches>\d+)\.d(?P<dense>\d+)\.m(?P<moe>\d+)\.e(?P<experts>\d+)"
    r"\.k(?P<top_k>\d+)\.t(?P<decode>\d+)\+(?P<prefill>\d+)\.b(?P<batched>\d+)\.s(?P<seqs>\d+)"
    r"\.g(?P<block>\d+)x(?P<blocks>\d+)(?:\.x(?P<points>\d+(?:\+\d+)*))?"
    r"(?P<graphs>\.F(?P<captured>\d+(?:\+\d+)*)?)?"
    r"(?:\.c(?P<dcp>\d+)(?P<exchange>[a-z])(?:i(?P<interleave>\d+))?)?(?:\.h(?P<shared>[a-z]))?"
)
_REQUEST = re.compile(r"(\d+)\+(\d+)(?:@(\d+))?(?:-(\d+))?")
_SCHEDULE = re.compile(r"((?:[abDdmCcsy]@?|\.|h)+)(?:\+(\d+))?")


def spell(case: Case) -> str:
    """The case as text; `read_spelling` reads it back."""
    sections = [
        SPELLING_VERSION,
        _sizes(case),
        "".join(map(_item, case.items)) + (f"+{case.offset}" if case.offset else ""),
        "/".join(",".join(map(_request, replica)) for replica in case.requests),
        _key(MODES, case.mode),
    ]
    return ":".join(sections + ([case.fault] if case.fault else []))


def read_spelling(text: str) -> Case:
    """The case that a spelling stands for.

    Raises:
        UsageError: a section that does not parse; the message names the section.
    """
    _, *sections = text.split(":", 5)
    if len(sections) < 4:
        rule = f"a case spelt out starts with {SPELLING_VERSION} and has sizes, schedule, requests and mode"
        raise UsageError.of(rule, fix="copy it whole, from a run of this version", case=text)
    sizes = _match(_SIZES, sections[0], "sizes", text).groupdict()
    schedule = _match(_SCHEDULE, sections[1], "schedule", text)
    requests = tuple(
        tuple(_plan(plan, text) for plan in filter(None, replica.split(","))) for replica in sections[2].split("/")
    )
    ranks, dcp = int(sizes["ranks"]), int(sizes["dcp"] or 1)
    if dcp < 1 or ranks % dcp:
        raise _bad("sizes", sections[0], text)
    if len(requests) != ranks // dcp:
        raise _bad("requests", sections[2], text)
    return Case(
        backend=_named(BACKENDS, sizes["backend"], "sizes", text),
        ranks=ranks,
        ubatches=int(sizes["ubatches"]),
        dense_layers=int(sizes["dense"]),
        moe_layers=int(sizes["moe"]),
        experts=int(sizes["experts"]),
        top_k=int(sizes["top_k"]),
        decode_threshold=int(sizes["decode"]),
        prefill_threshold=int(sizes["prefill"]),
        max_batched_tokens=int(sizes["batched"]),
        max_seqs=int(sizes["seqs"]),
        block_size=int(sizes["block"]),
        num_kv_blocks=int(sizes["blocks"]),
        split_points=_numbers(sizes["points"]),
        graphs=bool(sizes["graphs"]),
        capture_sizes=_numbers(sizes["captured"]),
        dcp_size=dcp,
        dcp_backend=_named(EXCHANGES, sizes["exchange"], "sizes", text) if sizes["exchange"] else None,
        interleave=int(sizes["interleave"] or 1),
        shared_experts=_named(SHARED, sizes["shared"] or "o", "sizes", text),
        items=_items(schedule[1]),
        offset=int(schedule[2] or 0),
        requests=requests,
        mode=_named(MODES, sections[3], "mode", text),
        fault=sections[4] if len(sections) > 4 else "",
    )


def _sizes(case: Case) -> str:
    points = f".x{_joined(case.split_points)}" if case.split_points else ""
    graphs = f".F{_joined(case.capture_sizes or ())}" if case.graphs else ""
    interleave = f"i{case.interleave}" if case.interleave != 1 else ""
    group = f".c{case.dcp_size}{_key(EXCHANGES, case.dcp_backend)}{interleave}" if case.dcp_backend else ""
    shared = f".h{_key(SHARED, case.shared_experts)}" if case.shared_experts != "overlap" else ""
    return (
        f"{_key(BACKENDS, case.backend)}.r{case.ranks}.u{case.ubatches}.d{case.dense_layers}.m{case.moe_layers}"
        f".e{case.experts}.k{case.top_k}.t{case.decode_threshold}+{case.prefill_threshold}"
        f".b{case.max_batched_tokens}.s{case.max_seqs}.g{case.block_size}x{case.num_kv_blocks}"
        f"{points}{graphs}{group}{shared}"
    )


def _joined(numbers: tuple[int, ...]) -> str:
    return "+".join(map(str, numbers))


def _numbers(text: str | None) -> tuple[int, ...] | None:
    return tuple(map(int, text.split("+"))) if text else None


def _item(item: Item) -> str:
    if isinstance(item, Yield):
        return "."
    if isinstance(item, RunRecvHook):
        return "h"
    return _LETTERS[item.name] + ("@" if item.stream == "comm" else "")


def _items(text: str) -> tuple[Item, ...]:
    make: dict[str, Callable[[], Item]] = {".": Yield, "h": RunRecvHook}
    return tuple(
        make[word]() if word in make else Point(POINTS[word[0]], "comm" if word.endswith("@") else "compute")
        for word in re.findall(r"\w@?|\.", text)
    )


def _request(plan: RequestPlan) -> str:
    arrives = f"@{plan.arrives}" if plan.arrives else ""
    aborted = "" if plan.aborted is None else f"-{plan.aborted}"
    return f"{plan.prompt_tokens}+{plan.new_tokens}{arrives}{aborted}"


def _plan(text: str, whole: str) -> RequestPlan:
    found = _match(_REQUEST, text, "requests", whole)
    prompt, new, arrives, aborted = found.groups()
    return RequestPlan(
        prompt_tokens=int(prompt),
        new_tokens=int(new),
        arrives=int(arrives or 0),
        aborted=None if aborted is None else int(aborted),
    )


def _key(names: dict[str, str], value: str) -> str:
    return next(key for key, name in names.items() if name == value)


def _named(names: dict[str, str], key: str, section: str, whole: str) -> str:
    if key not in names:
        raise _bad(section, key, whole)
    return names[key]


def _match(pattern: re.Pattern[str], text: str, section: str, whole: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise _bad(section, text, whole)
    return found


def _bad(section: str, text: str, whole: str) -> UsageError:
    return UsageError.of(f"the {section} of a case token parse", fix="copy the token whole", text=text, case=whole)
