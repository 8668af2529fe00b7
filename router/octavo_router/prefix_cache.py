"""Finds computed blocks again by what is in them: chained hashes of tokens, over both tiers.

A full block's hash covers its tokens and, through the hash of the block before it, everything in front of them; the
chain's root covers the model, the adapter and the request's salt. So equal hashes are equal keys and values, up to a
collision of 128 bits of blake2b. A hash names one block, on one tier, and only after the result of the step that
computed it was accepted; what runs right now is known too (`computing`), so that nobody computes it a second time.

Which blocks to evict is the pools' order, and when, the block manager's.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

HASH_SIZE = 16


class Tier(enum.Enum):
    """Where a block lives."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block that a hash names."""

    tier: Tier
    block_id: int


def root_hash(*, model_digest: str, adapter: str, cache_salt: str) -> bytes:
    """The hash in front of a sequence's first block. Each part goes in behind its length, so that no two sets of parts
    give the same bytes."""
    digest = hashlib.blake2b(digest_size=HASH_SIZE)
    for part in (model_digest, adapter, cache_salt):
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


def chained_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block behind the block, or the root, whose hash is `parent`."""
    return hashlib.blake2b(parent + struct.pack(f"<{len(token_ids)}i", *token_ids), digest_size=HASH_SIZE).digest()


class PrefixCache:
    """Which hash names which block. Changes no pool.

    computing: hashes of blocks that running sequences are about to compute, with the sequence's id.
    """

    def __init__(self) -> None:
        self.computing: dict[bytes, int] = {}
        self._blocks: dict[bytes, CachedBlock] = {}
        self._hashes: dict[Tier, dict[int, bytes]] = {tier: {} for tier in Tier}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def match(self, block_hashes: Sequence[bytes], most: int) -> list[CachedBlock]:
        """The cached blocks of the longest chain from the first hash on, at most so many."""
        found = []
        for index in range(most):
            block = self._blocks.get(block_hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def hash_of(self, tier: Tier, block_id: int) -> bytes | None:
        """The hash that names a block, or None."""
        return self._hashes[tier].get(block_id)

    def name(self, block_hash: bytes, tier: Tier, block_id: int) -> None:
        """Lets a hash that names nothing name a block that has no name."""
        assert block_hash not in self._blocks, "a hash would name two blocks"
        assert block_id not in self._hashes[tier], f"{tier.value} block {block_id} would have two hashes"
        self._blocks[block_hash] = CachedBlock(tier, block_id)
        self._hashes[tier][block_id] = block_hash

    def forget(self, tier: Tier, block_id: int) -> bytes:
        """Takes a block's name away and returns it."""
        block_hash = self._hashes[tier].pop(block_id)
        del self._blocks[block_hash]
        return block_hash

    def named(self, tier: Tier) -> list[int]:
        """Every block of a tier that has a name."""
        return list(self._hashes[tier])

    def check_integrity(self) -> None:
        """Asserts that hashes and blocks name each other one to one."""
        assert len(self._blocks) == sum(map(len, self._hashes.values()))
        for block_hash, block in self._blocks.items():
            assert self._hashes[block.tier].get(block.block_id) == block_hash
