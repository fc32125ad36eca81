"""The scheduler, rule by rule, on batches small enough to write down."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dbo.engine.kv_blocks import BlockPool
from dbo.engine.requests import Request, RequestState
from dbo.engine.sampling import SamplingParams
from dbo.engine.scheduled import ScheduledBatch, reads_new_kv, uniform_query_len
from dbo.engine.scheduler import RequestScheduler
from dbo.errors import ConfigError, EngineError, PromptError, UsageError


@dataclass(frozen=True, kw_only=True)
class Config:
    max_num_batched_tokens: int = 8
    max_num_seqs: int = 4
    max_model_len: int = 64
    block_size: int = 4
    num_kv_blocks: int = 17
    decode_context_parallel_size: int = 1


def make(prompts: dict[str, int], *, new: int = 4, **config: int) -> RequestScheduler:
    """A scheduler with one request per (id, prompt length); the prompt of length n is 1 … n."""
    scheduler = RequestScheduler(Config(**config))
    for request_id, length in prompts.items():
        scheduler.add(request(request_id, length, new))
    return scheduler


def request(request_id: str, length: int, new: int = 4, eos: int | None = None) -> Request:
    prompt = tuple(range(1, length + 1))
    return Request(id=request_id, prompt_token_ids=prompt, max_new_tokens=new, eos_token_id=eos)


def step(scheduler: RequestScheduler, token: int = 9) -> list[tuple[str, int]]:
    """Run one step that samples `token` everywhere; [(request, query length)]."""
    batch = scheduler.schedule()
    scheduler.update(dict.fromkeys((r.request_id for r in batch.sampled), token))
    return shape(batch)


def shape(batch: ScheduledBatch) -> list[tuple[str, int]]:
    return [(r.request_id, r.query_len) for r in batch.requests]


def test_long_prompts_are_cut_to_the_budget_and_decodes_go_first() -> None:
    scheduler = make({"a": 3, "b": 12, "c": 2})
    assert step(scheduler) == [("a", 3), ("b", 5)]
    assert step(scheduler) == [("a", 1), ("b", 7)]
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 2)]
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1)]


def test_a_chunk_samples_only_when_it_ends_the_known_tokens() -> None:
    scheduler = make({"a": 10})
    first = scheduler.schedule()
    assert first.sampled == ()
    scheduler.update({})
    second = scheduler.schedule()
    assert [r.output_index for r in second.sampled] == [0]
    scheduler.update({"a": 9})
    third = scheduler.schedule()
    assert third.requests[0].token_ids == (9,)
    assert third.requests[0].output_index == 1


def test_no_requests_is_an_idle_batch_that_needs_no_update() -> None:
    scheduler = make({})
    assert scheduler.schedule().is_idle
    batch = scheduler.schedule()
    assert (batch.is_idle, batch.num_tokens, uniform_query_len(batch), reads_new_kv(batch)) == (True, 0, 0, False)


def test_a_request_ends_at_its_end_token_or_its_length_and_frees_its_blocks() -> None:
    scheduler = RequestScheduler(Config())
    ends_early, ends_full = request("early", 3, new=9, eos=7), request("full", 3, new=2, eos=7)
    scheduler.add(ends_early)
    scheduler.add(ends_full)
    step(scheduler, token=5)
    assert scheduler.pool.num_free == scheduler.pool.capacity - 2
    scheduler.schedule()
    assert scheduler.update({"early": 7, "full": 5}) == [ends_early, ends_full]
    assert (ends_early.output_token_ids, ends_full.output_token_ids) == ([5, 7], [5, 5])
    assert not scheduler.has_unfinished_requests
    assert scheduler.pool.num_free == scheduler.pool.capacity


def test_seats_and_blocks_limit_admission_and_nobody_overtakes() -> None:
    seats = make({"a": 1, "b": 1, "c": 1}, max_num_seqs=2)
    assert step(seats) == [("a", 1), ("b", 1)]
    # Three blocks: "a" takes one, "b" needs three and waits; "c" needs one, but may not pass.
    blocks = make({"a": 3, "b": 9, "c": 1}, new=1, num_kv_blocks=4, max_num_batched_tokens=20)
    assert step(blocks) == [("a", 3)]
    assert step(blocks) == [("b", 9)]
    assert step(blocks) == [("c", 1)]


def test_without_a_free_block_the_newest_starts_over_and_keeps_what_it_sampled() -> None:
    # Three blocks of 4: "a" (4 tokens) and "b" (5) fill them; both decode, then "a" needs a second block.
    scheduler = make({"a": 4, "b": 5}, num_kv_blocks=4, max_num_batched_tokens=9)
    assert step(scheduler, token=8) == [("a", 4), ("b", 5)]
    a, b = scheduler.running
    assert step(scheduler, token=9) == [("a", 1)]
    assert (b.state, b.num_preemptions, b.block_ids, b.output_token_ids) == (RequestState.WAITING, 1, [], [8])
    assert a.num_preemptions == 0
    assert step(scheduler, token=9) == [("a", 1)]  # "b" needs two blocks, one is free
    assert step(scheduler, token=9) == [("a", 1)]  # its fourth and last
    again = scheduler.schedule()  # prompt and sampled token in one chunk, which is a prefill
    assert (shape(again), again.requests[0].is_prefilling, uniform_query_len(again)) == ([("b", 6)], True, 0)
    scheduler.update({"b": 9})
    assert b.output_token_ids == [8, 9]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    # Six blocks, three each, when "a" needs its fourth: "b" frees three, so that a first chunk of it would fit again.
    scheduler = make({"a": 8, "b": 9, "c": 1}, new=8, num_kv_blocks=7, max_num_batched_tokens=9, max_num_seqs=2)
    for _ in range(5):
        step(scheduler)
    assert [len(r.block_ids) for r in scheduler.running] == [3, 3]
    assert step(scheduler) == [("a", 1)]
    assert [r.id for r in scheduler.waiting] == ["b", "c"]  # back to its place in the line
    assert step(scheduler) == [("a", 1), ("b", 8)]


def test_the_newest_gives_way_to_itself() -> None:
    # Three blocks: "b" needs a second one while the older "a" holds two.
    scheduler = make({"a": 4, "b": 5}, num_kv_blocks=4, max_num_batched_tokens=3)
    assert [step(scheduler) for _ in range(4)] == [
        [("a", 3)],
        [("a", 1), ("b", 2)],
        [("a", 1), ("b", 2)],
        [("a", 1)],
    ]
    assert scheduler.waiting[0].num_preemptions == 1


def test_a_request_that_starts_over_is_in_prefill_until_it_is_where_it_was() -> None:
    again = request("a", 2)
    again.output_token_ids += [7, 8, 9]
    again.num_computed_tokens = 4
    assert not again.is_prefilling
    again.restart()
    assert again.num_computed_tokens == 0
    again.num_computed_tokens = 3  # past the prompt, but two tokens are still to be computed in one go
    assert again.is_prefilling


def test_abort_works_in_every_state_and_twice() -> None:
    scheduler = make({"a": 2, "b": 2}, max_num_seqs=1)
    step(scheduler)
    a, b = scheduler.running[0], scheduler.waiting[0]
    assert scheduler.abort("b") and scheduler.abort("a")
    assert not scheduler.abort("a") and not scheduler.abort("nobody")
    assert (a.state, b.state) == (RequestState.ABORTED, RequestState.ABORTED)
    assert scheduler.schedule().is_idle
    assert scheduler.pool.num_free == scheduler.pool.capacity


def test_a_request_aborted_while_its_step_runs_takes_no_token_even_when_its_id_is_used_again() -> None:
    scheduler = make({"a": 2})
    scheduler.schedule()
    scheduler.abort("a")
    again = request("a", 5)
    scheduler.add(again)
    assert scheduler.update({"a": 9}) == []
    assert (again.output_token_ids, again.num_computed_tokens) == ([], 0)


def test_a_discarded_step_is_planned_again_as_it_was() -> None:
    scheduler = make({"a": 3, "b": 12})
    step(scheduler)
    before = scheduler.schedule()
    scheduler.discard()
    assert scheduler.schedule() == before


def test_a_discarded_step_does_not_mistake_others_for_a_request_aborted_meanwhile() -> None:
    scheduler = make({"a": 3})
    step(scheduler)
    scheduler.add(request("b", 1))
    scheduler.schedule()
    scheduler.abort("b")
    scheduler.discard()
    assert [(r.id, r.num_computed_tokens) for r in scheduler.running] == [("a", 3)]


def test_discard_after_update_takes_nothing_back() -> None:
    scheduler = make({"a": 3})
    step(scheduler)
    scheduler.discard()
    assert [(r.id, r.num_computed_tokens) for r in scheduler.running] == [("a", 3)]


def test_misuse_is_refused() -> None:
    scheduler = make({"a": 2})
    with pytest.raises(UsageError, match="request=a"):
        scheduler.add(request("a", 2))
    gone = request("gone", 2)
    scheduler.add(gone)
    scheduler.abort("gone")
    with pytest.raises(UsageError, match="request=gone, state=aborted"):
        scheduler.add(gone)
    with pytest.raises(UsageError, match="parent=nobody"):
        scheduler.fork("nobody", "child")
    scheduler.schedule()
    with pytest.raises(EngineError, match=r"update\(\) or discard\(\)"):
        scheduler.schedule()
    with pytest.raises(EngineError, match=r"missing=\['a'\], extra=\['z'\]"):
        scheduler.update({"z": 1})
    scheduler.update({"a": 1})  # a refused update has changed nothing
    with pytest.raises(EngineError, match=r"extra=\['a'\]"):
        scheduler.update({"a": 1})


@pytest.mark.parametrize(("config", "limit"), [({"max_model_len": 12}, 12), ({"num_kv_blocks": 4}, 13)])
def test_a_request_that_can_never_fit_is_refused_at_once_and_one_token_less_runs(
    config: dict[str, int], limit: int
) -> None:
    scheduler = make({}, **config)
    with pytest.raises(PromptError, match=f"tokens={limit + 1}, limit={limit}"):
        scheduler.add(request("a", limit - 3, new=4))
    scheduler.add(request("a", limit - 4, new=4))
    for _ in range(limit):
        step(scheduler)
    assert not scheduler.has_unfinished_requests


def test_bad_requests_are_refused() -> None:
    with pytest.raises(PromptError, match="request=a"):
        request("a", 0)
    with pytest.raises(UsageError, match="max_new_tokens=0"):
        request("a", 1, new=0)


# -- forks: the only way in which a request reads another's KV --------------------------------------------------------


def test_a_fork_admitted_beside_its_parent_reads_new_kv_and_one_admitted_later_does_not() -> None:
    scheduler = make({"parent": 9}, max_num_batched_tokens=16)
    child = scheduler.fork("parent", "child")
    both = scheduler.schedule()
    assert shape(both) == [("parent", 9), ("child", 1)]  # eight of nine tokens are shared
    assert both.requests[0].block_ids[:2] == both.requests[1].block_ids[:2]
    assert both.requests[0].block_ids[2] != both.requests[1].block_ids[2]
    assert reads_new_kv(both)
    scheduler.update({"parent": 5, "child": 6})
    assert not reads_new_kv(scheduler.schedule())  # both decode in blocks of their own
    scheduler.update({"parent": 5, "child": 6})

    late = scheduler.fork("child", "late")
    batch = scheduler.schedule()
    assert batch.requests[-1].request_id == "late"
    assert batch.requests[-1].num_computed_tokens == 8
    assert not reads_new_kv(batch)
    assert (child.output_token_ids, late.output_token_ids) == ([6, 6], [6, 6])


def test_shared_blocks_live_until_their_last_holder_ends() -> None:
    scheduler = make({"parent": 9}, max_num_batched_tokens=16)
    child = scheduler.fork("parent", "child")
    step(scheduler)
    shared = child.block_ids[:2]
    assert [scheduler.pool.references(b) for b in shared] == [2, 2]
    scheduler.abort("parent")
    assert [scheduler.pool.references(b) for b in shared] == [1, 1]
    scheduler.abort("child")
    assert child.parent is None  # or a long line of forks would keep every ancestor in memory
    assert scheduler.pool.num_free == scheduler.pool.capacity


def test_a_discarded_step_takes_back_a_fork_that_relied_on_it() -> None:
    scheduler = make({"parent": 9}, max_num_batched_tokens=16)
    scheduler.fork("parent", "child")
    scheduler.schedule()
    scheduler.discard()
    scheduler.abort("parent")
    assert step(scheduler) == [("child", 9)]  # nobody computed the shared blocks: all of it runs


def test_a_preempted_fork_shares_no_further_than_the_common_tokens() -> None:
    scheduler = make({"parent": 5}, max_num_batched_tokens=16, new=12)
    step(scheduler, token=7)
    child = scheduler.fork("parent", "child")
    for _ in range(5):
        batch = scheduler.schedule()
        scheduler.update({r.request_id: 7 if r.request_id == "parent" else 8 for r in batch.sampled})
    scheduler.schedule()
    scheduler.discard()
    scheduler._preempt_newest()
    batch = scheduler.schedule()
    assert (batch.requests[-1].request_id, batch.requests[-1].num_computed_tokens) == ("child", 4)
    assert batch.requests[-1].token_ids == child.tokens(4, child.num_tokens)


def test_a_fork_of_a_request_that_has_ended_before_its_turn_computes_everything() -> None:
    scheduler = make({"parent": 9}, max_num_seqs=1, max_num_batched_tokens=16)
    step(scheduler)
    scheduler.fork("parent", "child")
    scheduler.abort("parent")
    assert step(scheduler) == [("child", 10)]


# -- facts for coordination -------------------------------------------------------------------------------------------


def test_uniform_query_len_is_for_decodes_only() -> None:
    scheduler = make({"a": 1, "b": 1})
    batch = scheduler.schedule()
    assert (shape(batch), uniform_query_len(batch)) == ([("a", 1), ("b", 1)], 0)  # one-token prompts are prefills
    scheduler.update({"a": 1, "b": 1})
    assert uniform_query_len(scheduler.schedule()) == 1
    scheduler.update({"a": 1, "b": 1})
    scheduler.add(request("c", 1))
    assert uniform_query_len(scheduler.schedule()) == 0


def test_sampling_parameters_travel_with_the_row_and_to_forks() -> None:
    scheduler = RequestScheduler(Config())
    params = SamplingParams(temperature=0.7, seed=3)
    scheduler.add(Request(id="a", prompt_token_ids=(1,), max_new_tokens=1, sampling=params))
    scheduler.fork("a", "b")
    assert [r.sampling for r in scheduler.schedule().sampled] == [params, params]


def test_dcp_multiplies_what_a_block_holds() -> None:
    scheduler = make({"a": 8}, decode_context_parallel_size=2)
    assert (len(scheduler.schedule().requests[0].block_ids), scheduler.block_tokens) == (1, 8)


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_the_pool_never_hands_out_the_null_block_and_reuses_the_first_freed() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    pool.free([2])
    pool.free([1])
    assert pool.allocate(2) == [2, 1]


def test_the_pool_refuses_what_would_corrupt_it() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    with pytest.raises(EngineError, match="wanted=2, free=1"):
        pool.allocate(2)
    pool.free([block])
    for bad in (block, 0, -1, 3):
        with pytest.raises(EngineError, match=f"block={bad}"):
            pool.free([bad])
        with pytest.raises(EngineError, match=f"block={bad}"):
            pool.share([bad])
    with pytest.raises(ConfigError, match="num_kv_blocks=1"):
        BlockPool(1)
