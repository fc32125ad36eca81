"""A case in few characters: `f2:` and one number in base 64, with a check sum.

The number has mixed radices: each value takes as much room as the cases that are drawn need for it, and a rare larger one
escapes. `_coded` says once what is written and in which order, and reads it, too, so the two cannot differ. A fault is
written by a hash of its name, which stays when the catalogue grows. Tokens outlive versions: what `_coded` says may only
be extended together with a new version.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from dbo.errors import ArgumentError, UsageError
from dbo.schedule import Item, Point, RunRecvHook, Yield
from fuzz.case import TOKEN_VERSION, Case, RequestPlan
from fuzz.spelling import BACKENDS, EXCHANGES, MODES, POINTS, SHARED
from sim.faults import CATALOGUE, Site
from sim.faults.data import ADJUSTED_FIELDS

ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
_CHECKS = 1 << 12
_NAMES = 1 << 16
# No list of a case is longer; a damaged token must not ask for a million requests.
_LONGEST = 999

_POINTS = tuple(POINTS.values())
_STREAMS = ("compute", "comm")


def to_token(case: Case) -> str:
    """The token of a case.

    Raises:
        ValueError: the case contradicts itself, so that it would read back as another one.
    """
    writer = _Writer()
    if _coded(writer, case) != case:
        rule = "graph sizes come with graphs, and an exchange with a DCP group"
        raise ArgumentError.of(rule, fix="give both or none", case=case)
    number = writer.number()
    number = number * _CHECKS + _check(number)
    digits = ""
    while number:
        number, digit = divmod(number, len(ALPHABET))
        digits += ALPHABET[digit]
    return f"{TOKEN_VERSION}:{digits}"


def read_token(text: str) -> Case:
    """The case of a token.

    Raises:
        UsageError: it is damaged, or its fault is not in this version's catalogue.
    """
    number = 0
    for digit in reversed(text.partition(":")[2]):
        place = ALPHABET.find(digit)
        if place < 0:
            raise _damaged(text)
        number = number * len(ALPHABET) + place
    number, check = divmod(number, _CHECKS)
    if check != _check(number):
        raise _damaged(text)
    case = _coded(_Reader(number, text), None)
    if to_token(case) != text:
        raise _damaged(text)
    return case


class _Writer:
    """Takes values, and gives the number that they make."""

    def __init__(self) -> None:
        self._digits: list[tuple[int, int]] = []

    def value(self, value: int | None, below: int) -> int:
        """Any value of 0 or more; one `below` this bound takes least room."""
        assert value is not None and value >= 0
        if value < below:
            self._digits.append((value, below + 1))
            return value
        self._digits.append((below, below + 1))
        rest = value - below
        while rest >= 8:
            self._digits.append((8 + rest % 8, 16))
            rest = rest // 8 - 1
        self._digits.append((rest, 16))
        return value

    def choice(self, value: int | None, of: int) -> int:
        """One of `of` values, and no other."""
        assert value is not None and 0 <= value < of
        self._digits.append((value, of))
        return value

    def count(self, value: int | None, below: int) -> int:
        return self.value(value, below)

    def number(self) -> int:
        number = 0
        for digit, radix in reversed(self._digits):
            number = number * radix + digit
        return number


class _Reader:
    """Gives the values back, in the same order."""

    def __init__(self, number: int, text: str) -> None:
        self._number, self._text = number, text

    def value(self, value: int | None, below: int) -> int:
        found = self.choice(None, below + 1)
        if found < below:
            return found
        rest, unit = 0, 1
        while (digit := self.choice(None, 16)) >= 8:
            rest += (digit - 8) * unit + 8 * unit
            unit *= 8
        return below + rest + digit * unit

    def choice(self, value: int | None, of: int) -> int:
        self._number, found = divmod(self._number, of)
        return found

    def count(self, value: int | None, below: int) -> int:
        found = self.value(None, below)
        if found > _LONGEST:
            raise _damaged(self._text)
        return found


_Coder = _Writer | _Reader
_Whole = TypeVar("_Whole")
_Part = TypeVar("_Part")


def _of(whole: _Whole | None, part: Callable[[_Whole], _Part]) -> _Part | None:
    """What is to be written; None when reading."""
    return None if whole is None else part(whole)


def _at(whole: Sequence[_Part] | None, n: int) -> _Part | None:
    return whole[n] if whole else None


def _coded(c: _Coder, case: Case | None) -> Case:
    """Write `case`, or read one where there is none. The bounds are those of the cases that are drawn."""
    backend = _name(c, _of(case, lambda it: it.backend), tuple(BACKENDS.values()))
    mode = _name(c, _of(case, lambda it: it.mode), tuple(MODES.values()))
    dcp_backend = _name(c, _of(case, lambda it: it.dcp_backend or ""), ("", *EXCHANGES.values())) or None
    dcp_size = c.value(_of(case, lambda it: it.dcp_size - 2), 3) + 2 if dcp_backend else 1
    interleave = c.value(_of(case, lambda it: it.interleave - 1), 9) + 1 if dcp_backend else 1
    replicas = c.count(_of(case, lambda it: it.ranks // it.dcp_size - 1), 4) + 1
    ranks = replicas * dcp_size
    shared_experts = _name(c, _of(case, lambda it: it.shared_experts), tuple(SHARED.values()))
    ubatches = c.value(_of(case, lambda it: it.ubatches), 4)
    dense_layers = c.value(_of(case, lambda it: it.dense_layers), 2)
    moe_layers = c.value(_of(case, lambda it: it.moe_layers), 5)
    experts = c.value(_of(case, lambda it: it.experts), 13)
    top_k = c.value(_of(case, lambda it: it.top_k), 5)
    decode_threshold = c.value(_of(case, lambda it: it.decode_threshold), 7)
    prefill_threshold = c.value(_of(case, lambda it: it.prefill_threshold), 24)
    max_batched_tokens = c.value(_of(case, lambda it: it.max_batched_tokens), 25)
    max_seqs = c.value(_of(case, lambda it: it.max_seqs), 5)
    block_size = c.value(_of(case, lambda it: it.block_size), 10)
    num_kv_blocks = c.value(_of(case, lambda it: it.num_kv_blocks), 30)
    split_points = _numbers(c, _of(case, lambda it: it.split_points))
    graphs = bool(c.choice(_of(case, lambda it: int(it.graphs)), 2))
    capture_sizes = _numbers(c, _of(case, lambda it: it.capture_sizes)) if graphs else None
    items = _items(c, _of(case, lambda it: it.items))
    offset = c.value(_of(case, lambda it: it.offset), 3)
    requests = tuple(_plans(c, _at(_of(case, lambda it: it.requests), n)) for n in range(replicas))
    fault = _fault(c, _of(case, lambda it: it.fault))
    return Case(
        backend=backend,
        ranks=ranks,
        ubatches=ubatches,
        dense_layers=dense_layers,
        moe_layers=moe_layers,
        experts=experts,
        top_k=top_k,
        decode_threshold=decode_threshold,
        prefill_threshold=prefill_threshold,
        max_batched_tokens=max_batched_tokens,
        max_seqs=max_seqs,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        split_points=split_points,
        graphs=graphs,
        capture_sizes=capture_sizes,
        dcp_size=dcp_size,
        dcp_backend=dcp_backend,
        interleave=interleave,
        shared_experts=shared_experts,
        items=items,
        offset=offset,
        requests=requests,
        mode=mode,
        fault=fault,
    )


def _name(c: _Coder, name: str | None, names: tuple[str, ...]) -> str:
    return names[c.choice(None if name is None else names.index(name), len(names))]


def _numbers(c: _Coder, numbers: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if not c.choice(int(bool(numbers)), 2):
        return None
    return tuple(c.value(_at(numbers, n), 16) for n in range(c.count(len(numbers or ()), 5)))


def _items(c: _Coder, items: tuple[Item, ...] | None) -> tuple[Item, ...]:
    """A schedule has every point once, so each item is a yield, a hook, or one of those that are left."""
    found: list[Item] = []
    left = list(_POINTS)
    for n in range(c.count(len(items or ()), 24)):
        found.append(_item(c, _at(items, n), left))
    return tuple(found)


def _item(c: _Coder, item: Item | None, left: list[str]) -> Item:
    again = 2 + len(left)  # a point that has been before
    kind = None
    if isinstance(item, Point):
        kind = 2 + left.index(item.name) if item.name in left else again
    elif item is not None:
        kind = int(isinstance(item, RunRecvHook))
    kind = c.choice(kind, again + 1)
    if kind < 2:
        return RunRecvHook() if kind else Yield()
    name = item.name if isinstance(item, Point) else None
    name = left.pop(kind - 2) if kind < again else _name(c, name, _POINTS)
    return Point(name, _name(c, item.stream if isinstance(item, Point) else None, _STREAMS))


def _plans(c: _Coder, plans: tuple[RequestPlan, ...] | None) -> tuple[RequestPlan, ...]:
    return tuple(_plan(c, _at(plans, n)) for n in range(c.count(len(plans or ()), 6)))


def _plan(c: _Coder, plan: RequestPlan | None) -> RequestPlan:
    prompt = c.value(_of(plan, lambda it: it.prompt_tokens - 1), 14) + 1
    new = c.value(_of(plan, lambda it: it.new_tokens - 1), 4) + 1
    if not c.choice(_of(plan, lambda it: int(it.arrives > 0 or it.aborted is not None)), 2):
        return RequestPlan(prompt_tokens=prompt, new_tokens=new)
    arrives = c.value(_of(plan, lambda it: it.arrives), 5)
    aborted = c.value(_of(plan, lambda it: 0 if it.aborted is None else it.aborted + 1), 8)
    return RequestPlan(prompt_tokens=prompt, new_tokens=new, arrives=arrives, aborted=aborted - 1 if aborted else None)


def _fault(c: _Coder, spelt: str | None) -> str:
    """Nothing, one of the catalogue at a site, or, for what `--inject` would refuse, its text."""
    known = None if spelt is None else _known(spelt)
    kind = c.choice(None if spelt is None else 0 if not spelt else 1 if known else 2, 3)
    if kind == 0:
        return ""
    if kind == 2:
        letters = tuple(map(ord, spelt or ""))
        return "".join(chr(c.value(_at(letters, n), 128)) for n in range(c.count(len(letters), 32)))
    name, site = known or (None, None)
    name = _NAMED.get(c.choice(None if name is None else _hash(name), _NAMES))
    site = Site(
        rank=c.value(_of(site, lambda it: it.rank), 4),
        ubatch=c.value(_of(site, lambda it: it.ubatch), 3),
        at=c.value(_of(site, lambda it: it.at), 16),
        field=_name(c, _of(site, lambda it: it.field), ADJUSTED_FIELDS),
    )
    if name is None:
        rule, fix = "the fault of a case token is in the catalogue", "run it with the version that printed it"
        raise UsageError.of(rule, fix=fix, site=site)
    return next(fault for fault in CATALOGUE if fault.name == name).inject(site)


def _known(spelt: str) -> tuple[str, Site] | None:
    """The fault and its site, where the catalogue has it and would spell it in the same way."""
    name, _, where = spelt.partition(":")
    for fault in CATALOGUE:
        if fault.name == name:
            try:
                site = fault.site(where)
            except UsageError:
                return None
            return (name, site) if site.field in ADJUSTED_FIELDS and fault.inject(site) == spelt else None
    return None


def _hash(name: str) -> int:
    return zlib.crc32(name.encode()) % _NAMES


_NAMED = {_hash(fault.name): fault.name for fault in CATALOGUE}


def _check(number: int) -> int:
    return zlib.crc32(number.to_bytes((number.bit_length() + 7) // 8, "little"), 1) % _CHECKS


def _damaged(text: str) -> UsageError:
    rule = f"a case token is {TOKEN_VERSION}: and letters and digits that agree with their check sum"
    return UsageError.of(rule, fix="copy the token whole", case=text)
