"""What a starting sequence need not compute: blocks of its own group, blocks in the prefix cache, and blocks that
another sequence is computing right now.

    find --> Reuse --> take          the table that it starts with
         --> a key to wait for       somebody computes what it needs
    announce, publish, withdraw      what running sequences are about to compute, and have computed

Each block of a request's prompt is hashed once a session, when it is first asked for; each block of output when it is
full.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo_router.block_manager import BlockManager
from octavo_router.draft import Draft
from octavo_router.prefix_cache import CachedBlock, Tier, chained_hash, root_hash
from octavo_router.queues import WaitingQueue, WakeKey
from octavo_router.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Reuse:
    """The first num_tokens tokens of a sequence are there: in a member of its group, from which it forks, or in cached
    blocks.

    num_blocks: how many blocks they are in; num_free: free blocks that it takes to have them.
    """

    num_tokens: int
    num_blocks: int
    num_free: int
    parent: Sequence | None
    cached: list[CachedBlock]

    @property
    def num_host_blocks(self) -> int:
        """How many of the cached blocks are on the host."""
        return sum(block.tier is Tier.HOST for block in self.cached)


class PrefixSharing:
    """The sharing among the sequences of one session. Wakes those of the waiting who wait for a hash."""

    def __init__(self, blocks: BlockManager, waiting: WaitingQueue, *, model_digest: str) -> None:
        self._blocks = blocks
        self._waiting = waiting
        self._model_digest = model_digest

    def find(self, sequence: Sequence, draft: Draft) -> Reuse | WakeKey:
        """The most that the sequence can start with, or what it has to wait for. Its last token is left to compute.

        Of its group it takes the prompt, as soon as an earlier plan computes it to the end. A prompt whose
        log-probabilities are asked for is computed. Nothing is taken yet.
        """
        block_size = self._blocks.block_size
        most = sequence.num_tokens - 1
        parent, num_forked = None, 0
        if sequence.group.num_running:
            num_forked = min(len(sequence.prompt_token_ids), most)
            running = sequence.group.running
            parent = next((member for member in running if draft.num_planned_before(member) >= num_forked), None)
            if parent is None:
                return running[0].sequence_id
        cached: list[CachedBlock] = []
        if self._blocks.enable_prefix_caching:
            scores = sequence.group.prompt_scores
            most_cached = most if scores is None else scores.num_reusable(most)
            cache, num_full = self._blocks.cache, most_cached // block_size
            block_hashes = self.block_hashes(sequence, num_full)
            cached = cache.match(block_hashes, num_full)
            num_awaited = len(cached)
            while num_awaited < num_full and block_hashes[num_awaited] in cache.computing:
                num_awaited += 1
            if num_awaited > len(cached) and num_awaited * block_size > num_forked:
                return block_hashes[num_awaited - 1]
        if parent is not None and num_forked >= len(cached) * block_size:
            num_copied = num_forked % block_size > 0
            return Reuse(num_forked, self._blocks.num_blocks(num_forked), num_copied, parent, [])
        return Reuse(len(cached) * block_size, len(cached), self._blocks.num_needed(cached), None, cached)

    def take(self, sequence: Sequence, reuse: Reuse) -> None:
        """Gives a sequence that starts the table of what it need not compute."""
        assert not sequence.block_table
        if reuse.parent is not None:
            sequence.block_table = self._blocks.fork(reuse.parent.block_table, reuse.num_tokens)
        else:
            sequence.block_table = self._blocks.take_cached(reuse.cached)
        sequence.num_planned = sequence.num_computed = reuse.num_tokens
        sequence.num_published = reuse.num_tokens // self._blocks.block_size
        self.announce(sequence)

    def announce(self, sequence: Sequence) -> None:
        """The sequence is going to compute the full blocks of its known tokens that it does not have."""
        if not self._blocks.enable_prefix_caching:
            return
        num_full = sequence.num_tokens // self._blocks.block_size
        if sequence.num_published < num_full:
            for block_hash in self.block_hashes(sequence, num_full)[sequence.num_published :]:
                self._blocks.cache.computing.setdefault(block_hash, sequence.sequence_id)

    def publish(self, sequence: Sequence) -> None:
        """Others find the full blocks whose computing was accepted."""
        num_full = sequence.num_computed // self._blocks.block_size
        if sequence.num_published == num_full or not self._blocks.enable_prefix_caching:
            return
        block_hashes = self.block_hashes(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self._blocks.publish(sequence.block_table[index], block_hashes[index])
            self._retract(sequence, block_hashes[index])
        sequence.num_published = num_full

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence computes nothing more: who waits for it goes on by itself."""
        for block_hash in sequence.block_hashes[sequence.num_published :]:
            self._retract(sequence, block_hash)
        self._waiting.wake(sequence.sequence_id)

    def block_hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Hashes of the sequence's first full blocks: at least so many, whose tokens must be known."""
        block_hashes = sequence.block_hashes
        if len(block_hashes) < num_blocks:
            num_prompt_blocks = len(sequence.prompt_token_ids) // self._blocks.block_size
            prompt_hashes = sequence.group.prompt_hashes
            self._extend(prompt_hashes, sequence, min(num_blocks, num_prompt_blocks))
            block_hashes += prompt_hashes[len(block_hashes) :]
            self._extend(block_hashes, sequence, num_blocks)
        return block_hashes

    def _extend(self, block_hashes: list[bytes], sequence: Sequence, num_blocks: int) -> None:
        size = self._blocks.block_size
        if len(block_hashes) >= num_blocks:
            return
        if block_hashes:
            parent = block_hashes[-1]
        else:
            salt = sequence.group.request.cache_salt
            parent = root_hash(model_digest=self._model_digest, adapter="", cache_salt=salt)
        for index in range(len(block_hashes), num_blocks):
            parent = chained_hash(parent, sequence.tokens(index * size, (index + 1) * size))
            block_hashes.append(parent)

    def _retract(self, sequence: Sequence, block_hash: bytes) -> None:
        """The block is computed, or will not be."""
        computing = self._blocks.cache.computing
        if computing.get(block_hash) == sequence.sequence_id:
            del computing[block_hash]
            self._waiting.wake(block_hash)
