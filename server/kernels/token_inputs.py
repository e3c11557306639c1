"""What a step's tokens are, and where their keys and values go: looked up in the batch state, in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from server.kernels.jit import ceil_div, jit, tl

BLOCK = 128


class TokenInputs(NamedTuple):
    """Of T flat tokens; 0 and False for padding.

    Attributes:
        positions: [T] int64, each in its sequence. is_real: [T] bool, no padding. token_ids: [T] int32.
        write_blocks, write_offsets: [T] int64, the block of its keys and values and the place there.
    """

    positions: Tensor
    is_real: Tensor
    token_ids: Tensor
    write_blocks: Tensor
    write_offsets: Tensor


@jit(unspecialised=("slots_ptr", "offsets_ptr", "num_tokens"))
def _look_up_kernel(
    slots_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_computed_ptr: tl.tensor,
    num_known_ptr: tl.tensor,
    num_drafts_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    is_real_ptr: tl.tensor,
    found_ptr: tl.tensor,
    write_blocks_ptr: tl.tensor,
    write_offsets_ptr: tl.tensor,
    num_tokens: int,
    stride_tokens: int,
    stride_table: int,
    block_size: int,
    BLOCK: tl.constexpr,
) -> None:
    """Some of the tokens."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = i < num_tokens
    slot = tl.load(slots_ptr + i, mask=is_token, other=0)
    position = tl.load(num_computed_ptr + slot) + tl.load(offsets_ptr + i, mask=is_token, other=0)
    is_real = position < tl.load(num_known_ptr + slot) + tl.load(num_drafts_ptr + slot)
    position = tl.where(is_real, position, 0)  # padding may lie beyond what the model can embed
    block = tl.load(table_ptr + slot * stride_table + position // block_size).to(tl.int64)
    tl.store(positions_ptr + i, position, mask=is_token)
    tl.store(is_real_ptr + i, is_real.to(tl.int8), mask=is_token)
    tl.store(found_ptr + i, tl.load(token_ids_ptr + slot * stride_tokens + position), mask=is_token)
    tl.store(write_blocks_ptr + i, tl.where(is_real, block, 0), mask=is_token)
    tl.store(write_offsets_ptr + i, position % block_size, mask=is_token)


def look_up_tokens(
    slots: Tensor,
    offsets: Tensor,
    num_computed: Tensor,
    num_known: Tensor,
    num_drafts: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_size: int,
) -> TokenInputs:
    """Find T tokens, each by its sequence's slot and its place behind what is computed.

    Args:
        slots, offsets: [T] int64, contiguous; an offset beyond what a sequence has is padding.
        num_computed, num_known, num_drafts: [S] int64, contiguous. token_ids: [S, width] int32.
        block_table: [S, max_blocks] int32.

    Twin: reference.look_up_tokens.
    """
    columns = num_computed, num_known, num_drafts
    return TokenInputs(*_look_up(slots, offsets, *columns, token_ids, block_table, block_size))


def _look_up(
    slots: Tensor,
    offsets: Tensor,
    num_computed: Tensor,
    num_known: Tensor,
    num_drafts: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of TokenInputs."""
    num_tokens = slots.shape[0]
    positions, write_blocks, write_offsets = (torch.empty_like(slots) for _ in range(3))
    is_real = torch.empty(num_tokens, dtype=torch.int8, device=slots.device)
    found = torch.empty(num_tokens, dtype=token_ids.dtype, device=slots.device)
    _look_up_kernel[(ceil_div(num_tokens, BLOCK),)](
        slots,
        offsets,
        num_computed,
        num_known,
        num_drafts,
        token_ids,
        block_table,
        positions,
        is_real,
        found,
        write_blocks,
        write_offsets,
        num_tokens,
        token_ids.stride(0),
        block_table.stride(0),
        block_size,
        BLOCK=BLOCK,
    )
    return positions, is_real.view(torch.bool), found, write_blocks, write_offsets
