"""Makes a rank's end of its DCP group, in either mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbo.dcp.interface import DCPShape
from dbo.ubatching.forward_context import get_forward_context
from sim.dcp.direct import SimDirect
from sim.dcp.group import SimDCPGroup
from sim.dcp.symbols import SymbolContextParallel

if TYPE_CHECKING:
    from sim.world import SimWorld


def context_parallel(world: SimWorld, shape: DCPShape) -> Any:
    """A `dbo.dcp.interface.ContextParallel`."""
    if world.mode != "numeric":
        return SymbolContextParallel(world, shape, current_ubatch)
    from dbo.dcp.context_parallel import TorchContextParallel
    from dbo.dcp.workspace import WorkspaceManager
    from sim.dcp.numeric import FusedKernels, NumericDirect, NumericMoving

    direct = None
    if shape.backend == "a2a_direct":
        direct = SimDirect(world, shape.size, NumericDirect(world.rank), world.cluster.direct_fabric)
    workspace = WorkspaceManager(
        f"sim:{world.rank}", is_capturing=lambda: world.capture is not None, recorder=world.trace
    )
    return TorchContextParallel(
        shape,
        SimDCPGroup(world, shape.size, NumericMoving()),
        workspace=workspace,
        kernels=FusedKernels(world.rank),
        current_ubatch=current_ubatch,
        direct=direct,
    )


def current_ubatch() -> int:
    """Of the calling task's forward pass."""
    return get_forward_context().ubatch
