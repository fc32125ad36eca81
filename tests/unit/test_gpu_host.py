"""Raw-lock batons, barriers and workers of world gpu, and what a hand-over costs."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from dbo.errors import RingError
from gpu.bench import handoff
from gpu.host.threads import RawBaton, ThreadBarrier, ThreadWorker
from gpu.record.recorder import RankRecorder
from gpu.watch import flight_recorder as board


@pytest.fixture
def recorder():
    made = RankRecorder(0, None, place=lambda: (0, 0), stamp=lambda stream: 0.0)
    made.start_line("main", None)
    return made


def worker(recorder, name="u0"):
    return ThreadWorker(recorder, name, stream=None, enter=lambda: None)


def test_a_baton_holds_one_permit(recorder):
    baton = RawBaton(recorder)
    baton.give()
    baton.give()
    baton.take()
    took = threading.Event()
    other = worker(recorder)
    other.submit(lambda: (baton.take(), took.set()))
    assert not took.wait(0.05)
    baton.give()
    other.join()
    assert took.is_set()
    other.stop()


def test_taking_orders_the_taker_after_the_giver(recorder):
    baton = RawBaton(recorder)
    other = worker(recorder)
    recorder.host("yield", to=0, index=0)
    given = recorder.records[-1]
    baton.give()
    other.submit(lambda: (baton.take(), recorder.host("resume", index=0)))
    other.join()
    resumed = next(r for r in recorder.records if r.kind == "resume")
    assert given.id in resumed.after and resumed.line == "u0"
    other.stop()


def test_a_worker_survives_what_its_work_raises(recorder, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    one = worker(recorder)
    seen = []
    one.submit(lambda: 1 / 0)
    one.join()
    assert isinstance(one.error, ZeroDivisionError)
    one.submit(lambda: seen.append("next"))
    one.join()
    assert seen == ["next"] and one.thread.is_alive() and one.error is None
    one.stop()
    assert not one.thread.is_alive() and raised == []


def test_an_aborted_barrier_wakes_and_refuses(recorder):
    barrier = ThreadBarrier(recorder, 2, "ready")
    caught = []
    other = worker(recorder)

    def wait():
        try:
            barrier.wait()
        except RingError as error:
            caught.append(error)

    other.submit(wait)
    time.sleep(0.02)
    barrier.abort()
    other.join()
    with pytest.raises(RingError, match="aborted: barrier=ready"):
        barrier.wait()
    assert len(caught) == 1
    other.stop()


def test_every_wait_is_on_the_board_before_it_begins(tmp_path):
    watched = board.Board.create(tmp_path / "board", 1)
    recorder = RankRecorder(0, watched.rank(0), place=lambda: (2, 2), stamp=lambda stream: 0.0)
    recorder.start_line("main", None)
    other = worker(recorder)
    baton = RawBaton(recorder)
    other.submit(baton.take)
    deadline = time.monotonic() + 5.0
    while not any(line.name == "u0" and line.state == board.BATON for line in watched.rank(0).lines()):
        assert time.monotonic() < deadline, watched.rank(0).lines()
        time.sleep(0.005)
    baton.give()
    other.join()
    other.stop()
    (line,) = [line for line in watched.rank(0).lines() if line.name == "u0"]
    assert not line.waits


@pytest.mark.parametrize("keep", [True, False])
def test_without_records_nothing_is_kept_of_a_meeting(keep):
    recorder = RankRecorder(0, None, place=lambda: (0, 0), stamp=lambda stream: 0.0, keep=keep)
    task = recorder.start_line("main", SimpleNamespace(name="compute"))
    for index in range(3):
        recorder.device("wait", "signals", attrs={}, after=(recorder.meet_reference("symm_copy", index),))
        recorder.has_met("dp.cpu", index)
    assert (len(recorder.meets), len(task.after), len(recorder.records)) == ((6, 3, 3) if keep else (0, 0, 0))


def test_every_way_of_handing_over_is_measured():
    costs = handoff.measure(steps=8, yields=4)
    assert [cost.name for cost in costs][:2] == ["new threads, threading.Event", "persistent threads, raw locks"]
    assert all(0 < cost.low_us <= cost.median_us <= cost.high_us for cost in costs)


def test_a_greenlet_that_nobody_can_wake_is_refused(recorder):
    pytest.importorskip("greenlet", reason="ubatches as greenlets need it")
    from gpu.host.greenlets import GreenletHost

    resumed = []
    host = GreenletHost(recorder, resumed.append, "compute")
    one = host.worker("u0")
    baton = host.baton("u0")
    one.submit(baton.take)
    one.join()
    assert isinstance(one.error, RingError) and "somebody must be left to wake" in str(one.error)
    baton.give()
    one.submit(baton.take)
    one.join()
    assert one.error is None and one.wakes == 2 and set(resumed) <= {"compute", None}
    host.close()
    assert host.workers == []


@pytest.mark.parametrize("keep", [True, False])
def test_without_records_no_work_is_stamped(keep):
    stamped = []
    recorder = RankRecorder(
        0, None, place=lambda: (0, 0), stamp=lambda stream: stamped.append(stream) or 0.0, keep=keep
    )
    task = recorder.start_line("main", SimpleNamespace(name="compute"))
    task.tags = (0, 1, -1, "MLP")
    recorder.launches()
    recorder.end_visit(task)
    marker = recorder.device("record", "done", attrs={}).id
    recorder.timed_device("send", "dispatch.send", attrs={})
    recorder.end_visit(task)
    assert marker >= 0 and bool(stamped) is keep
    assert [record.kind for record in recorder.records] == (["op", "record", "send"] if keep else [])
