"""Byte boxes: building them, and whether two of them meet, against sets of bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.trace import Access
from dbo.trace.accesses import any_overlap, is_empty, normalized, overlaps, strided


def byte_set(access: Access) -> set[int]:
    """Every byte, one by one."""
    return {
        access.offset + sum(i * s for i, s in zip(index, access.strides, strict=True))
        for index in itertools.product(*map(range, access.sizes))
    }


# name, two boxes (offset, sizes, strides), whether they meet
TABLE = [
    ("same interval", (0, (8,), (1,)), (0, (8,), (1,)), True),
    ("neighbours", (0, (8,), (1,)), (8, (8,), (1,)), False),
    ("one byte", (0, (9,), (1,)), (8, (8,), (1,)), True),
    ("empty in the middle", (0, (8,), (1,)), (4, (0,), (1,)), False),
    ("left and right half of rows", (0, (4, 8), (16, 1)), (8, (4, 8), (16, 1)), False),
    ("halves that share a column", (0, (4, 9), (16, 1)), (8, (4, 8), (16, 1)), True),
    ("even and odd rows", (0, (4, 8), (16, 1)), (8, (4, 8), (16, 1)), False),
    ("even rows and all rows", (0, (4, 8), (16, 1)), (0, (64,), (1,)), True),
    ("a hole of a box", (0, (4, 8), (16, 1)), (8, (8,), (1,)), False),
    ("column against row", (4, (4, 4), (16, 1)), (16, (16,), (1,)), True),
    ("columns of different strides", (0, (6, 1), (6, 1)), (3, (6, 1), (4, 1)), False),
    ("the same, one byte on", (0, (6, 1), (6, 1)), (2, (6, 1), (4, 1)), True),
    ("expanded tensor", (0, (5, 8), (0, 1)), (7, (1,), (1,)), True),
    ("expanded tensor, beside", (0, (5, 8), (0, 1)), (8, (1,), (1,)), False),
    ("counted backwards", (24, (4, 4), (-8, 1)), (4, (4, 4), (8, 1)), False),
    ("blocks of a cache", (0, (3, 2, 4), (64, 8, 1)), (16, (3, 2, 4), (64, 8, 1)), False),
]


@pytest.mark.parametrize(("a", "b", "meet"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(a: tuple, b: tuple, meet: bool) -> None:
    left, right = Access(1, *a), Access(1, *b)
    assert bool(byte_set(left) & byte_set(right)) is meet
    assert overlaps(left, right) is meet
    assert overlaps(right, left) is meet


def test_hulls_are_not_enough() -> None:
    """The table tells the exact rule from the usual shortcut, which compares first and last bytes."""
    wrong = 0
    for _, a, b, meet in TABLE:
        left, right = byte_set(Access(1, *a)), byte_set(Access(1, *b))
        hull = bool(left and right) and min(left) <= max(right) and min(right) <= max(left)
        wrong += hull is not meet
    assert wrong >= 5


def test_other_buffer_never_meets() -> None:
    assert not overlaps(Access.interval(1, 0, 8), Access.interval(2, 0, 8))


def test_any_overlap_names_the_pair() -> None:
    reads = [Access.interval(1, 0, 4), Access.interval(2, 0, 4)]
    writes = [Access.interval(3, 0, 4), Access.interval(2, 2, 3)]
    assert any_overlap(reads, writes) == (reads[1], writes[1])
    assert any_overlap(reads, writes[:1]) is None


def test_strided_is_short_for_contiguous_arrays() -> None:
    assert strided(7, 3, (2, 4), (4, 1), 4) == Access.interval(7, 12, 44)
    assert strided(7, 0, (2, 4), (1, 2), 4) == Access.interval(7, 0, 32)  # transposed: the same bytes
    assert strided(7, 1, (), (), 8) == Access.interval(7, 8, 16)
    assert strided(7, 2, (5, 1, 3), (0, 9, 1), 2) == Access.interval(7, 4, 10)
    assert is_empty(strided(7, 2, (5, 0), (1, 1), 2))


boxes = st.integers(0, 3).flatmap(
    lambda rank: st.builds(
        Access,
        st.just(1),
        st.integers(0, 50),
        st.tuples(*[st.integers(0, 5)] * rank),
        st.tuples(*[st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 24, -3, -8])] * rank),
    )
)


@settings(max_examples=300, deadline=None)
@given(boxes, boxes)
def test_overlap_equals_byte_sets(a: Access, b: Access) -> None:
    assert overlaps(a, b) is bool(byte_set(a) & byte_set(b))


@settings(max_examples=200, deadline=None)
@given(boxes)
def test_normalized_keeps_the_bytes(a: Access) -> None:
    short = normalized(a)
    assert byte_set(short) == byte_set(a)
    assert len(short.sizes) <= max(1, len(a.sizes) + 1)
    assert all(s > 0 for s in short.strides)
