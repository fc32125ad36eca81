"""`dbo check --help` and what `dbo check` does: the same defaults, for every flag of the configuration."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dbo.bench.timing import chosen
from dbo.cli.check import _CONFIG, _prefixed, add_arguments
from dbo.cli.parser import Parser
from dbo.config import FLAGS, DBOConfig, ModelShape, effective, validate
from dbo.contract.benchmark import Benchmark
from dbo.errors import ConfigError, UsageError
from dbo.job.compare import compare
from dbo.job.defaults import flags_of
from dbo.job.types import CheckRequest

SHAPE = ModelShape(hidden_size=2048, num_experts=8, num_heads=4)


def _parser() -> Parser:
    parser = Parser(prog="dbo check")
    add_arguments(parser)
    return parser


def _shown() -> dict[str, str]:
    """What help gives as the default of each flag, up to the words behind it."""
    helps = {action.option_strings[0]: str(action.help) for action in _parser()._actions if action.option_strings}
    return {flag.flag: re.search(r"\(default: ([^,)]+)", helps[flag.flag])[1] for flag in FLAGS}


def _config(words: list[str]) -> DBOConfig:
    config = DBOConfig(**flags_of(CheckRequest(flags=_prefixed(_parser().parse_args(words), _CONFIG))))
    validate(config, SHAPE, capabilities=("any_dtype",))
    return config


def _typed(flag) -> list[str]:
    shown = _shown()[flag.flag]
    if flag.type is None:
        return flag.typed(shown == "on")
    return [] if getattr(_config([]), flag.field) is None else [flag.flag, shown]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.flag)
def test_a_default_typed_out_changes_nothing(flag):
    assert effective(_config(_typed(flag))) == effective(_config([]))


def test_all_defaults_typed_out_change_nothing():
    words = [word for flag in FLAGS for word in _typed(flag)]
    assert effective(_config(words)) == effective(_config([])) and len(words) > 40


def test_help_shows_what_the_command_runs_with():
    shown = _shown()
    assert shown["--dbo-decode-token-threshold"] == "4" and shown["--dbo-prefill-token-threshold"] == "24"
    assert shown["--data-parallel-size"] == "2" and shown["--enable-dbo"] == "on" and shown["--dtype"] == "float32"


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.type is int], ids=lambda flag: flag.flag)
def test_every_number_has_a_bound_with_its_reason(flag):
    assert flag.declared.why
    with pytest.raises(ConfigError, match=f"{flag.field} is at most {flag.declared.most}, since"):
        validate(DBOConfig(**{flag.field: flag.declared.most + 1}), SHAPE)


def test_logits_of_zeros_are_compared_without_a_warning():
    zeros = {"a": ([0], [np.zeros(4)])}
    with np.errstate(all="raise"):
        assert compare(zeros, zeros, dtype="float32").max_rel_err == 0.0


def test_an_empty_name_chooses_no_benchmark():
    with pytest.raises(UsageError, match="--only names benchmarks"):
        chosen([Benchmark(name="b", what="", unit="ms", sample=lambda: 1.0)], [""])
