"""Arithmetic on `dbo.trace.Access`: building strided byte boxes and asking, exactly, whether two share a byte.

A box is the set of bytes ``offset + sum(i_k * strides_k)`` with ``0 <= i_k < sizes_k``. Two boxes meet iff a linear
equation with bounded variables has a solution. That is a subset-sum problem, but tensors make it easy: sorted by
stride, each dimension is wider than all finer ones together, so at most a few values of its index have to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd

from dbo.trace import Access


def strided(buffer: int, offset: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> Access:
    """The bytes of a strided array.

    Args:
        buffer: the buffer's id.
        offset: first element, in elements of `itemsize` bytes.
        sizes, strides: per dimension, strides in elements; zero, repeated and negative strides are legal.
        itemsize: bytes an element.

    Returns:
        The box in its shortest form: a contiguous array becomes one interval.
    """
    run = 1  # fast path: walk a contiguous array from the inside out
    for n, s in zip(reversed(sizes), reversed(strides), strict=True):
        if n != 1 and s != run:
            break
        run *= n
    else:
        return Access(buffer, offset * itemsize, (run * itemsize,), (1,))
    dims = [(n, s * itemsize) for n, s in zip(sizes, strides, strict=True)]
    return _box(buffer, offset * itemsize, [*dims, (itemsize, 1)])


def normalized(access: Access) -> Access:
    """The same bytes in the shortest form: outer dimensions first, positive strides, neighbours merged."""
    return _box(access.buffer, access.offset, list(zip(access.sizes, access.strides, strict=True)))


def is_empty(access: Access) -> bool:
    """Whether the access touches no byte at all."""
    return 0 in access.sizes


def overlaps(a: Access, b: Access) -> bool:
    """Whether two accesses share at least one byte. Exact for every pair of strided boxes.

    Intervals are decided by two comparisons; pairs of boxes are cached, without regard to their buffer.
    """
    if a.buffer != b.buffer:
        return False
    if len(a.sizes) == 1 == len(b.sizes) and a.strides == (1,) == b.strides:
        return a.offset < b.offset + b.sizes[0] and b.offset < a.offset + a.sizes[0] and a.sizes[0] > 0 < b.sizes[0]
    return _boxes_meet(b.offset - a.offset, a.sizes, a.strides, b.sizes, b.strides)


def any_overlap(left: Iterable[Access], right: Sequence[Access]) -> tuple[Access, Access] | None:
    """The first pair, one of each side, that shares a byte; None if there is none."""
    for a in left:
        for b in right:
            if overlaps(a, b):
                return a, b
    return None


def _box(buffer: int, offset: int, dims: list[tuple[int, int]]) -> Access:
    if any(n == 0 for n, _ in dims):
        return Access(buffer, offset, (0,), (1,))
    positive: list[tuple[int, int]] = []
    for n, s in dims:
        if s < 0:  # count the same bytes from the other end
            offset += (n - 1) * s
            s = -s
        if n > 1 and s:
            positive.append((n, s))
    positive.sort(key=lambda dim: dim[1])
    merged: list[tuple[int, int]] = []
    for n, s in positive:
        if merged:
            m, t = merged[-1]
            if s % t == 0 and s <= m * t:  # the finer run reaches the next one: together they are one run
                merged[-1] = ((n - 1) * (s // t) + m, t)
                continue
        merged.append((n, s))
    if not merged or merged[0][1] != 1:  # the innermost dimension is always a run of bytes
        merged.insert(0, (1, 1))
    merged.reverse()
    return Access(buffer, offset, tuple(n for n, _ in merged), tuple(s for _, s in merged))


@lru_cache(maxsize=1 << 16)
def _boxes_meet(
    shift: int,
    a_sizes: tuple[int, ...],
    a_strides: tuple[int, ...],
    b_sizes: tuple[int, ...],
    b_strides: tuple[int, ...],
) -> bool:
    a = _box(0, 0, list(zip(a_sizes, a_strides, strict=True)))
    b = _box(0, shift, list(zip(b_sizes, b_strides, strict=True)))
    if is_empty(a) or is_empty(b):
        return False
    # a.offset + sum(i*s) == b.offset + sum(j*t). With j counted from its far end every coefficient is positive:
    # sum(i*s) + sum(j'*t) == b.last - a.offset, and dimensions of equal stride add up.
    room: dict[int, int] = {}
    for n, s in (*zip(a.sizes, a.strides, strict=True), *zip(b.sizes, b.strides, strict=True)):
        room[s] = room.get(s, 0) + n - 1
    steps = sorted(((s, u) for s, u in room.items() if u), reverse=True)
    return _reachable(steps, b.stop - 1 - a.offset)


def _reachable(steps: list[tuple[int, int]], target: int) -> bool:
    """Whether ``sum(x_k * step_k) == target`` has a solution with ``0 <= x_k <= limit_k``; steps in falling order."""
    count = len(steps)
    reach = [0] * (count + 1)  # the largest sum that steps[k:] can make
    grain = [0] * (count + 1)  # every sum of steps[k:] is a multiple of this
    dense = [True] * (count + 1)  # … and steps[k:] make every such multiple up to `reach`
    for k in range(count - 1, -1, -1):
        step, limit = steps[k]
        reach[k] = reach[k + 1] + step * limit
        grain[k] = gcd(grain[k + 1], step)
        same_grain = k == count - 1 or grain[k] == grain[k + 1]
        dense[k] = dense[k + 1] and same_grain and step <= reach[k + 1] + grain[k]
        if k == count - 1:
            dense[k] = True
    failed: set[tuple[int, int]] = set()

    def search(k: int, rest: int) -> bool:
        if rest == 0:
            return True
        if rest < 0 or rest > reach[k] or rest % grain[k]:
            return False
        if dense[k]:
            return True
        if (k, rest) in failed:
            return False
        step, limit = steps[k]
        most = min(limit, rest // step)
        least = max(0, -((reach[k + 1] - rest) // step))
        if any(search(k + 1, rest - x * step) for x in range(most, least - 1, -1)):
            return True
        failed.add((k, rest))
        return False

    return search(0, target)
