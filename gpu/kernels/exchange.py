"""Needs torch and Triton. `a2a_direct` on the host: one `DirectExchange` for each ubatch, and the fallback to `a2a`.

Usage:

 1. Agree on a `DirectLayout` for the largest batch; every rank allocates one region (`new_region`) for each ubatch.
 2. Hand every rank the addresses of all regions in *its own* address space, in rank order: `data_ptr()` of virtual
    ranks, CUDA IPC handles, or the buffer pointers of torch's symmetric memory. Regions start as zeros, on all ranks,
    before any rank pushes. FATAL: zeroing a region after a barrier that a peer has passed: it wipes a flag that will
    not come again.
 3. `prepare` for each shape before the first exchange. FATAL where ranks share a device: loading a kernel waits for the
    device, and the device waits for a peer that has not been launched.
 4. Call it on every rank, in the same order; eager, or captured and replayed, in any mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from dbo.dcp.direct import ALIGNMENT_BYTES, STATE_MISSING, STATE_WORDS, DirectLayout, tile_rows
from dbo.dcp.exchange import PackKernels, Reduced, dcp_a2a_lse_reduce
from dbo.dcp.groups import DCPGroup
from dbo.dcp.packing import check_inputs
from dbo.dcp.workspace import Slot, WorkspaceManager
from dbo.errors import NotAvailable, PeerFailed, UsageError
from gpu.kernels.direct import direct_kernel
from gpu.kernels.packed import TRITON_KERNELS
from gpu.kernels.rows import RAW, block_dim

_REGISTERS_OF_AN_SM = 65536
_REGISTER_UNIT = 256  # registers are given to a warp in units of this size
_PROGRAMS_OF_AN_SM = 32
_THREADS_OF_A_WARP = 32


def new_region(layout: DirectLayout, device: torch.device | str) -> torch.Tensor:
    """A zeroed region, aligned to 256 bytes. FATAL: using it before every rank has zeroed its own."""
    raw = torch.zeros(layout.total_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[skip : skip + layout.total_bytes]


@dataclass(frozen=True, kw_only=True)
class ExchangeTuning:
    """How a kernel is launched. Ranks may differ.

    Attributes:
        programs: size of the grid; all of it has to be resident at once.
        lag_tiles: tiles that a program pushes before it waits for the first.
        num_warps: warps of a program.
        spin_limit: polls before a wait gives up.
        tile_rows: rows of a tile; 0: `dbo.dcp.direct.tile_rows` of the shape. The one thing that ranks must agree on.
    """

    programs: int
    lag_tiles: int = 1
    num_warps: int = 4
    spin_limit: int = 1 << 28
    tile_rows: int = 0


def default_tuning(device: torch.device | str, *, ranks_on_device: int = 1, programs_per_sm: int = 3) -> ExchangeTuning:
    """A grid that fits on the device beside those of the other ranks that live on it."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return ExchangeTuning(programs=max(1, sms * programs_per_sm // ranks_on_device))


class DirectExchange:
    """One rank's end of the exchange for one ubatch.

    Args:
        layout: equal on all ranks.
        rank: 0 … C - 1.
        region: this rank's region; kept alive here.
        peer_addresses: address of every rank's region, this one's included, in this process.
        tuning: see `ExchangeTuning`.

    Attributes:
        fallbacks: calls that did not fit and took `a2a`.
    """

    def __init__(
        self,
        *,
        layout: DirectLayout,
        rank: int,
        region: torch.Tensor,
        peer_addresses: Sequence[int],
        tuning: ExchangeTuning,
    ) -> None:
        if len(peer_addresses) != layout.world_size or peer_addresses[rank] != region.data_ptr():
            raise UsageError.of(
                "an exchange needs the address of every rank's region, its own included",
                fix="pass data_ptr() of the own region at place `rank`",
                rank=rank,
                world_size=layout.world_size,
                addresses=len(peer_addresses),
            )
        if any(address % ALIGNMENT_BYTES for address in peer_addresses):
            raise UsageError.of(
                "regions are aligned to 256 bytes", fix="allocate them with new_region", addresses=peer_addresses
            )
        self.layout = layout
        self.rank = rank
        self.tuning = tuning
        self.fallbacks = 0
        self._launchers: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._region = region
        self._peers = torch.tensor(list(peer_addresses), dtype=torch.int64, device=region.device)
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=region.device)

    def fits(self, out_BHD: torch.Tensor) -> bool:
        """Whether this shape is within the capacity. Shapes are equal on all ranks, so the answer is, too."""
        rows, heads, dim = out_BHD.shape
        return self.layout.fits(rows * (heads // self.layout.world_size), dim * out_BHD.element_size())

    def epoch(self) -> int:
        """Exchanges completed. Waits for the device."""
        return int(self._state[0].item())

    def check(self) -> None:
        """Waits for the device.

        Raises:
            PeerFailed: a flag did not come within the spin limit; every result since then is wrong.
        """
        missing = int(self._state[STATE_MISSING].item())
        if missing:
            source, tile = divmod(missing - 1, self.layout.max_tiles)
            raise PeerFailed(source, f"rank {self.rank} waited in vain for its signal of tile {tile}")

    def prepare(self, out_BHD: torch.Tensor, lse_BH: torch.Tensor, **arguments: object) -> None:
        """Compile and load the kernel for these arguments (those of `launch`) without running it.

        Raises:
            NotAvailable: the grid cannot be resident at once, so its programs could wait for each other for ever.
        """
        args, meta = self._arguments(out_BHD, lse_BH, **arguments)  # type: ignore[arg-type]
        compiled = direct_kernel.warmup(*args, grid=(self.tuning.programs,), **meta)
        compiled._init_handles()
        resident = _resident_programs(compiled, self.tuning.num_warps, self._region.device)
        if self.tuning.programs > resident:
            raise NotAvailable.of(
                "all programs of the direct exchange are resident at once",
                fix="ask for fewer",
                programs=self.tuning.programs,
                resident=resident,
            )

    def launch(
        self,
        out_BHD: torch.Tensor,
        lse_BH: torch.Tensor,
        *,
        merged_BND: torch.Tensor | None = None,
        merged_lse_BN: torch.Tensor | None = None,
        is_lse_base_on_e: bool = True,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        push: bool = True,
        merge: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch on the current stream. `[B, N, D]` and `[B, N]` fp32, in the given tensors or in new ones."""
        args, meta = self._arguments(
            out_BHD,
            lse_BH,
            merged_BND=merged_BND,
            merged_lse_BN=merged_lse_BN,
            is_lse_base_on_e=is_lse_base_on_e,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            push=push,
            merge=merge,
        )
        if isinstance(direct_kernel, triton.JITFunction):
            self._launcher(args, meta)(*args, *(v for name, v in meta.items() if name != "num_warps"))
        else:  # the interpreter
            direct_kernel[(self.tuning.programs,)](*args, **meta)
        return args[2], args[3]

    def _launcher(self, args: list, meta: dict) -> Callable[..., None]:
        """The compiled kernel for these arguments. Triton's own look-up takes longer than a small exchange."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        aligned = tuple(t.data_ptr() % 16 == 0 for t in tensors)
        # Everything that Triton specialises on: shapes and strides, dtypes, alignment, constants.
        dtypes = tuple(t.dtype for t in tensors)
        key = (*(t.shape for t in tensors[:2]), *args[11:16], *dtypes, aligned, *meta.values())
        launcher = self._launchers.get(key)
        if launcher is None:
            compiled = direct_kernel.warmup(*args, grid=(self.tuning.programs,), **meta)
            launcher = self._launchers[key] = compiled[(self.tuning.programs, 1, 1)]
        return launcher

    def _arguments(
        self,
        out_BHD: torch.Tensor,
        lse_BH: torch.Tensor,
        *,
        merged_BND: torch.Tensor | None = None,
        merged_lse_BN: torch.Tensor | None = None,
        is_lse_base_on_e: bool = True,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        push: bool = True,
        merge: bool = True,
    ) -> tuple[list, dict]:
        rows, heads, dim = out_BHD.shape
        mine = heads // self.layout.world_size
        if merged_BND is None:
            merged_BND = torch.empty((rows, mine, dim), dtype=out_BHD.dtype, device=out_BHD.device)
        if merged_lse_BN is None:
            merged_lse_BN = torch.empty((rows, mine), dtype=torch.float32, device=out_BHD.device)
        has_mask = seq_lens is not None
        args = [
            out_BHD.view(RAW[out_BHD.dtype]),
            lse_BH,
            merged_BND,
            merged_lse_BN,
            seq_lens if has_mask else lse_BH,
            query_start_loc if has_mask else lse_BH,
            self._peers,
            self._state,
            self.rank,
            rows,
            seq_lens.shape[0] if seq_lens is not None else 0,
            *out_BHD.stride(),
            *lse_BH.stride(),
            self.tuning.spin_limit,
            self.tuning.lag_tiles,
        ]
        meta = {
            "WORLD": self.layout.world_size,
            "N": mine,
            "D": dim,
            "MAX_TILES": self.layout.max_tiles,
            "LSE_OFFSET": self.layout.lse_offset,
            "LSE_SLAB": self.layout.lse_slab_bytes,
            "DATA_OFFSET": self.layout.data_offset,
            "DATA_SLAB": self.layout.data_slab_bytes,
            "HAS_MASK": has_mask,
            "BASE_E": is_lse_base_on_e,
            "PUSH": push,
            "MERGE": merge,
            "TILE_R": self.tuning.tile_rows or tile_rows(rows * mine),
            "BLOCK_D": block_dim(dim),
            "num_warps": self.tuning.num_warps,
        }
        return args, meta


def _resident_programs(compiled: object, num_warps: int, device: torch.device) -> int:
    """Programs of a loaded kernel that an otherwise empty device holds at once."""
    properties = torch.cuda.get_device_properties(device)
    of_a_warp = -(-compiled.n_regs * _THREADS_OF_A_WARP // _REGISTER_UNIT) * _REGISTER_UNIT  # type: ignore[attr-defined]
    shared = compiled.metadata.shared  # type: ignore[attr-defined]
    limits = [
        _REGISTERS_OF_AN_SM // (of_a_warp * num_warps),
        properties.max_threads_per_multi_processor // (num_warps * _THREADS_OF_A_WARP),
        _PROGRAMS_OF_AN_SM,
    ]
    if shared:
        limits.append(properties.shared_memory_per_multiprocessor // (shared + 1024))
    return properties.multi_processor_count * min(limits)


def dcp_direct_lse_reduce(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: DCPGroup,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    *,
    exchange: DirectExchange,
    workspace: WorkspaceManager | None = None,
    slot: Slot | None = None,
    kernels: PackKernels = TRITON_KERNELS,
) -> Reduced:
    """`dcp_a2a_lse_reduce` without a collective: same arguments, same result. A batch beyond the capacity takes `a2a`.

    Args:
        exchange: this ubatch's end; its layout has the size of `cp_group`.
        workspace, slot, kernels: for the fallback.

    Raises:
        ValueError: see `dbo.dcp.packing.check_inputs`.
    """
    check_inputs(cp_attn_out, cp_attn_lse, exchange.layout.world_size, seq_lens, query_start_loc)
    if exchange.layout.world_size == 1 or not exchange.fits(cp_attn_out):
        exchange.fallbacks += exchange.layout.world_size > 1
        return dcp_a2a_lse_reduce(
            cp_attn_out,
            cp_attn_lse,
            cp_group,
            return_lse,
            is_lse_base_on_e,
            seq_lens,
            query_start_loc,
            workspace=workspace,
            slot=slot,
            kernels=kernels,
        )
    merged, lse = exchange.launch(
        cp_attn_out,
        cp_attn_lse,
        is_lse_base_on_e=is_lse_base_on_e,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
    )
    return (merged, lse) if return_lse else merged
