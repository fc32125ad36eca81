"""Every refusal of a configuration, its neighbour that passes, derived defaults, the graph ladder, and agreement over ranks."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo.config import (
    FLAGS,
    IMPLEMENTED,
    NOT_NOW,
    DBOConfig,
    DeviceLimits,
    ModelShape,
    Workload,
    capture_ladder,
    compare_configs,
    effective,
    low_latency_size_hint_bytes,
    profile_shapes,
    require_profiled,
    validate,
)
from dbo.config.case import ConfigUnderTest
from dbo.config.flags import refuse_not_now
from dbo.config.rules import refusals
from dbo.errors import ConfigError, NotAvailable

MODEL = ModelShape(hidden_size=2048, num_experts=64, num_heads=16)
LITTLE = ModelShape(hidden_size=64, num_experts=8, num_heads=4)
DBO = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}
LL = DBO | {"all2all_backend": "deepep_low_latency"}
HT = DBO | {"all2all_backend": "deepep_high_throughput"}


def objections(options, *, model=MODEL, capabilities=(), **device):
    case = ConfigUnderTest(
        config=DBOConfig(**options),
        model=model,
        device=DeviceLimits(**device),
        capabilities=frozenset(capabilities),
    )
    return list(refusals(case))


REFUSED = [
    # DBO and expert parallelism; vllm#54493
    ("no expert parallelism", DBO | {"enable_expert_parallel": False}, "enable_expert_parallel=False"),
    ("one rank", DBO | {"data_parallel_size": 1}, "data_parallel_size=1, decode_context_parallel_size=1"),
    ("unknown backend", DBO | {"all2all_backend": "allgather"}, "all2all_backend=allgather"),
    ("ubatch-size alone, one rank", {"num_ubatches": 2, "enable_expert_parallel": True}, "data_parallel_size=1"),
    ("one ubatch", DBO | {"num_ubatches": 1}, "num_ubatches=1"),
    ("no ubatch", DBO | {"num_ubatches": 0}, "num_ubatches=0"),
    ("three ubatches on two buffers", LL | {"num_ubatches": 3}, "num_ubatches=3"),
    # thresholds
    ("threshold 0", DBO | {"dbo_decode_token_threshold": 0}, "dbo_decode_token_threshold=0, num_ubatches=2"),
    ("threshold 1", DBO | {"dbo_decode_token_threshold": 1}, "dbo_decode_token_threshold=1, num_ubatches=2"),
    ("prefill threshold 1", DBO | {"dbo_prefill_token_threshold": 1}, "dbo_prefill_token_threshold=1"),
    ("threshold below U", DBO | {"num_ubatches": 4, "dbo_decode_token_threshold": 3}, "num_ubatches=4"),
    ("explicit threshold, low latency", LL | {"dbo_prefill_token_threshold": 512}, "dbo_prefill_token_threshold=512"),
    ("negative threshold", DBO | {"dbo_decode_token_threshold": -1}, "dbo_decode_token_threshold=-1"),
    # options of DBO without DBO
    ("threshold without DBO", {"dbo_decode_token_threshold": 64}, "dbo_decode_token_threshold=64, enable_dbo=False"),
    ("schedule without DBO", {"dbo_schedule": "sglang_decode"}, "dbo_schedule=sglang_decode"),
    ("split points without DBO", {"split_points": (8,)}, r"split_points=\(8,\)"),
    ("comm SMs without DBO", HT | {"enable_dbo": False, "dbo_comm_sms": 20}, "dbo_comm_sms=20, enable_dbo=False"),
    # split points
    ("not increasing", DBO | {"num_ubatches": 3, "split_points": (8, 8)}, r"split_points=\(8, 8\)"),
    ("at 0", DBO | {"split_points": (0,)}, r"split_points=\(0,\)"),
    ("not whole", DBO | {"split_points": (1.5,)}, r"split_points=\(1.5,\)"),
    ("too few", DBO | {"num_ubatches": 3, "split_points": (8,)}, r"split_points=\(8,\), num_ubatches=3"),
    ("beyond every step", DBO | {"split_points": (2048,)}, r"split_points=\(2048,\), max_num_batched_tokens=2048"),
    # comm SMs
    ("odd SMs", HT | {"dbo_comm_sms": 7}, "dbo_comm_sms=7"),
    ("negative SMs", HT | {"dbo_comm_sms": -2}, "dbo_comm_sms=-2"),
    ("all SMs", HT | {"dbo_comm_sms": 132}, "dbo_comm_sms=132, num_sms=132"),
    ("SMs for nccl", DBO | {"dbo_comm_sms": 20}, "dbo_comm_sms=20"),
    ("SMs for low latency", LL | {"dbo_comm_sms": 20}, "dbo_comm_sms=20"),
    ("SMs for copies", DBO | {"all2all_backend": "symm_copy", "dbo_comm_sms": 2}, "dbo_comm_sms=2"),
    # graphs
    ("graph mode", {"cudagraph_mode": "PIECEWISE"}, "cudagraph_mode=PIECEWISE"),
    ("sizes without graphs", {"capture_sizes": (128,)}, r"capture_sizes=\(128,\), cudagraph_mode=NONE"),
    (
        "a ladder that stops short",
        {"cudagraph_mode": "FULL", "capture_sizes": (16, 688), "max_num_seqs": 700},
        r"capture_sizes=\(16, 688\), max_num_seqs=700",
    ),
    ("no sizes at all", {"cudagraph_mode": "FULL", "capture_sizes": ()}, r"capture_sizes=\(\), max_num_seqs=128"),
    (
        "a size larger than any step",
        {"cudagraph_mode": "FULL", "capture_sizes": (4096,)},
        r"capture_sizes=\(4096,\), max_num_batched_tokens=2048",
    ),
    # DCP
    ("DCP backend without DCP", {"dcp_comm_backend": "a2a"}, "dcp_comm_backend=a2a, decode_context_parallel_size=1"),
    ("interleave without DCP", {"cp_kv_cache_interleave_size": 2}, "cp_kv_cache_interleave_size=2"),
    ("heads over 3", {"decode_context_parallel_size": 3}, "num_heads=16, decode_context_parallel_size=3"),
    ("unknown DCP backend", {"decode_context_parallel_size": 2, "dcp_comm_backend": "p2p"}, "dcp_comm_backend=p2p"),
    (
        "interleave across blocks",
        {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 3},
        "cp_kv_cache_interleave_size=3, block_size=16",
    ),
    # low latency
    ("more than a call", LL | {"max_num_batched_tokens": 512}, "max_num_batched_tokens=512"),
    (
        "more than the queue pairs",
        LL | {"low_latency_max_tokens_per_rank": 512, "max_num_batched_tokens": 256},
        "low_latency_max_tokens_per_rank=512, queue_pair_depth=1024",
    ),
    ("a low-latency size elsewhere", DBO | {"low_latency_max_tokens_per_rank": 64}, "all2all_backend=nccl"),
    ("a queue pair depth elsewhere", DBO | {"queue_pair_depth": 512}, "queue_pair_depth=512, all2all_backend=nccl"),
    ("payload", LL | {"dtype": "float32"}, "dtype=float32"),
    ("payload of high throughput", HT | {"dtype": "float16"}, "dtype=float16"),
    ("payload of v2", DBO | {"all2all_backend": "deepep_v2", "dtype": "float32"}, "dtype=float32"),
    # sizes
    ("experts over 3 ranks", DBO | {"data_parallel_size": 3}, "num_experts=64, num_ranks=3"),
    ("more requests than tokens", {"max_num_seqs": 65, "max_num_batched_tokens": 64}, "max_num_seqs=65"),
    ("cache too small", {"num_kv_blocks": 256}, "num_kv_blocks=256, block_size=16, max_model_len=4096"),
    ("no null block", {"num_kv_blocks": 1}, "num_kv_blocks=1"),
    ("dtype", {"dtype": "fp8"}, "dtype=fp8"),
    ("world", {"world": "cloud"}, "world=cloud"),
    ("shared experts", {"shared_experts": "after"}, "shared_experts=after"),
    ("negative seed", {"seed": -1}, "seed=-1"),
    ("fewer devices than ranks", DBO | {"world": "gpu"}, "num_devices=1, num_ranks=2"),
]


@pytest.mark.parametrize(("options", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_one_sentence(options, words):
    config = DBOConfig(**options)
    with pytest.raises(ConfigError, match=words) as caught:
        validate(config, MODEL, DeviceLimits(num_devices=1))
    rule, rest = str(caught.value).split(": ", 1)
    shown, fix = rest.rsplit("; ", 1)
    assert rule and "=" in shown and fix and "\n" not in str(caught.value)
    assert len(objections(options, num_devices=1)) == 1


ACCEPTED = [
    ("defaults", {}),
    ("the seed's command line", LL),
    ("nccl", DBO),
    ("ubatch-size alone", {"data_parallel_size": 2, "enable_expert_parallel": True, "num_ubatches": 2}),
    (
        "thresholds equal to U",
        DBO | {"num_ubatches": 4, "dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 4},
    ),
    ("three ubatches on nccl", DBO | {"num_ubatches": 3}),
    ("one ubatch without DBO", {"num_ubatches": 1}),
    ("the largest threshold of low latency", LL | {"dbo_prefill_token_threshold": 511}),
    ("the largest step of low latency", LL | {"max_num_batched_tokens": 511}),
    ("longer queue pairs", LL | {"queue_pair_depth": 2048, "low_latency_max_tokens_per_rank": 1023}),
    ("no SMs", HT | {"dbo_comm_sms": 0}),
    ("nearly all SMs", HT | {"dbo_comm_sms": 130}),
    ("zero SMs where none are taken", DBO | {"dbo_comm_sms": 0}),
    ("explicit point", DBO | {"split_points": (2047,)}),
    ("DP 1 x DCP 2 x EP 2", {"decode_context_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}),
    (
        "DCP with a backend",
        {"decode_context_parallel_size": 4, "dcp_comm_backend": "a2a", "cp_kv_cache_interleave_size": 4},
    ),
    ("low latency over DCP", LL | {"decode_context_parallel_size": 2, "max_num_batched_tokens": 1022}),
    ("graphs", DBO | {"cudagraph_mode": "FULL"}),
    ("explicit graphs", DBO | {"cudagraph_mode": "FULL", "capture_sizes": (16, 64, 128)}),
    ("a captured size as large as the largest step", {"cudagraph_mode": "FULL", "capture_sizes": (2048,)}),
    ("a cache of exactly one sequence", {"num_kv_blocks": 257}),
    ("any dtype on nccl", DBO | {"dtype": "float32"}),
    ("any dtype on copies", DBO | {"all2all_backend": "symm_copy", "dtype": "float32"}),
    ("v2", DBO | {"all2all_backend": "deepep_v2"}),
]


@pytest.mark.parametrize("options", [a[1] for a in ACCEPTED], ids=[a[0] for a in ACCEPTED])
def test_accepted(options):
    assert objections(options) == []


def test_all_hidden_sizes_and_no_other():
    for hidden_size in (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192):
        assert objections(LL, model=dataclasses.replace(MODEL, hidden_size=hidden_size)) == []
    (sentence,) = objections(LL, model=dataclasses.replace(MODEL, hidden_size=1024))
    assert "hidden_size=1024" in sentence and "2048, 2560" in sentence
    assert objections(DBO, model=LITTLE) == []


def test_capabilities_lift_a_backends_limits_in_tests():
    little = LL | {"dtype": "float32"}
    assert len(objections(little, model=LITTLE)) == 2
    assert objections(little, model=LITTLE, capabilities={"any_hidden_size", "any_dtype"}) == []
    assert validate(DBOConfig(**little), LITTLE, capabilities={"any_hidden_size", "any_dtype"}) == []


def test_the_buffer_fits_by_the_librarys_own_hint():
    needed = low_latency_size_hint_bytes(max_tokens_per_rank=511, hidden_size=2048, num_ranks=2, num_experts=64)
    (sentence,) = objections(LL, memory_bytes=needed - 1)
    assert f"low_latency_buffer_bytes={needed}" in sentence
    assert objections(LL, memory_bytes=needed) == []


@pytest.mark.parametrize(
    ("shape", "needed"),
    [
        # 2 x (send + receive + counters) by hand; both areas are one message for every expert and token
        (
            {"max_tokens_per_rank": 128, "hidden_size": 2048, "num_ranks": 2, "num_experts": 64},
            2 * 128 * 64 * (4160 + 4112 + 48),
        ),
        ({"max_tokens_per_rank": 1, "hidden_size": 2048, "num_ranks": 1, "num_experts": 1}, None),
    ],
)
def test_the_hint_grows_with_everything_and_is_aligned(shape, needed):
    hint = low_latency_size_hint_bytes(**shape)
    assert hint % 128 == 0
    for name in ("max_tokens_per_rank", "hidden_size", "num_experts"):
        assert low_latency_size_hint_bytes(**(shape | {name: 2 * shape[name]})) > hint
    if needed is not None:
        assert abs(hint / needed - 1) < 0.02


def test_positions_gate_and_weights_of_the_model():
    (sentence,) = objections({}, model=dataclasses.replace(MODEL, max_position_embeddings=4095))
    assert "max_model_len=4096, max_position_embeddings=4095" in sentence
    assert objections({}, model=dataclasses.replace(MODEL, max_position_embeddings=4096)) == []
    (sentence,) = objections({}, model=dataclasses.replace(MODEL, scoring_func="sigmoid"))
    assert "scoring_func=sigmoid" in sentence
    (sentence,) = objections({}, model=dataclasses.replace(MODEL, quantization="fp8"))
    assert "quantization=fp8" in sentence


@pytest.mark.parametrize("value", ["2", 2.0, True])
def test_a_number_that_is_no_integer_is_refused_at_construction(value):
    with pytest.raises(ConfigError, match="num_ubatches is an integer"):
        DBOConfig(num_ubatches=value)


# --- what is built


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DBO | {"all2all_backend": "deepep_v2"}, "all2all_backend=deepep_v2"),
        ({"cudagraph_mode": "FULL"}, "cudagraph_mode=FULL"),
        ({"shared_experts": "stream"}, "shared_experts=stream"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
    ],
)
def test_what_is_not_built_is_refused_by_name(monkeypatch, options, words):
    names = {*IMPLEMENTED["sim"], "decode_context_parallel_size"}
    built = {name: frozenset({getattr(DBOConfig(), name)}) for name in names}
    monkeypatch.setitem(IMPLEMENTED, "sim", built)
    with pytest.raises(NotAvailable, match=words):
        validate(DBOConfig(**options), MODEL)
    for name in built:
        built[name] |= {options.get(name)}
    assert validate(DBOConfig(**options), MODEL) == []


def test_one_device_a_rank_is_enough():
    assert objections(DBO | {"world": "gpu"}, num_devices=2) == []


def test_experts_are_spread_over_the_ranks_of_dcp_groups_too():
    options = {"decode_context_parallel_size": 4, "enable_expert_parallel": True}
    (sentence,) = objections(options, model=dataclasses.replace(LITTLE, num_experts=6))
    assert "num_experts=6, num_ranks=4" in sentence
    assert objections(options, model=LITTLE) == []


def test_a_machine_without_devices_is_not_a_usage_error():
    with pytest.raises(NotAvailable, match="num_devices=0"):
        validate(DBOConfig(**DBO, world="gpu"), MODEL, DeviceLimits(num_devices=0))


# --- warnings


@pytest.mark.parametrize(
    ("options", "workload", "words"),
    [
        (LL, (75, 25), "deepep_high_throughput fits"),
        (LL, (74, 26), None),
        (LL, (0, 0), None),
        (HT, (25, 75), "deepep_low_latency fits"),
        (HT, (26, 74), None),
        (DBO, (100, 0), None),
    ],
)
def test_a_backend_that_does_not_fit_the_workload_is_warned_about(monkeypatch, options, workload, words):
    monkeypatch.setitem(IMPLEMENTED, "sim", {})
    prefill, decode = workload
    warnings = validate(DBOConfig(**options), MODEL, workload=Workload(prefill_tokens=prefill, decode_tokens=decode))
    assert [w for w in warnings if "fits" in w] == warnings
    assert [words in w for w in warnings] == ([True] if words else [])


def test_thresholds_that_no_step_reaches_are_warned_about():
    options = DBO | {"max_num_batched_tokens": 16}
    (warning,) = validate(DBOConfig(**options), MODEL)
    assert "dbo_decode_token_threshold=32" in warning
    assert validate(DBOConfig(**options, dbo_decode_token_threshold=16), MODEL) == []


# --- derived values


def test_derived_defaults():
    plain, low = DBOConfig(), DBOConfig(**LL)
    assert (plain.enable_dbo, plain.num_ubatches, plain.max_num_batched_tokens) == (False, 1, 2048)
    assert (low.num_ubatches, low.max_num_batched_tokens, low.low_latency_max_tokens_per_rank) == (2, 511, 511)
    assert (low.dbo_decode_token_threshold, low.dbo_prefill_token_threshold) == (32, 512)
    assert (low.dbo_schedule, low.dbo_comm_sms) == ("mlp_shared_overlap", 0)
    assert (DBOConfig(**HT).dbo_schedule, DBOConfig(**HT).dbo_comm_sms) == ("vllm_high_throughput", 20)
    assert DBOConfig(decode_context_parallel_size=2).dcp_comm_backend == "ag_rs"
    assert DBOConfig(num_ubatches=3).enable_dbo
    assert DBOConfig(**LL, decode_context_parallel_size=2).max_num_batched_tokens == 1022


def test_replace_derives_anew_what_nobody_chose():
    low = DBOConfig(**DBO).replace(all2all_backend="deepep_low_latency")
    assert low == DBOConfig(**LL) and low.explicit == frozenset()
    kept = DBOConfig(**DBO, max_num_batched_tokens=100, split_points=(40,)).replace(seed=3)
    assert (kept.max_num_batched_tokens, kept.split_points, kept.seed) == (100, (40,), 3)


def test_without_dbo_is_a_valid_baseline():
    config = DBOConfig(**DBO, dbo_decode_token_threshold=8, split_points=(40,), num_ubatches=2)
    baseline = config.without_dbo()
    assert not baseline.enable_dbo and baseline.num_ubatches == 1 and validate(baseline, MODEL) == []


def test_ranks_are_dp_times_dcp():
    assert DBOConfig(data_parallel_size=2, decode_context_parallel_size=4).num_ranks == 8


# --- capacity


@given(max_tokens=st.integers(1, 3000), stride=st.sampled_from([8, 16, 32]))
def test_no_step_falls_off_the_ladder(max_tokens, stride):
    """vllm#40734: stride 16 and maximum 700 ended at 688, and [700, 680] ran without a graph."""
    ladder = capture_ladder(max_tokens, stride=stride)
    assert ladder[-1] == max_tokens and ladder[0] == 1 and list(ladder) == sorted(set(ladder))
    assert all(b - a <= stride for a, b in zip(ladder, ladder[1:], strict=False))


def test_the_ladder_of_a_configuration():
    config = DBOConfig(cudagraph_mode="FULL", max_num_seqs=700)
    assert config.cudagraph_capture_sizes[-2:] == (688, 700)
    assert DBOConfig(max_num_seqs=700).cudagraph_capture_sizes == ()
    assert config.replace(capture_sizes=[256, 700]).cudagraph_capture_sizes == (256, 700)


def test_the_unsplit_step_is_profiled_too():
    """vllm#52176: halves of 4096 rows were profiled, and [8192, 1] ran 8192 at once."""
    config = DBOConfig(**DBO, max_num_batched_tokens=8192)
    assert profile_shapes(config) == ((8192,), (4096, 4096))
    with pytest.raises(ConfigError, match="profiled_tokens=4096, max_num_batched_tokens=8192"):
        require_profiled(config, max(profile_shapes(config)[1]))
    require_profiled(config, max(max(shape) for shape in profile_shapes(config)))
    assert profile_shapes(config.without_dbo()) == ((8192,),)
    assert profile_shapes(config.replace(num_ubatches=3, split_points=(1, 9))) == ((8192,), (1, 8, 8183))


# --- agreement


def test_effective_configurations_are_canonical_json():
    config = DBOConfig(**LL, cudagraph_mode="FULL", split_points=(40,))
    told = effective(config)
    assert json.loads(json.dumps(told)) == told and list(told) == sorted(told)
    assert told["num_ubatches"] == 2 and told["cudagraph_capture_sizes"][-1] == 128
    assert "num_kv_blocks" not in told and "explicit" not in told
    assert "num_kv_blocks" in effective(DBOConfig(decode_context_parallel_size=2))


def test_chosen_and_derived_values_agree():
    same = [effective(DBOConfig(**DBO)), effective(DBOConfig(**DBO, num_ubatches=2, num_kv_blocks=512))]
    assert compare_configs(same) is None


@pytest.mark.parametrize("field", sorted(effective(DBOConfig(**DBO))))
def test_a_difference_in_any_field_names_it_with_values_and_ranks(field):
    ours = effective(DBOConfig(**DBO))
    theirs = ours | {field: "something else"}
    with pytest.raises(ConfigError) as caught:
        compare_configs([ours, theirs, ours])
    assert f"{field}={ours[field]!r} on ranks 0,2, 'something else' on rank 1" in str(caught.value)


def test_a_field_that_a_rank_does_not_know_is_a_difference():
    with pytest.raises(ConfigError, match="seed=0 on rank 0, '<absent>' on rank 1"):
        compare_configs([{"seed": 0}, {}])


# --- the command line's table


def test_every_field_has_exactly_one_flag():
    fields = {f.name for f in dataclasses.fields(DBOConfig) if f.init}
    assert sorted(f.field for f in FLAGS) == sorted(fields)
    assert len({f.flag for f in FLAGS}) == len(FLAGS)
    assert not {f.flag for f in FLAGS} & {n.flag for n in NOT_NOW}


def test_flags_spell_what_vllm_spells():
    expected = """--data-parallel-size --enable-expert-parallel --enable-dbo --ubatch-size --dbo-decode-token-threshold
        --dbo-prefill-token-threshold --all2all-backend --cudagraph-mode --dbo-comm-sms --dbo-schedule
        --decode-context-parallel-size --cp-kv-cache-interleave-size --dcp-comm-backend --world""".split()
    assert set(expected) <= {f.flag for f in FLAGS}


def test_types_parse_what_a_shell_hands_over():
    by_field = {f.field: f for f in FLAGS}
    assert by_field["enable_dbo"].type is None
    assert by_field["split_points"].type("16,32") == (16, 32)
    assert by_field["num_ubatches"].type("2") == 2


def test_a_value_is_called_by_what_it_counts():
    called = {f.flag: f.metavar for f in FLAGS}
    assert called["--low-latency-max-tokens-per-rank"] == called["--max-model-len"] == "TOKENS"
    assert (called["--seed"], called["--queue-pair-depth"]) == ("SEED", "DEPTH")


@pytest.mark.parametrize("entry", NOT_NOW, ids=lambda entry: entry.field)
def test_what_is_not_now_is_refused_by_name_and_neutral_values_pass(entry):
    for neutral in entry.neutral:
        refuse_not_now({entry.field: neutral})
    for name in (entry.field, entry.flag):
        with pytest.raises(ConfigError, match=f"{entry.what}: not now: .*=7;"):
            refuse_not_now({name: 7})


def test_options_build_a_configuration():
    config = DBOConfig(**LL, num_ubatches=None, dbo_prefill_token_threshold=512)
    assert config.explicit == {"dbo_prefill_token_threshold"}
    with pytest.raises(ConfigError, match="dbo_prefill_token_threshold=512"):
        validate(config, MODEL)
