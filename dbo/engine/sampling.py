"""From a row of logits to a token. numpy, no torch.

A draw depends on (seed, request id, how many tokens the request has produced) and on the row of logits; not on the
other requests of the batch, not on the rank, not on whether an earlier step had to be repeated. So there is no
generator state to keep, to free or to roll back.

V is the vocabulary size, N the number of rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dbo.errors import EngineError, UsageError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens. The default is greedy.

    Attributes:
        temperature: 0 is greedy (top-k, top-p and seed do not matter then); else logits are divided by it.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: of these, keep the fewest tokens whose probabilities sum to at least this; 1 keeps all.
        seed: any integer.

    Raises:
        UsageError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError.of(
                "a temperature is finite and >= 0", fix="use 0 for greedy", temperature=self.temperature
            )
        if self.top_k < 0:
            raise UsageError.of("top-k is >= 0", fix="use 0 to keep all tokens", top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise UsageError.of("top-p is in (0, 1]", fix="use 1 to keep all tokens", top_p=self.top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class SampledRow(Protocol):
    """What the sampler asks about the request behind a row of logits."""

    @property
    def request_id(self) -> str: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def output_index(self) -> int:
        """How many tokens the request has produced so far."""


def sample(logits_NV: np.ndarray, rows: Sequence[SampledRow]) -> dict[str, int]:
    """One token a row, by request id. `logits_NV` float32 [N, V], N == len(rows).

    Raises:
        EngineError: rows and logits differ in number, or a row holds a NaN or no finite maximum.
    """
    if len(logits_NV) != len(rows):
        rule = "there is one row of logits for each request that samples"
        raise EngineError.of(rule, fix="gather logit_rows", logits=len(logits_NV), requests=len(rows))
    return {
        row.request_id: sample_token(logits_V, row.sampling, request_id=row.request_id, output_index=row.output_index)
        for logits_V, row in zip(logits_NV, rows, strict=True)
    }


def sample_token(logits_V: np.ndarray, params: SamplingParams, *, request_id: str, output_index: int) -> int:
    """The token chosen from one row, float32 [V]. Ties: the lowest index wins.

    Raises:
        EngineError: the row holds a NaN, or its maximum is not finite.
    """
    # argmax takes a NaN for the largest value: poison would come out as a plausible token.
    best = int(np.argmax(logits_V))
    if not np.isfinite(logits_V[best]):
        rule = "a row of logits holds no NaN and has a finite maximum"
        fix = "the row was never computed, or read too early, or a weight is NaN"
        raise EngineError.of(rule, fix=fix, request=request_id, output_index=output_index, maximum=logits_V[best])
    if params.greedy:
        return best
    kept, probabilities = _candidates(logits_V, params)
    draw = uniform(params.seed, request_id, output_index)
    cumulative = np.cumsum(probabilities)
    # The last sum may round below the draw; the last candidate takes that sliver.
    return int(kept[min(int(np.searchsorted(cumulative, draw, side="right")), len(kept) - 1)])


def uniform(seed: int, request_id: str, output_index: int) -> float:
    """The draw in [0, 1) of one request at one position: 53 bits of a hash, the same on every platform."""
    digest = hashlib.blake2b(repr((seed, request_id, output_index)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _candidates(logits_V: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Token ids that top-k and top-p keep, most probable first, and their probabilities (float64, sum 1)."""
    kept = np.argsort(-logits_V, kind="stable")
    if params.top_k:
        kept = kept[: params.top_k]
    below_maximum = logits_V[kept].astype(np.float64) - float(logits_V[kept[0]])
    # All <= 0, so a tiny temperature overflows to -inf at worst, whose weight is the right one: 0.
    with np.errstate(over="ignore"):
        weights = np.exp(below_maximum / params.temperature)
    probabilities = weights / weights.sum()
    if params.top_p < 1:
        fewest = int(np.searchsorted(np.cumsum(probabilities), params.top_p, side="left")) + 1
        kept, probabilities = kept[:fewest], probabilities[:fewest]
        probabilities = probabilities / probabilities.sum()
    return kept, probabilities
