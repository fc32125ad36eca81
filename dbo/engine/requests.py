"""One request: the tokens it knows, how far its KV is computed, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from dbo.engine.sampling import SamplingParams
from dbo.errors import PromptError, UsageError


class RequestState(Enum):
    """WAITING holds no KV blocks; RUNNING does; the other two are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(kw_only=True, eq=False)
class Request:
    """A prompt and what has become of it. The scheduler owns every field below `eos_token_id`.

    Attributes:
        id: unique among the requests that are not final.
        prompt_token_ids: at least one token.
        max_new_tokens: at least one.
        eos_token_id: the token that ends the request (it is kept in the output); None: only the length does.
        parent, num_forked_tokens: the request that this one was forked from and how many first tokens they have in
            common; while the parent runs, an admission of the child takes full blocks of these from it.
        output_token_ids: the tokens sampled so far.
        num_computed_tokens: tokens whose KV is in the cache: a prefix of the known tokens.
        num_prefill_tokens: known tokens when the request last started from nothing; it is in prefill below that.
        block_ids: KV blocks in the order of positions.
        num_preemptions: how often it lost its blocks and started over.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_id: int | None = None
    parent: Request | None = field(default=None, repr=False)
    num_forked_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        if not self.prompt_token_ids:
            raise PromptError.of("a prompt has at least one token", fix="give one", request=self.id)
        if self.max_new_tokens < 1:
            rule = "a request produces at least one token"
            raise UsageError.of(rule, fix="raise it", request=self.id, max_new_tokens=self.max_new_tokens)
        self.num_prefill_tokens = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not yet computed; at least 1 while the request lives."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The known tokens at positions [start, stop)."""
        prompt = len(self.prompt_token_ids)
        from_output = self.output_token_ids[max(start - prompt, 0) : max(stop - prompt, 0)]
        return self.prompt_token_ids[start:stop] + tuple(from_output)

    @property
    def is_complete(self) -> bool:
        """It has produced its end token, or as many tokens as it may."""
        produced = self.output_token_ids
        return len(produced) >= self.max_new_tokens or (bool(produced) and produced[-1] == self.eos_token_id)

    def restart(self) -> None:
        """Forget what was computed (not what was sampled): every known token is to be prefilled again."""
        self.state = RequestState.WAITING
        self.num_computed_tokens = 0
        self.num_prefill_tokens = self.num_tokens
        self.num_preemptions += 1
