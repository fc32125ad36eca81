"""The margin rule: a difference counts unless the reference itself hardly prefers its token."""

import numpy as np
import pytest

from dbo.job.compare import MARGINS, compare, margin


def row(*logits):
    return np.array(logits, dtype=np.float32)


SURE, TORN = row(0.0, 10.0, 3.0), row(0.0, 10.0, 10.0 - 1e-5)


def run(*tokens, rows):
    return {"r": (list(tokens), list(rows))}


def test_equal_runs_are_equal():
    said = compare(run(1, 1, rows=[SURE, SURE]), run(1, 1, rows=[SURE, SURE]), dtype="float32")
    assert (said.tokens_equal, said.compared, said.ties, said.max_rel_err) == (True, 2, 0, 0.0)


def test_another_token_where_the_reference_is_sure_differs():
    said = compare(run(1, 1, rows=[SURE, SURE]), run(1, 2, rows=[SURE, SURE]), dtype="bfloat16")
    assert not said.tokens_equal and said.ties == 0


def test_another_token_at_a_tie_is_counted_and_ends_the_comparison():
    said = compare(run(1, 1, rows=[TORN, SURE]), run(2, 2, rows=[TORN, -SURE]), dtype="float32")
    assert (said.tokens_equal, said.ties, said.compared, said.max_rel_err) == (True, 1, 1, 0.0)


@pytest.mark.parametrize(("dtype", "equal"), [("float32", False), ("bfloat16", True)])
def test_the_margin_follows_the_dtype(dtype, equal):
    near = row(0.0, 10.0, 10.0 - 5 * MARGINS["bfloat16"])
    assert margin(near, 2) == pytest.approx(MARGINS["bfloat16"] / 2, rel=1e-3)
    said = compare(run(1, rows=[near]), run(2, rows=[near]), dtype=dtype)
    assert said.tokens_equal is equal


@pytest.mark.parametrize("found", [{}, run(1, rows=[SURE]), run(1, 1, 1, rows=[SURE] * 3)])
def test_missing_or_extra_tokens_differ(found):
    assert not compare(run(1, 1, rows=[SURE, SURE]), found, dtype="float32").tokens_equal


def test_the_error_is_relative_to_the_reference():
    said = compare(run(1, rows=[SURE]), run(1, rows=[1.01 * SURE]), dtype="float32")
    assert said.max_rel_err == pytest.approx(0.01, rel=1e-3)
