"""What must hold after every call into the scheduler, found out without asking it.

Counts are taken anew from the block tables of all sequences; what a plan writes is compared with who held which block
when the plan before was made; what the prefix cache names is looked up in the worker's memory, and nothing may be named
but what some request's accepted tokens lead to. The scheduler's own `check_integrity` runs as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from typing import NamedTuple

from octavo_router.plan import Moves, StepPlan
from octavo_router.prefix_cache import Tier, chained_hash, root_hash
from octavo_router.results import Event, TokenSampled
from octavo_router.scheduler import Scheduler
from octavo_router.sequence import Sequence
from tests.simulator.ledger import Entry, Ledger
from tests.simulator.oracle import EMPTY, extend
from tests.simulator.worker import SimulatedWorker


class InvariantError(AssertionError):
    """Something does not hold that always must."""


class Prefix(NamedTuple):
    """The beginning of a sequence: the hash of its full blocks, the tokens behind them, the model's state there."""

    block_hash: bytes
    rest: tuple[int, ...]
    digest: int


class KnownContent:
    """What a hash may name: for every full block of every request's accepted tokens, the state that it ends with.

    prompts: the hashes of each request's prompt.
    """

    def __init__(self, block_size: int, model_digest: str) -> None:
        self.block_size = block_size
        self.model_digest = model_digest
        self.digests: dict[bytes, int] = {}
        self._owners: dict[bytes, tuple[str, int]] = {}
        self._samples: dict[int, list[Prefix]] = {}
        self.prompts: dict[int, list[bytes]] = {}

    def add(self, entry: Entry) -> None:
        """Takes in a request with what its caller has of it. Of a beam search, whatever it is going to visit."""
        request = entry.arrival.request
        root = root_hash(model_digest=self.model_digest, adapter="", cache_salt=request.cache_salt)
        hashes = self.prompts[entry.group.arrival] = []
        prompt = self._grow(Prefix(root, (), EMPTY), request.prompt_token_ids, request.cache_salt, hashes)
        if entry.arrival.visited is not None:
            places = [prompt]
            for parent, token_id in entry.arrival.visited:
                places.append(self._grow(places[parent], (token_id,), request.cache_salt))
            return
        self._samples[entry.group.arrival] = [self._grow(prompt, tokens, request.cache_salt) for tokens in entry.tokens]

    def grow(self, event: TokenSampled) -> None:
        """A sample gained a token."""
        group = event.sequence.group
        samples = self._samples[group.arrival]
        index = event.sequence.sample_index
        samples[index] = self._grow(samples[index], (event.token_id,), group.request.cache_salt)

    def _grow(self, prefix: Prefix, token_ids: Iterable[int], salt: str, hashes: list[bytes] | None = None) -> Prefix:
        block_hash, rest, digest = prefix
        tokens = list(rest)
        for token_id in token_ids:
            tokens.append(token_id)
            digest = extend(digest, token_id)
            if len(tokens) == self.block_size:
                block_hash = chained_hash(block_hash, tokens)
                tokens.clear()
                self.digests[block_hash] = digest
                if hashes is not None:
                    hashes.append(block_hash)
                if self._owners.setdefault(block_hash, (salt, digest)) != (salt, digest):
                    raise InvariantError("one hash names two contents, or content of two salts")
        return Prefix(block_hash, tuple(tokens), digest)


class Invariants:
    """Watches one scheduler over its sessions."""

    def __init__(self, scheduler: Scheduler, ledger: Ledger) -> None:
        self.scheduler = scheduler
        self._ledger = ledger
        self._worker: SimulatedWorker | None = None
        self._known = KnownContent(0, "")
        self._owners_before: dict[int, set[int]] = {}
        self._admitted: set[int] = set()
        self._num_preemptions = 0

    def begin_session(self, worker: SimulatedWorker) -> None:
        """A worker with empty memory is there."""
        limits = self.scheduler.limits
        self._worker = worker
        self._known = KnownContent(limits.block_size, limits.model_digest)
        for entry in self._ledger.open.values():
            self._known.add(entry)

    def end_session(self) -> None:
        """All memory is lost."""
        self._worker = None
        self._owners_before = {}

    def follow(self, entry: Entry) -> None:
        """A request was taken in."""
        self._known.add(entry)

    def accept(self, events: Iterable[Event]) -> None:
        """A result was taken in."""
        for event in events:
            if isinstance(event, TokenSampled):
                self._known.grow(event)

    # After every call

    def check(self) -> None:
        """Asserts that both tiers are counted right: used + cached + free = total."""
        scheduler = self.scheduler
        cache = scheduler.blocks.cache
        device_tables = [sequence.block_table for sequence in scheduler.running]
        host_tables = [sequence.host_table for sequence in scheduler.waiting if sequence.host_table]
        for tier, pool, tables in (
            (Tier.DEVICE, scheduler.blocks.device, device_tables),
            (Tier.HOST, scheduler.blocks.host, host_tables),
        ):
            held = set(chain.from_iterable(tables))
            num_cached = sum(block_id not in held for block_id in cache.named(tier))
            if pool.num_used != len(held):
                raise InvariantError(f"{pool.num_used} {tier.value} blocks count as used, tables hold {len(held)}")
            if pool.num_cached != num_cached:
                raise InvariantError(f"{pool.num_cached} {tier.value} blocks count as cached, hashes name {num_cached}")
            if len(held) + pool.num_free > pool.num_blocks:
                raise InvariantError(
                    f"{len(held)} {tier.value} blocks are used and {pool.num_free} free of {pool.num_blocks}"
                )

    def _check_references(self) -> None:
        """Asserts that every block counts as many references as tables hold it."""
        scheduler = self.scheduler
        for tier, pool, tables in (
            (Tier.DEVICE, scheduler.blocks.device, (sequence.block_table for sequence in scheduler.running)),
            (Tier.HOST, scheduler.blocks.host, (sequence.host_table for sequence in scheduler.waiting)),
        ):
            holders = Counter(chain.from_iterable(tables))
            for block_id in range(pool.num_blocks):
                if pool.ref_count(block_id) != holders[block_id]:
                    raise InvariantError(
                        f"{tier.value} block {block_id} counts {pool.ref_count(block_id)} references, "
                        f"{holders[block_id]} tables hold it"
                    )

    # After every plan

    def check_plan(self, plan: StepPlan) -> None:
        """Asserts that a plan writes only what one sequence alone holds and no hash names, and no block it frees."""
        blocks = self.scheduler.blocks
        size, holders = blocks.block_size, self._holders()
        tables = {sequence.sequence_id: sequence.block_table for sequence in self.scheduler.running}
        written = {*plan.moves.swap_in.target_block_ids, *plan.moves.copies.target_block_ids}
        for sequence_id, start, count in zip(plan.sequence_ids, plan.start_positions, plan.token_counts, strict=True):
            if sequence_id not in tables:
                raise InvariantError(f"sequence {sequence_id} is in plan {plan.step_seq} and not in the batch")
            for block_id in tables[sequence_id][start // size : -(-(start + count) // size)]:
                written.add(block_id)
                if holders[block_id] != {sequence_id}:
                    raise InvariantError(f"block {block_id} is written by {sequence_id}, {holders[block_id]} hold it")
                if blocks.cache.hash_of(Tier.DEVICE, block_id) is not None:
                    raise InvariantError(f"block {block_id} is written by {sequence_id}, and a hash names it")
        if blocks.enable_prefix_caching:
            self._check_computed_once(plan)
        owners = self._owners()
        for block_id in written:
            before = self._owners_before.get(block_id)
            if before and before.isdisjoint(owners.get(block_id, ())):
                raise InvariantError(f"block {block_id} is freed and used in plan {plan.step_seq}")
        self._owners_before = owners

    def check_turns(self) -> None:
        """Asserts of a plan that those who were admitted with it came before all who go on waiting: by priority, and
        within it by what their tenants were served. A preemption puts some back who were set aside before."""
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        admitted = {
            sequence.group: None
            for sequence in scheduler.running
            if sequence.group.arrival not in self._admitted and sequence.group.is_admitted
        }
        self._admitted.update(group.arrival for group in admitted)
        was_quiet, self._num_preemptions = self._num_preemptions == scheduler.num_preemptions, scheduler.num_preemptions
        if not admitted or not was_quiet or waiting.only is not None:
            return
        passed = [sequence for sequence in waiting if waiting._is_fresh(sequence)]
        last_of = {group.account: group for group in sorted(admitted, key=lambda group: group.sequences[0].order)}
        for account, group in last_of.items():
            if account is None:
                raise InvariantError(f"{group.request.request_id} runs without an account")
            num_before = account.num_served - (len(group.request.prompt_token_ids) - group.num_cached_tokens)
            for sequence in passed:
                other = sequence.group.account
                if sequence.priority < group.request.priority:
                    raise InvariantError(f"{group.request.request_id} passes one of a better priority")
                if sequence.priority == group.request.priority and (other is None or other.num_served < num_before):
                    raise InvariantError(f"{group.request.request_id} passes one whose tenant was served less")

    def _check_computed_once(self, plan: StepPlan) -> None:
        """Asserts that no block of a prompt is computed by two sequences in one plan, but for blocks that end with the
        last known token, which everybody computes, and for prompts that are computed for their log-probabilities."""
        size = self.scheduler.blocks.block_size
        sequences = {sequence.sequence_id: sequence for sequence in self.scheduler.running}
        computed: dict[bytes, int] = {}
        for sequence_id, start, count in zip(plan.sequence_ids, plan.start_positions, plan.token_counts, strict=True):
            sequence = sequences[sequence_id]
            if count == 1 or sequence.group.prompt_scores is not None:
                continue
            hashes = self._known.prompts[sequence.group.arrival]
            num_full = min(start + count, sequence.num_tokens - sequence.num_in_flight - 1) // size
            for block_hash in hashes[start // size : num_full]:
                other = computed.setdefault(block_hash, sequence_id)
                if other != sequence_id:
                    raise InvariantError(f"one block is computed by {other} and by {sequence_id}")

    def _holders(self) -> dict[int, set[int]]:
        """Who holds each device block."""
        holders: dict[int, set[int]] = {}
        for sequence in self.scheduler.running:
            for block_id in sequence.block_table:
                holders.setdefault(block_id, set()).add(sequence.sequence_id)
        return holders

    def _owners(self) -> dict[int, set[int]]:
        """Who may pass a device block on within one plan: a sequence to itself; a beam to any beam of its search, since
        forks give all of them their tables anew."""
        owners: dict[int, set[int]] = {}
        for sequence in self.scheduler.running:
            owner = sequence.sequence_id if sequence.group.beams is None else -sequence.group.arrival
            for block_id in sequence.block_table:
                owners.setdefault(block_id, set()).add(owner)
        return owners

    # After every step

    def check_step(self, unexecuted: Iterable[StepPlan]) -> None:
        """Asserts the scheduler's own invariants, and that every hash names a block with its content. unexecuted: plans
        that the worker has not carried out, whose moves are going to."""
        self.scheduler.check_integrity()
        self._check_references()
        if self._worker is None:
            return
        cache, digests = self.scheduler.blocks.cache, self._known.digests
        plans = [plan.moves for plan in unexecuted if len(plan.moves)]
        for tier, memory in ((Tier.DEVICE, self._worker.device), (Tier.HOST, self._worker.host)):
            for block_id in cache.named(tier):
                block_hash = cache.hash_of(tier, block_id)
                right = digests.get(block_hash) if block_hash is not None else None
                if right is None:
                    raise InvariantError(f"a hash names {tier.value} block {block_id}, and no request has such tokens")
                if memory.last_digest(block_id) != right and self._digest_to_come(tier, block_id, plans) != right:
                    raise InvariantError(f"a hash names {tier.value} block {block_id}, which holds something else")

    def _digest_to_come(self, tier: Tier, block_id: int, plans: list[Moves]) -> int:
        """What a block ends with once these moves are done: their last step first, back to where it is now."""
        assert self._worker is not None
        for moves in reversed(plans):
            for step, source, target in (
                (moves.copies, Tier.DEVICE, Tier.DEVICE),
                (moves.swap_in, Tier.HOST, Tier.DEVICE),
                (moves.swap_out, Tier.DEVICE, Tier.HOST),
            ):
                if tier is target and block_id in step.target_block_ids:
                    tier, block_id = source, step.source_block_ids[step.target_block_ids.index(block_id)]
        memory = self._worker.device if tier is Tier.DEVICE else self._worker.host
        return memory.last_digest(block_id)

    def check_flushed(self) -> None:
        """Asserts that nothing is cached."""
        blocks = self.scheduler.blocks
        if len(blocks.cache) or blocks.device.num_cached or blocks.host.num_cached:
            raise InvariantError("something is cached in a cache that was flushed")

    # Around calls without effect, and at the end

    def fingerprint(self) -> object:
        """Equal before and after a call that had no effect."""
        scheduler = self.scheduler
        device, host = scheduler.blocks.device, scheduler.blocks.host
        return (
            (scheduler.epoch, scheduler.last_step_seq, scheduler.num_requests, len(scheduler.in_flight)),
            (device.num_used, device.num_free, device.num_kept, host.num_used, host.num_free, host.num_kept),
            sorted(_state(sequence) for sequence in [*scheduler.running, *scheduler.waiting]),
        )

    def check_end(self) -> None:
        """Asserts that nothing is queued, held or on its way, and that nothing is left of the cache once flushed."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        left = [*scheduler.running, *scheduler.waiting]
        if left or scheduler.num_requests or scheduler.oldest_in_flight is not None:
            raise InvariantError(f"{len(left)} sequences of {scheduler.num_requests} requests are left at the end")
        if blocks.cache.computing:
            raise InvariantError(f"{len(blocks.cache.computing)} hashes are still being computed at the end")
        for _ in range(2):
            if scheduler.plan(0.0) is not None:
                raise InvariantError("a plan is made at the end")
        for name, pool in (("device", blocks.device), ("host", blocks.host)):
            if pool.num_used or pool.num_free != pool.num_blocks:
                raise InvariantError(f"{pool.num_blocks - pool.num_free} {name} blocks leaked")
        num_cached = blocks.device.num_cached + blocks.host.num_cached
        if scheduler.flush_prefix_cache() != num_cached:
            raise InvariantError("flushing the prefix cache freed another number of blocks than were cached")
        self.check_flushed()
        if blocks.device.num_blank != blocks.device.num_blocks or blocks.host.num_blank != blocks.host.num_blocks:
            raise InvariantError("blocks are not blank behind a flush at the end")
        scheduler.check_integrity()

    def totals(self) -> dict[str, int]:
        """The scheduler's own counters."""
        counts = self.scheduler.counts
        return {
            entry.name.removeprefix("num_").replace("_", " "): getattr(counts, entry.name) for entry in fields(counts)
        }


def _state(sequence: Sequence) -> tuple[object, ...]:
    return (
        sequence.sequence_id,
        sequence.status.value,
        tuple(sequence.block_table),
        tuple(sequence.host_table),
        len(sequence.output_token_ids),
        sequence.num_planned,
        sequence.num_in_flight,
    )
