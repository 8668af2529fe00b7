"""Would the random search of `test_block_manager.py` notice? The block manager is broken on purpose, one way at a time,
and the search has to find a sequence of calls that shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from octavo_router.block_manager import BlockManager
from octavo_router.block_pool import BlockPool
from octavo_router.plan import BlockMoves, Moves
from tests.router.test_block_manager import BlockManagerMachine

Patch = Callable[[pytest.MonkeyPatch], None]

SEARCH = settings(
    max_examples=5000,
    stateful_step_count=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
"""Always the same examples, and none made smaller: that something is found is enough."""


def fork_shares_what_it_writes_to(patch: pytest.MonkeyPatch) -> None:
    def fork(blocks: BlockManager, table: list[int], num_tokens: int, *, onto: int | None = None) -> list[int]:
        return blocks.share(table[: blocks.num_blocks(num_tokens)])

    patch.setattr(BlockManager, "fork", fork)


def _without(patch: pytest.MonkeyPatch, name: str) -> None:
    original = BlockManager.end_plan

    def end_plan(blocks: BlockManager) -> Moves:
        moves = original(blocks)
        setattr(moves, name, BlockMoves())
        return moves

    patch.setattr(BlockManager, "end_plan", end_plan)


def copies_are_lost(patch: pytest.MonkeyPatch) -> None:
    _without(patch, "copies")


def swaps_out_are_lost(patch: pytest.MonkeyPatch) -> None:
    _without(patch, "swap_out")


def swaps_in_are_lost(patch: pytest.MonkeyPatch) -> None:
    _without(patch, "swap_in")


def last_block_is_not_released(patch: pytest.MonkeyPatch) -> None:
    def release(blocks: BlockManager, table: list[int]) -> None:
        blocks.device.release(table[:-1])
        table.clear()

    patch.setattr(BlockManager, "release", release)


def host_table_is_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "release_host", lambda blocks, table: table.clear())


def released_blocks_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.release

    def release(pool: BlockPool, table: list[int]) -> None:
        original(pool, table)
        pool._sent.update(pool._unsent)
        pool._unsent.clear()
        pool.begin_plan()

    patch.setattr(BlockPool, "release", release)


def shared_blocks_are_swapped_in_with_one_reference(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager._bring_back

    def bring_back(blocks: BlockManager, source: int, *, num_references: int) -> int:
        target = original(blocks, source, num_references=num_references)
        if num_references > 1:
            blocks.device.release([target])
        return target

    patch.setattr(BlockManager, "_bring_back", bring_back)


def flush_forgets_the_device_alone(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.flush

    def flush(blocks: BlockManager) -> int:
        host, blocks.host = blocks.host, BlockPool(0)
        try:
            return original(blocks)
        finally:
            blocks.host = host

    patch.setattr(BlockManager, "flush", flush)


MUTATIONS: list[Patch] = [
    fork_shares_what_it_writes_to,
    copies_are_lost,
    swaps_out_are_lost,
    swaps_in_are_lost,
    last_block_is_not_released,
    host_table_is_not_released,
    released_blocks_are_free_at_once,
    shared_blocks_are_swapped_in_with_one_reference,
    flush_forgets_the_device_alone,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_block_manager_is_found_out(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, StopIteration)):
        run_state_machine_as_test(BlockManagerMachine, settings=SEARCH)
