"""The elastic buffer of a process: made before the first exchange, for the largest step, and never while it is in use."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the adapter's arrays are torch's")

from dbo.config import DBOConfig  # noqa: E402
from dbo.errors import ConfigError  # noqa: E402
from dbo.job.rank import make_prepare_finalize  # noqa: E402
from gpu.alltoall import deepep_v2  # noqa: E402


class FakeBuffer:
    def __init__(self, log: list[Any], tokens: int, hidden: int, num_topk: int) -> None:
        self.log, self.room = log, (tokens, hidden, num_topk)
        log.append(("make", *self.room))

    def dispatch(self, x: Any, **options: Any) -> Any:
        self.log.append(("dispatch", options["num_max_tokens_per_rank"], self.room))

    def destroy(self) -> None:
        self.log.append(("destroy", *self.room))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the library is asked for."""
    found: list[Any] = []

    def make(group: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int, **options: Any) -> FakeBuffer:
        return FakeBuffer(found, num_max_tokens_per_rank, hidden, num_topk)

    monkeypatch.setattr(deepep_v2, "load", lambda: SimpleNamespace(ElasticBuffer=make))
    monkeypatch.setattr(deepep_v2, "_KEPT", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.append("drained"))
    return found


def elastic() -> deepep_v2.DeepEPElastic:
    made = deepep_v2.DeepEPElastic(SimpleNamespace(size=2, device="cuda:0"), object())
    made._exchanges = SimpleNamespace(of_rows=lambda op, x: nullcontext())  # type: ignore[assignment]
    return made


def dispatch(buffer: deepep_v2.DeepEPElastic, tokens: int, hidden: int = 64, top_k: int = 2) -> None:
    ids = torch.zeros((3, top_k), dtype=torch.int64)
    buffer.dispatch(torch.zeros((3, hidden)), topk_idx=ids, num_max_tokens_per_rank=tokens)


def test_one_buffer_serves_every_size_of_a_run(log: list[Any]) -> None:
    buffer = elastic()
    buffer.reserve(tokens=16384, hidden=64, num_topk=2)
    for tokens in (64, 4096, 4097, 16384):
        dispatch(buffer, tokens)
    assert [entry[0] for entry in log] == ["make", "dispatch", "dispatch", "dispatch", "dispatch"]


def test_runs_one_after_another_share_it_and_a_larger_one_begins_with_a_drained_device(log: list[Any]) -> None:
    for tokens, hidden in ((64, 64), (128, 64), (8192, 32)):
        elastic().reserve(tokens=tokens, hidden=hidden, num_topk=2)
    assert log == [("make", 4096, 64, 2), "drained", ("destroy", 4096, 64, 2), ("make", 8192, 64, 2)]


@pytest.mark.parametrize("asked", [{"tokens": 4097}, {"tokens": 8, "hidden": 65}, {"tokens": 8, "top_k": 3}], ids=str)
def test_more_than_was_reserved_is_refused(log: list[Any], asked: dict[str, int]) -> None:
    buffer = elastic()
    buffer.reserve(tokens=64, hidden=64, num_topk=2)
    with pytest.raises(ConfigError, match=r"reserve it"):
        dispatch(buffer, **asked)
    assert not any(entry[0] in ("destroy", "dispatch") for entry in log)


def test_nothing_is_sent_before_there_is_a_buffer(log: list[Any]) -> None:
    with pytest.raises(ConfigError, match="before the first exchange"):
        dispatch(elastic(), 8)
    assert log == []


def test_a_rank_reserves_for_its_largest_step() -> None:
    reserved: list[Any] = []
    world: Any = SimpleNamespace(
        size=2, rank=0, row_ops=None, elastic=SimpleNamespace(reserve=lambda **room: reserved.append(room))
    )
    config = DBOConfig(data_parallel_size=2, all2all_backend="deepep_v2", max_num_batched_tokens=9000)
    model: Any = SimpleNamespace(n_routed_experts=8, hidden_size=2048, num_experts_per_tok=6)
    make_prepare_finalize(world, config, model)
    assert reserved == [{"tokens": 9000, "hidden": 2048, "num_topk": 6}]
