"""A decode step's inputs out of what the device remembers: last tokens, block tables, and what is new in the plan.

One program a lane. It reads no entry of a block table that it writes: an entry comes from the state or from the plan.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.decode_state import DecodeColumns, DecodeInputs, DecodeState
from octavo_kernels.triton.checks import check_column, refuse
from octavo_kernels.triton.variant import Variant

_BLOCK = 256


@triton.jit
def _advance_decode_kernel(
    last_tokens_ptr,  # (rows,)
    state_tables_ptr,  # (rows, max_blocks), mutated
    state_stride,
    rows_ptr,  # the columns of the plan: (lanes,), new_starts (lanes + 1,), new_blocks (n,)
    positions_ptr,
    token_ids_ptr,
    num_known_ptr,
    new_starts_ptr,
    new_blocks_ptr,
    input_tokens_ptr,  # the inputs, mutated: (lanes,), tables (lanes, max_blocks)
    input_positions_ptr,
    slots_ptr,
    context_lens_ptr,
    input_tables_ptr,
    input_stride,
    scratch_block,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0)
    row = tl.load(rows_ptr + lane)
    is_padding = row < 0
    state_row = state_tables_ptr + tl.where(is_padding, 0, row).to(tl.int64) * state_stride
    input_row = input_tables_ptr + lane.to(tl.int64) * input_stride
    position = tl.where(is_padding, 0, tl.load(positions_ptr + lane))
    known = tl.where(is_padding, 0, tl.load(num_known_ptr + lane))
    new_start = tl.load(new_starts_ptr + lane)
    count = tl.where(is_padding, 0, known + tl.load(new_starts_ptr + lane + 1) - new_start)

    token = tl.load(token_ids_ptr + lane)
    is_from_state = (token < 0) & (row >= 0)
    last = tl.load(last_tokens_ptr + row, mask=is_from_state, other=0)
    tl.store(input_tokens_ptr + lane, tl.where(is_padding, 0, tl.where(is_from_state, last, token)))
    tl.store(input_positions_ptr + lane, position)
    tl.store(context_lens_ptr + lane, position + 1)

    index = position // BLOCK_SIZE
    is_known = index < known
    old = tl.load(state_row + index, mask=is_known, other=0)
    new = tl.load(new_blocks_ptr + new_start + index - known, mask=(row >= 0) & (index >= known), other=0)
    block = tl.where(is_padding, scratch_block, tl.where(is_known, old, new))
    offset = tl.where(is_padding, lane % BLOCK_SIZE, position % BLOCK_SIZE)
    tl.store(slots_ptr + lane, block * BLOCK_SIZE + offset)
    tl.store(input_row, scratch_block, mask=is_padding)

    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_new = (at >= known) & (at < count)
        olds = tl.load(state_row + at, mask=at < known, other=0)
        news = tl.load(new_blocks_ptr + new_start + at - known, mask=is_new, other=0)
        tl.store(state_row + at, news, mask=is_new)
        tl.store(input_row + at, tl.where(is_new, news, olds), mask=at < count)


def advance_decode(state: DecodeState, columns: DecodeColumns, inputs: DecodeInputs) -> None:
    """`Backend.advance_decode`, as one launch."""
    lanes = columns.rows.shape[0]
    int32 = columns.rows.dtype
    for name in ("rows", "positions", "token_ids", "num_known"):
        check_column(name, getattr(columns, name), lanes, int32)
    check_column("new_starts", columns.new_starts, lanes + 1, int32)
    _check_tables("state.block_tables", state.block_tables)
    _check_tables("inputs.block_tables", inputs.block_tables)
    if inputs.token_ids.shape[0] < lanes:
        refuse("inputs.token_ids", inputs.token_ids, f"at least {lanes} lanes are needed")
    _advance_decode_kernel[(lanes,)](
        state.last_tokens, state.block_tables, state.block_tables.stride(0),
        columns.rows, columns.positions, columns.token_ids, columns.num_known, columns.new_starts, columns.new_blocks,
        inputs.token_ids, inputs.positions, inputs.slots, inputs.context_lens,
        inputs.block_tables, inputs.block_tables.stride(0), inputs.scratch_block,
        BLOCK_SIZE=inputs.block_size, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def variants() -> list[Variant]:
    """The one form, for blocks of 16."""
    names = _advance_decode_kernel.arg_names
    constants = {"BLOCK_SIZE": 16, "BLOCK": _BLOCK}
    signature = {name: "*i32" if name.endswith("_ptr") else "i32" for name in names if name not in constants}
    return [
        Variant(
            "blocks of 16", _advance_decode_kernel, signature, constants,
            unaligned=frozenset({"state_stride", "input_stride", "scratch_block"}),
        )
    ]  # fmt: skip


def _check_tables(name: str, tables: Tensor) -> None:
    if tables.dim() != 2 or tables.stride(1) != 1:
        refuse(name, tables, "(rows, max_blocks), rows contiguous, is needed")
