"""Do two runs of the same requests say the same? Tokens by the margin rule, logits by relative error. No torch.

Greedy decoding follows the largest logit, so two runs that round differently may part where the reference itself hardly
prefers one token. A difference there is a tie: it is counted, and what follows in that request is another text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Request = tuple[Sequence[int], Sequence[np.ndarray]]
"""A request's tokens, and the row of logits `[vocab]` behind each."""

MARGINS = {"float32": 1e-5, "float16": 0.025, "bfloat16": 0.1}
"""Relative to the largest logit of the row: below it, the reference's first and second token are a tie.

16-bit runs are compared with a reference in fp32, so the margin covers the rounding of activations through all layers. Four
layers of the generated folder in bf16 gave logits within 0.075 of the reference's, by norm (two H200s, DeepEP V1), in fp16
within 0.018 (CPU, seeds 0 and 3, with and without DBO).
"""

TOLERANCES = {"float32": 1e-4, "float16": 0.025, "bfloat16": 0.1}
"""By how much, relative and by norm, a row of logits may differ from the reference's while both have the same text."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came out.

    Attributes:
        tokens_equal: every token is the reference's, ties apart.
        compared: tokens that were compared. ties: requests that parted at a tie.
        max_rel_err: of the rows of logits up to and with the one where a request parts, by norm.
        logits_close: that error is within `TOLERANCES`.
    """

    tokens_equal: bool
    compared: int
    ties: int
    max_rel_err: float | None
    logits_close: bool = True


def compare(expected: Mapping[str, Request], found: Mapping[str, Request], *, dtype: str) -> Comparison:
    """Compare a run in `dtype` with the reference, request by request."""
    equal, compared, ties, errors = expected.keys() == found.keys(), 0, 0, []
    for id in expected.keys() & found.keys():
        tokens, logits = expected[id]
        mine, rows = found[id]
        parted = False
        for at, (token, other) in enumerate(zip(tokens, mine, strict=False)):
            compared += 1
            if at < len(logits) and at < len(rows):
                # A model of zeros has logits of zeros: its error is taken as it is.
                scale = np.linalg.norm(logits[at]) or 1.0
                errors.append(float(np.linalg.norm(rows[at] - logits[at]) / scale))
            if token != other:
                parted = True
                tie = at < len(logits) and margin(logits[at], other) <= MARGINS[dtype]
                ties += tie
                equal = equal and tie
                break
        equal = equal and (parted or len(tokens) == len(mine))
    worst = max(errors, default=None)
    return Comparison(
        tokens_equal=equal,
        compared=compared,
        ties=ties,
        max_rel_err=worst,
        logits_close=worst is None or worst <= TOLERANCES[dtype],
    )


def margin(row: np.ndarray, token: int) -> float:
    """By how much `row` prefers its own first token to `token`, relative to its largest logit by size."""
    return float((row.max() - row[token]) / (np.abs(row).max() or 1.0))
