"""A case and its token are the same thing."""

import dataclasses
import re

import pytest
from hypothesis import given

from dbo.errors import UsageError
from dbo.schedule import load_schedule
from fuzz.case import Case, RequestPlan, parse_token
from fuzz.strategies import clean_cases
from fuzz.targets import bites, config_of, fault_of, run_case, surprise
from sim.faults import CATALOGUE
from sim.faults.fault import Site

CASE = Case(
    backend="deepep_low_latency", ranks=2, ubatches=2, dense_layers=1, moe_layers=2, experts=4, top_k=2,
    decode_threshold=2, prefill_threshold=4, max_batched_tokens=12, max_seqs=4, block_size=4, num_kv_blocks=20,
    items=load_schedule("mlp_shared_overlap").items,
    requests=(
        (RequestPlan(prompt_tokens=7, new_tokens=3), RequestPlan(prompt_tokens=2, new_tokens=2, arrives=1, aborted=3)),
        (RequestPlan(prompt_tokens=6, new_tokens=2),),
    ),
)  # fmt: skip
TOKEN = "f1:ll.r2.u2.d1.m2.e4.k2.t2+4.b12.s4.g4x20:abhD.dmhCs.c:7+3,2+2@1-3/6+2:o"


@given(clean_cases())
def test_a_token_reads_back(case):
    for fault in ("", "drop-yield:rank=1,at=2", "whole-metadata:rank=0,field=seq_lens"):
        planted = dataclasses.replace(case, fault=fault, mode="numeric" if fault else "ordering")
        token = planted.token
        assert parse_token(token) == planted and parse_token(token).token == token
        assert re.fullmatch(r"[\w.:+,@/=-]+", token), "a shell would touch it"


def test_tokens_are_stable():
    """A token in a report from last year still means the same."""
    assert CASE.token == TOKEN and parse_token(TOKEN) == CASE
    assert CASE.command == f"dbo fuzz --case {TOKEN}"


@pytest.mark.parametrize(
    ("token", "names"),
    [
        ("", "starts with f1"),
        ("f0" + TOKEN[2:], "starts with f1"),
        (TOKEN[:40], "starts with f1"),
        (TOKEN.replace("r2", "rx"), "sizes"),
        (TOKEN.replace("ll", "lll"), "sizes"),
        (TOKEN.replace("abhD", "aqhD"), "schedule"),
        (TOKEN.replace("7+3", "7"), "requests"),
        (TOKEN.replace("/6+2", ""), "requests"),
        (TOKEN[:-1] + "x", "mode"),
    ],
)
def test_a_broken_token_is_refused_by_section(token, names):
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
