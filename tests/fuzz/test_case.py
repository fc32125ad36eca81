"""A case and its token are the same thing."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuzz.compact
from dbo.config import BACKENDS
from dbo.errors import UsageError
from dbo.schedule import load_schedule
from fuzz.case import Case, RequestPlan, parse_token
from fuzz.compact import _hash
from fuzz.strategies import clean_cases
from fuzz.targets import bites, config_of, fault_of, run_case, surprise
from sim.faults import CATALOGUE
from sim.faults.fault import Site

CASE = Case(
    backend="deepep_low_latency",
    ranks=2,
    ubatches=2,
    dense_layers=1,
    moe_layers=2,
    experts=4,
    top_k=2,
    decode_threshold=2,
    prefill_threshold=4,
    max_batched_tokens=12,
    max_seqs=4,
    block_size=4,
    num_kv_blocks=20,
    items=load_schedule("mlp_shared_overlap").items,
    requests=(
        (RequestPlan(prompt_tokens=7, new_tokens=3), RequestPlan(prompt_tokens=2, new_tokens=2, arrives=1, aborted=3)),
        (RequestPlan(prompt_tokens=6, new_tokens=2),),
    ),
)
SPELLING = "f1:ll.r2.u2.d1.m2.e4.k2.t2+4.b12.s4.g4x20:abhD.dmhCs.c:7+3,2+2@1-3/6+2:o"
TOKEN = "f2:hhgJneWtoIOowGpaWNjWFPZE"
FULL = dataclasses.replace(
    CASE,
    backend="nccl",
    ranks=6,
    dcp_size=3,
    dcp_backend="a2a_direct",
    interleave=2,
    graphs=True,
    capture_sizes=(2, 40),
    shared_experts="stream",
    split_points=(3,),
    mode="numeric",
    fault="whole-metadata:rank=5,field=num_computed_tokens",
)
FULL_SPELLING = (
    "f1:nccl.r6.u2.d1.m2.e4.k2.t2+4.b12.s4.g4x20.x3.F2+40.c3di2.hs:abhD.dmhCs.c:7+3,2+2@1-3/6+2:n"
    ":whole-metadata:rank=5,field=num_computed_tokens"
)
FULL_TOKEN = "f2:4fu59oaOlAj4HvsZ03rUXi1CafI8BBsqytB"


@given(clean_cases())
def test_a_token_reads_back(case):
    for fault in (
        "",
        "drop-yield:rank=1,ubatch=0,at=2",
        "whole-metadata:rank=0,field=seq_lens",
        "drop-yield:at=2",
        "?",
    ):
        planted = dataclasses.replace(case, fault=fault, mode="numeric" if fault else "ordering")
        for text in (planted.token, planted.spelling):
            assert parse_token(text) == planted
        assert parse_token(planted.spelling).token == planted.token
        assert re.fullmatch(r"[\w.:+,@/=-]+", planted.token), "a shell would touch it"
    assert len(case.token) <= 60


FAULT_CHARACTERS = 9  # what naming a fault and its place adds to a token


@st.composite
def planted_anywhere(draw):
    """A clean case, and the same with a fault at any place that its configuration has: no run is needed to spell one."""
    fault = draw(st.sampled_from(CATALOGUE))
    backends = st.sampled_from(list(fault.backends or BACKENDS))
    case = draw(clean_cases(backends, exchanges=fault.exchanges))
    site = Site(
        rank=draw(st.integers(0, case.ranks - 1)),
        ubatch=draw(st.integers(0, case.ubatches - 1)),
        at=draw(st.integers(0, 200)),
        field=draw(st.sampled_from(("seq_lens", "num_computed_tokens", "block_table_tensor"))),
    )
    mode = "numeric" if fault.numeric else "ordering"
    return case, dataclasses.replace(case, fault=fault.inject(site), mode=mode)


@given(planted_anywhere())
def test_a_token_is_short_enough_to_be_copied_by_hand(cases):
    clean, planted = cases
    assert len(clean.token) <= 60
    assert len(planted.token) <= len(clean.token) + FAULT_CHARACTERS
    assert parse_token(planted.token) == planted


@pytest.mark.parametrize("changes", [{"num_kv_blocks": n} for n in (29, 30, 37, 38, 93, 102, 103, 5000, 10**9)])
def test_a_value_beyond_what_is_drawn_reads_back(changes):
    case = dataclasses.replace(CASE, **changes)
    assert parse_token(case.token) == case


def test_tokens_are_stable():
    """A token in a report from last year still means the same."""
    assert (CASE.token, CASE.spelling) == (TOKEN, SPELLING)
    assert (FULL.token, FULL.spelling) == (FULL_TOKEN, FULL_SPELLING)
    assert parse_token(TOKEN) == parse_token(SPELLING) == CASE
    assert parse_token(FULL_TOKEN) == parse_token(FULL_SPELLING) == FULL
    assert CASE.command == f"dbo fuzz --case {TOKEN}"


def test_faults_are_told_apart_by_the_hashes_that_tokens_carry():
    assert len({_hash(fault.name) for fault in CATALOGUE}) == len(CATALOGUE)


def test_a_case_that_contradicts_itself_has_no_token():
    with pytest.raises(ValueError, match="graph sizes come with graphs"):
        _ = dataclasses.replace(CASE, capture_sizes=(4,)).token


def test_a_token_of_a_fault_that_is_gone_is_refused(monkeypatch):
    token = FULL.token
    monkeypatch.setattr(fuzz.compact, "_NAMED", {})
    with pytest.raises(UsageError, match="catalogue"):
        parse_token(token)


@pytest.mark.parametrize("at", range(3, len(TOKEN)))
def test_a_damaged_token_is_refused(at):
    for other in "A", "_", "?":
        damaged = TOKEN[:at] + other + TOKEN[at + 1 :]
        if damaged != TOKEN:
            with pytest.raises(UsageError, match=r"copy the token whole"):
                parse_token(damaged)
    with pytest.raises(UsageError):
        parse_token(TOKEN[:at])


@pytest.mark.parametrize(
    ("token", "names"),
    [
        ("", "starts with f2"),
        ("f0" + TOKEN[2:], "starts with f2"),
        (SPELLING[:40], "starts with f1"),
        (SPELLING.replace("r2", "rx"), "sizes"),
        (SPELLING.replace("ll", "lll"), "sizes"),
        (SPELLING.replace("abhD", "aqhD"), "schedule"),
        (SPELLING.replace("7+3", "7"), "requests"),
        (SPELLING.replace("/6+2", ""), "requests"),
        (SPELLING[:-1] + "x", "mode"),
        (FULL_SPELLING.replace("r6", "r5"), "sizes"),
        (FULL_SPELLING.replace("c3d", "c3z"), "sizes"),
        (FULL_SPELLING.replace(".hs", ".hz"), "sizes"),
        (FULL_SPELLING.replace("c3d", "c2d"), "requests"),
    ],
)
def test_a_broken_spelling_is_refused_by_section(token, names):
    with pytest.raises(UsageError, match=names):
        parse_token(token)


def test_every_site_of_every_fault_is_spelt_as_inject_reads_it():
    for fault in CATALOGUE:
        site = dataclasses.replace(Site(), **dict(fault.defaults))
        spelt = fault.inject(site)
        assert fault.site(spelt.partition(":")[2]) == site
        assert fault_of(dataclasses.replace(CASE, fault=spelt)) is fault


def test_a_case_is_judged_against_what_it_calls_for():
    assert surprise(CASE, run_case(CASE)) == ""
    planted = dataclasses.replace(CASE, fault="drop-yield:rank=1,ubatch=0,at=0")
    assert bites(planted) and surprise(planted, run_case(planted)) == ""
    assert "proved where violated(unequal-yields) is due" in surprise(planted, run_case(CASE))
    assert "violated(unequal-yields) where proved is due" in surprise(CASE, run_case(planted))
    beyond = dataclasses.replace(CASE, fault="drop-yield:rank=1,ubatch=0,at=9999")
    assert not bites(beyond) and surprise(beyond, run_case(beyond)) == ""


def test_what_cannot_work_is_refused():
    with pytest.raises(UsageError, match="fault=nonsense"):
        run_case(dataclasses.replace(CASE, fault="nonsense"))
    with pytest.raises(UsageError, match="spread evenly"):
        run_case(dataclasses.replace(CASE, experts=3))
    assert config_of(CASE).low_latency_max_tokens_per_rank == CASE.max_batched_tokens
