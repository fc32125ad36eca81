"""The blocks of the paged KV cache, counted by reference.

Block 0 (`NULL_BLOCK`) is for the rows that must not touch a real key. It is never handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from dbo.batch.slicing import NULL_BLOCK
from dbo.errors import ConfigError, EngineError


def num_blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)


class BlockPool:
    """Blocks 1 … num_blocks - 1, first freed first reused (deterministic, and stale KV lives as long as it can).

    Args:
        num_blocks: blocks of the cache, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            rule = "a KV cache has the null block and at least one more"
            raise ConfigError.of(rule, fix="raise num_kv_blocks", num_kv_blocks=num_blocks)
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(NULL_BLOCK + 1, num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    def references(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._references[block_id]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks that nobody holds, each now held once.

        Raises:
            EngineError: fewer are free; ask `num_free` first.
        """
        if count > self.num_free:
            rule = "only free blocks are allocated"
            raise EngineError.of(rule, fix="preempt a request first", wanted=count, free=self.num_free)
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block_ids: Sequence[int]) -> None:
        """One more holder for each block, all of which somebody holds."""
        self._check_held(block_ids)
        for block in block_ids:
            self._references[block] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """One holder fewer for each block; a block without holders can be allocated again.

        Raises:
            EngineError: nobody holds one of them.
        """
        for block in block_ids:
            self._check_held((block,))
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def _check_held(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if not NULL_BLOCK < block < self.num_blocks or not self._references[block]:
                raise EngineError.of("a block is shared or freed by a holder", fix="allocate it first", block=block)
