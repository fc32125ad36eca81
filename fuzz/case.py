"""A fuzz case: one frozen value that fixes a whole run. It is written in two ways, and `parse_token` reads both.

token       f2:… at most 60 characters for a drawn case; what a report prints and `--case` takes (`fuzz.compact`)
spelling    f1:ll.r2.u2.…:abhD.dmhCs.c:5+3/4+4:o     the same in letters and numbers that a person reads (`fuzz.spelling`)

Neither has a character that a shell would touch. Equal cases have equal tokens, and a token reads back to an equal case.
"""

from __future__ import annotations

from dataclasses import dataclass

from dbo.errors import UsageError
from dbo.schedule import Item, LayerProgram, Schedule

TOKEN_VERSION = "f2"
SPELLING_VERSION = "f1"


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """One request of one DP replica.

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
        backend, ubatches: as in the configuration.
        ranks: of the run: DP replicas times the ranks of a DCP group.
        dense_layers, moe_layers, experts, top_k: of the model.
        decode_threshold, prefill_threshold: tokens from which a batch votes for a split.
        max_batched_tokens, max_seqs, block_size, num_kv_blocks, split_points: as in the configuration.
        graphs: decode steps run from captured graphs. capture_sizes: as in the configuration.
        dcp_size, dcp_backend, interleave: the DCP group, its exchange, and positions that stay on one peer; 1, None
            and 1 without one.
        shared_experts: as in the configuration.
        items, offset: the schedule: one ubatch's layer, and how many yields the ubatches lie apart.
        requests: by DP replica; a replica without requests is idle.
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
    graphs: bool = False
    capture_sizes: tuple[int, ...] | None = None
    dcp_size: int = 1
    dcp_backend: str | None = None
    interleave: int = 1
    shared_experts: str = "overlap"
    items: tuple[Item, ...]
    offset: int = 0
    requests: tuple[tuple[RequestPlan, ...], ...]
    mode: str = "ordering"
    fault: str = ""

    @property
    def schedule(self) -> Schedule:
        """The schedule as a value, for this case's backend alone."""
        programs = (LayerProgram(items=self.items),)
        return Schedule(name="fuzzed", backends=(self.backend,), programs=programs, offset=self.offset)

    @property
    def last_event(self) -> int:
        """The last step before which something arrives or is aborted."""
        plans = [plan for replica in self.requests for plan in replica]
        return max((max(plan.arrives, plan.aborted or 0) for plan in plans), default=0)

    @property
    def token(self) -> str:
        """The short form; `parse_token` reads it back."""
        from fuzz.compact import to_token

        return to_token(self)

    @property
    def spelling(self) -> str:
        """The form that a person reads; `parse_token` reads it back, too."""
        from fuzz.spelling import spell

        return spell(self)

    @property
    def command(self) -> str:
        """The command line that runs this case."""
        return f"dbo fuzz --case {self.token}"


def parse_token(text: str) -> Case:
    """The case that a token or a spelling stands for.

    Raises:
        UsageError: another version, or something that does not parse; the message names it.
    """
    from fuzz.compact import read_token
    from fuzz.spelling import read_spelling

    text = text.strip()
    version = text.partition(":")[0]
    if version == TOKEN_VERSION:
        return read_token(text)
    if version == SPELLING_VERSION:
        return read_spelling(text)
    rule = f"a case token starts with {TOKEN_VERSION}, and a case spelt out with {SPELLING_VERSION}"
    raise UsageError.of(rule, fix="copy it whole, from a run of this version", case=text)
