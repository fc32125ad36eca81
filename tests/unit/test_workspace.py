"""The workspace: growth, lock, independent slots, and staging that belongs to a graph."""

from __future__ import annotations

import gc

import pytest
import torch

from dbo.dcp.workspace import ALIGNMENT_BYTES, Slot, WorkspaceManager
from dbo.errors import WorkspaceError
from dbo.ubatching.forward_context import ForwardContext, override_forward_context

S0, S1 = Slot(0, "dcp"), Slot(1, "dcp")


def floats(count: int) -> tuple[tuple[int, ...], torch.dtype]:
    return (count,), torch.float32


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_buffers_of_one_reservation_have_their_shapes_and_do_not_overlap() -> None:
    manager = WorkspaceManager()
    a, b, c = manager.get_simultaneous(((3, 5), torch.bfloat16), ((0, 4), torch.float32), ((7,), torch.int64), slot=S0)
    assert (
        (a.shape, a.dtype) == ((3, 5), torch.bfloat16)
        and b.shape == (0, 4)
        and (c.shape, c.dtype) == ((7,), torch.int64)
    )
    a.fill_(1), c.fill_(2)
    assert (a == 1).all() and (c == 2).all()
    assert (c.data_ptr() - a.data_ptr()) % ALIGNMENT_BYTES == 0 and manager.allocations == 1


def test_no_allocation_after_warm_up() -> None:
    manager = WorkspaceManager()
    largest = manager.get_simultaneous(floats(100), floats(100), slot=S0)
    for count in (1, 50, 100):
        again = manager.get_simultaneous(floats(count), floats(count), slot=S0)
        assert again[0].data_ptr() == largest[0].data_ptr()
    assert manager.allocations == 1


def test_buffers_alive_together_are_summed_not_maximised() -> None:
    manager = WorkspaceManager()
    manager.get_simultaneous(floats(100), slot=S0)
    first, second = manager.get_simultaneous(floats(100), floats(100), slot=S0)
    assert second.data_ptr() - first.data_ptr() >= 400 and manager.allocations == 2


def test_growth_after_the_lock_names_caller_asked_and_present() -> None:
    manager = WorkspaceManager()
    manager.get_simultaneous(floats(64), slot=S0)
    manager.lock()
    manager.get_simultaneous(floats(64), slot=S0)
    with pytest.raises(WorkspaceError, match=r"caller=layer 3, slot=\(0, 'dcp'\), asked_bytes=512, present_bytes=256"):
        manager.get_simultaneous(floats(65), slot=S0, caller="layer 3")
    with pytest.raises(WorkspaceError, match=r"slot=\(1, 'dcp'\), asked_bytes=256, present_bytes=0"):
        manager.get_simultaneous(floats(1), slot=S1)
    assert manager.allocations == 1


def test_growing_one_slot_moves_no_other() -> None:
    manager = WorkspaceManager()
    (first,) = manager.get_simultaneous(floats(8), slot=S0)
    first.fill_(5.0)
    for count in (8, 80, 8000):
        manager.get_simultaneous(floats(count), slot=S1)[0].fill_(9.0)
    (again,) = manager.get_simultaneous(floats(8), slot=S0)
    assert again.data_ptr() == first.data_ptr() and (again == 5.0).all()
    assert (manager.generation(S0), manager.generation(S1)) == (1, 3)


def test_lanes_of_one_ubatch_are_apart() -> None:
    manager = WorkspaceManager()
    a, b = (manager.get_simultaneous(floats(8), slot=Slot(0, lane))[0] for lane in ("dcp", "metadata"))
    a.fill_(1.0), b.fill_(2.0)
    assert (a == 1.0).all()


def test_explicit_slot_wins_over_the_thread() -> None:
    """vllm#58161: builders run outside of the ubatch threads and name the ubatch that they build for."""
    manager = WorkspaceManager()
    with override_forward_context(ForwardContext(attn_metadata=None, ubatch=0)):
        (s0,) = manager.get_simultaneous(floats(1), slot=Slot(0, "m"))
        (s1,) = manager.get_simultaneous(floats(1), slot=Slot(1, "m"))
    s0.fill_(5.0), s1.fill_(9.0)
    assert (s0.item(), s1.item()) == (5.0, 9.0)


def test_without_a_slot_the_forward_context_decides() -> None:
    manager = WorkspaceManager()
    outside = manager.get_simultaneous(floats(1), lane="dcp")
    with override_forward_context(ForwardContext(attn_metadata=None, ubatch=1)):
        inside = manager.get_simultaneous(floats(1), lane="dcp")
    assert addresses(outside) == addresses(manager.get_simultaneous(floats(1), slot=S0))
    assert addresses(inside) == addresses(manager.get_simultaneous(floats(1), slot=S1))


def test_a_graph_has_staging_of_its_own_and_keeps_it() -> None:
    """vllm#45487: growth after the capture must not free what a replay writes."""
    manager = WorkspaceManager()
    eager = manager.get_simultaneous(floats(4), floats(4), slot=S0)
    with manager.capturing("G4"):
        baked = manager.get_simultaneous(floats(4), floats(4), slot=S0)
        layer_2 = manager.get_simultaneous(floats(4), floats(4), slot=S0)
    assert addresses(layer_2) == addresses(baked) and not set(addresses(baked)) & set(addresses(eager))
    places = addresses(baked)
    del eager, baked, layer_2
    gc.collect()
    grown = manager.get_simultaneous(floats(4000), slot=S0)
    others = [torch.empty(4) for _ in range(200)]  # the allocator would hand out a freed block here
    assert not set(places) & set(addresses([*grown, *others]))
    manager.check_replay("G4")


def test_graphs_share_no_staging() -> None:
    """local-inference-lab#117: two captured sizes, whose staging would be one recycled block."""
    manager = WorkspaceManager()
    baked = {}
    for graph, rows in (("G8", 8), ("G4", 4), ("G4 again", 4)):
        with manager.capturing(graph):
            baked[graph] = addresses(manager.get_simultaneous(floats(rows), floats(rows), slot=S0))
    assert len({place for places in baked.values() for place in places}) == 6
    assert manager.graph_allocations == 3 and manager.allocations == 0


def test_slots_stay_apart_inside_a_capture() -> None:
    manager = WorkspaceManager()
    with manager.capturing("G"):
        a, b = (manager.get_simultaneous(floats(4), slot=slot)[0] for slot in (S0, S1))
    assert a.data_ptr() != b.data_ptr()


def test_capturing_after_the_lock_is_not_growth() -> None:
    manager = WorkspaceManager()
    manager.lock()
    with manager.capturing("G"):
        manager.get_simultaneous(floats(4), slot=S0)
    assert manager.allocations == 0 and manager.graph_allocations == 1


def test_capture_outside_of_the_scope_is_refused() -> None:
    manager = WorkspaceManager(is_capturing=lambda: True)
    with pytest.raises(WorkspaceError, match=r"caller=exchange, slot=\(0, 'dcp'\); capture inside"):
        manager.get_simultaneous(floats(4), slot=S0, caller="exchange")
    with manager.capturing("G"):
        manager.get_simultaneous(floats(4), slot=S0)


def test_replay_of_borrowed_staging_after_growth_is_refused() -> None:
    manager = WorkspaceManager()
    manager.get_simultaneous(floats(8), slot=S0)
    with manager.capturing("G4", own_staging=False):
        manager.get_simultaneous(floats(4), slot=S0)
    manager.get_simultaneous(floats(8), slot=S0)
    manager.get_simultaneous(floats(800), slot=S1)
    manager.check_replay("G4")
    manager.get_simultaneous(floats(800), slot=S0)
    with pytest.raises(WorkspaceError, match="graph=G4, slot=.*captured_generation=1, generation=2"):
        manager.check_replay("G4")


def test_a_released_graph_is_not_replayed() -> None:
    manager = WorkspaceManager()
    with manager.capturing("G"):
        manager.get_simultaneous(floats(4), slot=S0)
    manager.release("G")
    for misuse in (manager.check_replay, manager.release):
        with pytest.raises(WorkspaceError, match="graph=G"):
            misuse("G")
    with manager.capturing("G"):
        manager.get_simultaneous(floats(4), slot=S0)
    manager.check_replay("G")


def test_captures_do_not_nest_and_do_not_repeat() -> None:
    manager = WorkspaceManager()
    with manager.capturing("G"):
        with pytest.raises(WorkspaceError, match="do not nest"), manager.capturing("H"):
            pytest.fail("a nested capture was entered")
    with pytest.raises(WorkspaceError, match="captured once"), manager.capturing("G"):
        pytest.fail("a second capture of one graph was entered")


def test_a_failed_capture_leaves_no_trace() -> None:
    manager = WorkspaceManager()
    with pytest.raises(RuntimeError, match="boom"), manager.capturing("G"):
        raise RuntimeError("boom")
    manager.get_simultaneous(floats(4), slot=S0)
    assert manager.allocations == 1
    with pytest.raises(WorkspaceError):
        manager.check_replay("G")
