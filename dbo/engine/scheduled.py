"""What one step runs: a snapshot of the scheduler's decision, and the facts that coordination asks of it."""

from __future__ import annotations

from dataclasses import dataclass

from dbo.engine.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        token_ids: the tokens to run, at positions num_computed_tokens … seq_len - 1; never empty.
        block_ids: the blocks of positions 0 … seq_len - 1.
        is_prefilling: it has not yet been as far as it was when it last started.
        samples: these are the last of its known tokens, so the last row's logits choose its next token.
        sampling, output_index: how, and which of its output tokens that will be.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    is_prefilling: bool
    samples: bool
    sampling: SamplingParams
    output_index: int

    @property
    def query_len(self) -> int:
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class ScheduledBatch:
    """The requests of a step, in row order: oldest first, and thereby decodes first, then prefill chunks.

    So a mixed batch differs from a uniform decode batch at its tail only, and a split point tends to fall inside a long
    prefill chunk, which can be cut, rather than among the decodes.

    Attributes:
        block_tokens: tokens that one KV block holds, over all ranks of a DCP group.
    """

    requests: tuple[ScheduledRequest, ...]
    block_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(r.query_len for r in self.requests)

    @property
    def is_idle(self) -> bool:
        return not self.requests

    @property
    def sampled(self) -> tuple[ScheduledRequest, ...]:
        """The requests that get a token from this step, in the order of `ModelInputs.logit_rows`."""
        return tuple(r for r in self.requests if r.samples)


def uniform_query_len(batch: ScheduledBatch) -> int:
    """The query length that all requests share when none is in prefill; 0: mixed, in prefill, or idle."""
    lengths = {r.query_len for r in batch.requests}
    if len(lengths) != 1 or any(r.is_prefilling for r in batch.requests):
        return 0
    return lengths.pop()


def reads_new_kv(batch: ScheduledBatch) -> bool:
    """Whether a request reads a block that another request of the same batch writes in this step.

    Such a batch must not be split: the writer and the reader could land in different ubatches.
    """
    writer_of: dict[int, str] = {}
    for r in batch.requests:
        writer_of |= dict.fromkeys(r.block_ids[r.num_computed_tokens // batch.block_tokens :], r.request_id)
    return any(writer_of.get(b, r.request_id) != r.request_id for r in batch.requests for b in r.block_ids)
