"""DCP inside DP and EP as a numpy model of four ranks: two replicas of two peers, experts over all four.

The integers are the shipped ones (placement, slots, local lengths, shares of rows); the arithmetic is float64, written
out. What comes together must be what one rank with all keys, heads and experts computes.
"""

from __future__ import annotations

import numpy as np
import pytest

from dbo.batch.plan import NULL_SLOT, DCPLayout
from dbo.dcp.interface import place_in_groups, rows_of_peer
from dbo.engine.batch import build_batch
from dbo.engine.sampling import SamplingParams
from dbo.engine.scheduled import ScheduledBatch, ScheduledRequest
from dbo.model.config import parse_model_config
from dbo.model.layout import local_experts
from tests.sim.job_harness import SMALL

REPLICAS, C, HEADS, LATENT, HIDDEN, EXPERTS = 2, 2, 4, 8, 12, 8
BLOCK = 4
RANKS = range(REPLICAS * C)
LENS = {0: (13, 1, 6), 1: (3, 17)}
RNG = np.random.Generator(np.random.Philox(3))
PROJECTION = RNG.normal(size=(HEADS * LATENT, HIDDEN))
EXPERT_WEIGHTS = RNG.normal(size=(EXPERTS, HIDDEN, HIDDEN))


def request(index: int, seq_len: int, first_block: int, *, computed: int) -> ScheduledRequest:
    blocks = -(-seq_len // (BLOCK * C))
    return ScheduledRequest(
        request_id=f"r{index}",
        token_ids=tuple(range(computed, seq_len)),
        num_computed_tokens=computed,
        block_ids=tuple(range(first_block, first_block + blocks)),
        is_prefilling=computed == 0,
        samples=True,
        sampling=SamplingParams(),
        output_index=0,
    )


def batch_of(replica: int, *, prefill: bool) -> ScheduledBatch:
    """A replica's requests with all their tokens, or with the last one of each."""
    requests, block = [], 1
    for index, seq_len in enumerate(LENS[replica]):
        made = request(index, seq_len, block, computed=0 if prefill else seq_len - 1)
        requests.append(made)
        block += len(made.block_ids)
    return ScheduledBatch(requests=tuple(requests), block_tokens=BLOCK * C)


class Peer:
    """One rank: its cache, filled by slot as the prefill's batch says."""

    def __init__(self, rank: int, interleave: int, latents: list[np.ndarray]) -> None:
        self.replica, peer, self.group = place_in_groups(rank, C)
        self.layout = DCPLayout(size=C, rank=peer, interleave=interleave)
        self.cache = np.full((64 * BLOCK, LATENT), np.nan)
        batch = batch_of(self.replica, prefill=True)
        plan = build_batch(batch, num_tokens_padded=batch.num_tokens, dcp_layout=self.layout).plan
        for slot, row in zip(plan.slot_mapping, np.concatenate(latents), strict=True):
            if slot != NULL_SLOT:
                assert np.isnan(self.cache[slot]).all(), "two keys in one slot"
                self.cache[slot] = row

    def attend(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`[B, H, latent]` and base-e LSE `[B, H]` over the keys that lie here, found through the block table."""
        batch = batch_of(self.replica, prefill=False)
        plan = build_batch(batch, num_tokens_padded=batch.num_tokens, dcp_layout=self.layout).plan
        out, lse = np.full(queries.shape, np.nan), np.full(queries.shape[:2], -np.inf)
        assert plan.dcp_local_seq_lens is not None
        for row, here in enumerate(plan.dcp_local_seq_lens):
            local = np.arange(here)
            keys = self.cache[plan.block_table[row][local // BLOCK] * BLOCK + local % BLOCK]
            if here:
                scores = queries[row] @ keys.T
                lse[row] = np.log(np.exp(scores).sum(-1))
                out[row] = np.exp(scores - lse[row][:, None]) @ keys
        return out, lse


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_four_ranks_attend_like_one(interleave: int) -> None:
    latents = {r: [RNG.normal(size=(n, LATENT)) for n in LENS[r]] for r in range(REPLICAS)}
    queries = {r: RNG.normal(size=(len(LENS[r]), HEADS, LATENT)) for r in range(REPLICAS)}
    peers = [Peer(rank, interleave, latents[rank // C]) for rank in RANKS]
    parts = [peer.attend(queries[peer.replica]) for peer in peers]
    for replica in range(REPLICAS):
        group = [rank for rank in RANKS if peers[rank].replica == replica]
        assert tuple(group) == peers[group[0]].group
        partial_sums = []
        for place in range(C):
            heads = slice(place * HEADS // C, (place + 1) * HEADS // C)
            lse = np.stack([parts[rank][1][:, heads] for rank in group])
            weights = np.exp(lse - np.log(np.exp(lse).sum(0)))[..., None]
            out = np.stack([parts[rank][0][:, heads] for rank in group])
            merged = np.where(weights > 0, out * weights, 0.0).sum(0)
            columns = slice(heads.start * LATENT, heads.stop * LATENT)
            partial_sums.append(merged.reshape(len(merged), -1) @ PROJECTION[columns])
        for row, keys in enumerate(latents[replica]):
            scores = queries[replica][row] @ keys.T
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            want = (weights @ keys).reshape(-1) @ PROJECTION
            np.testing.assert_allclose(sum(partial_sums)[row], want, rtol=1e-12, atol=1e-12)


def test_some_shard_is_empty_in_this_model() -> None:
    """Else the model above would not show that a shard without keys is selected away."""
    layout = DCPLayout(size=C, rank=1)
    assert 0 in layout.local_seq_lens(np.array(LENS[0]))


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("seq_len", [0, 1, 2, 3, 7, 8, 9, 31])
def test_positions_and_bounds_agree_with_local_lengths(interleave: int, seq_len: int) -> None:
    layouts = [DCPLayout(size=C, rank=peer, interleave=interleave) for peer in range(C)]
    counts = [int(layout.local_seq_lens(np.array([seq_len]))[0]) for layout in layouts]
    found = [layout.positions(np.arange(n)) for layout, n in zip(layouts, counts, strict=True)]
    assert sorted(np.concatenate(found).tolist()) == list(range(seq_len))
    assert all((p // interleave % C == layout.rank).all() for p, layout in zip(found, layouts, strict=True))
    assert layouts[0].max_local_len(seq_len) == max(counts)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_every_row_is_dispatched_by_one_peer_and_gathered_by_all(rows: int) -> None:
    config = parse_model_config(SMALL | {"n_routed_experts": EXPERTS})
    owners = [local_experts(config, ep_rank=rank, ep_size=len(RANKS)) for rank in RANKS]
    assert sorted(e for mine in owners for e in mine) == list(range(EXPERTS))
    hidden = {r: RNG.normal(size=(rows, HIDDEN)) for r in range(REPLICAS)}
    chosen = {r: RNG.integers(0, EXPERTS, size=rows) for r in range(REPLICAS)}
    share = rows_of_peer(rows, C)
    sent: list[tuple[int, int, int]] = []
    got = {rank: np.zeros((share, HIDDEN)) for rank in RANKS}
    for rank in RANKS:
        replica, peer, _ = place_in_groups(rank, C)
        for place, row in enumerate(range(peer * share, min((peer + 1) * share, rows))):
            owner = next(r for r in RANKS if chosen[replica][row] in owners[r])
            sent.append((replica, row, owner))
            got[rank][place] = hidden[replica][row] @ EXPERT_WEIGHTS[chosen[replica][row]]
    assert len(sent) == len({(replica, row) for replica, row, _ in sent}) == REPLICAS * rows
    for replica in range(REPLICAS):
        gathered = np.concatenate([got[rank] for rank in RANKS if rank // C == replica])[:rows]
        want = np.stack([hidden[replica][i] @ EXPERT_WEIGHTS[chosen[replica][i]] for i in range(rows)])
        np.testing.assert_array_equal(gathered, want)
