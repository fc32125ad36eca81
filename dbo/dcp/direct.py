"""The protocol of `a2a_direct` and its memory layout: integers only, so that a simulator can play it.

**Region.** Every rank owns one region that all its peers can write, and passes its address to them once. It holds, for
each of two parities and each source rank, a slab for partial outputs and one for fp32 LSE, and for each source rank a
flag for every tile. A tile is `tile_rows` consecutive rows of the `[B, N]` result. Beside the region a rank has a
private state: the epoch, how many programs of the running kernel have finished, and the first flag that never came.

**One exchange**, epoch e = state epoch + 1, on every rank, for each tile in rising order:

 1. push: store the tile's rows for peer p in slab (e mod 2, my rank) of *p's* region, then flag (my rank, tile) = e
    there, with release at system scope, after all threads of the program have stored;
 2. wait, `lag` tiles later: until flag (s, tile) ≥ e in *my* region for every peer s, with acquire at system scope;
 3. merge the tile from the slabs (e mod 2, s) and my own partial output, which never travels;
 4. the program that finishes last writes epoch = e. The epoch lives in device memory, so a captured graph holds no
    number that would be stale in its second replay, and eager calls and replays mix in any order.

**Two parities are enough.** Rank p may overwrite my parity e mod 2 in its epoch e + 2. It starts that kernel after its
kernel e + 1 has ended (stream order), and that one ended only after it had seen a flag of epoch e + 1 from me for every
tile, hence for at least one: `num_tiles` is never 0, not even for B = 0. I raised that flag in my kernel e + 1, which
started after my kernel e, with all its reads of parity e mod 2, had ended. So the overwriting comes after the reads,
and no rank is ever more than one epoch ahead of another. A flag with e + 1 instead of e says that the source has
finished pushing all of e, therefore `≥` and no reset. One parity would not do: the flag of e + 1 may come while I still
read e.

**No deadlock.** Let all programs of all ranks be resident, each work through its tiles in rising order and push a tile
before it waits for it. Suppose none can go on; take the smallest tile t that one of them waits for, from source s. The
program of s that owns t has not pushed it, so it is itself stuck at a wait, for a tile t' ≥ t; but it pushed all its
tiles up to t' first, t included. Contradiction. Grids may differ between ranks. What has to hold:

 * the grid fits on the device at once (`gpu.kernels.direct` checks it), also beside other kernels that spin: ranks that
   share a device share its SMs, so C virtual ranks get 1/C each;
 * every rank launches its exchanges in the same order. Instances (one for each ubatch) are independent, but kernels of
   one
   stream are not: u0, u1 on one rank against u1, u0 on another is a cycle.

**Failure.** A wait is bounded by `spin_limit` polls. When it runs out the kernel notes (source, tile) in the state and
ends; the results of that call are wrong, and `missing_signal` tells who is to blame.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT_BYTES = 256
FLAG_BYTES = 8
LSE_BYTES = 4
STATE_EPOCH, STATE_FINISHED, STATE_MISSING = 0, 1, 2
STATE_WORDS = 4
MIN_TILE_ROWS = 4
MAX_TILE_ROWS = 16
_TILES_WANTED = 512


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def tile_rows(num_rows: int) -> int:
    """Rows of a tile for a result of `num_rows` = B·N rows: small tiles while there are too few to fill a device.

    A pure function of the shape: all ranks must cut alike, whatever device they run on.
    """
    wanted = max(1, num_rows // _TILES_WANTED)
    return min(MAX_TILE_ROWS, max(MIN_TILE_ROWS, 1 << (wanted.bit_length() - 1)))


def num_tiles(num_rows: int) -> int:
    """Tiles of a result of `num_rows` rows, at least one: its flag is what keeps the two parities apart."""
    return max(1, -(-num_rows // tile_rows(num_rows)))


@dataclass(frozen=True, kw_only=True)
class DirectLayout:
    """Where things lie in a region: flags first, then LSE, then partial outputs. Equal on all ranks.

    Attributes:
        world_size: C.
        max_rows: capacity in rows of the result, B·N.
        row_bytes: capacity of a row, D times the element size.
    """

    world_size: int
    max_rows: int
    row_bytes: int

    @property
    def max_tiles(self) -> int:
        """Flags for each source: more than any shape within the capacity can ask for."""
        return max(2 * _TILES_WANTED, -(-self.max_rows // MIN_TILE_ROWS))

    @property
    def lse_offset(self) -> int:
        return _aligned(self.world_size * self.max_tiles * FLAG_BYTES)

    @property
    def lse_slab_bytes(self) -> int:
        return _aligned(self.max_rows * LSE_BYTES)

    @property
    def data_offset(self) -> int:
        return self.lse_offset + 2 * self.world_size * self.lse_slab_bytes

    @property
    def data_slab_bytes(self) -> int:
        return _aligned(self.max_rows * self.row_bytes)

    @property
    def total_bytes(self) -> int:
        return self.data_offset + 2 * self.world_size * self.data_slab_bytes

    def fits(self, num_rows: int, row_bytes: int) -> bool:
        """Whether a result of `num_rows` rows of `row_bytes` is within the capacity; the same answer on every rank."""
        return (
            num_rows <= self.max_rows
            and num_rows * row_bytes <= self.data_slab_bytes
            and num_tiles(num_rows) <= self.max_tiles
        )
