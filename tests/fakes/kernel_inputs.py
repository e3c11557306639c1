"""Inputs of the kernels: rows of a batch whose KV lies in shuffled blocks, surrounded by poison."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from server.kernels import reference


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What both implementations of paged attention take.

    Attributes:
        layer: NaN wherever no row has a right to read, so that reading there shows in the output.
        clean_layer: the same with 0 for NaN, for the twin, which gathers whole blocks.
    """

    query: Tensor
    layer: Tensor
    clean_layer: Tensor
    first_token: Tensor
    num_query: Tensor
    slots: Tensor
    positions: Tensor
    block_table: Tensor
    max_num_query: int
    context_bound: int

    def rows(self) -> dict[str, Any]:
        """The arguments that describe rows."""
        names = ("first_token", "num_query", "slots", "positions", "block_table")
        return {name: getattr(self, name) for name in names}

    def expected(self, scaling: float, dtype: torch.dtype | None = None, **options: object) -> Tensor:
        """What the twin computes, in another type if one is given; NaN for tokens of no row."""
        query = self.query if dtype is None else self.query.to(dtype)
        return reference.paged_attention(query, self.clean_layer, **self.rows(), scaling=scaling, **options)  # type: ignore[arg-type]


def starting_at(inputs: AttentionInputs, starts: Sequence[int]) -> tuple[AttentionInputs, Tensor]:
    """The same rows, each seeing nothing below its start: NaN there in the layer, and `starts` by slot."""
    block_size = inputs.layer.shape[2]
    by_slot = torch.zeros(len(inputs.block_table), dtype=torch.int64, device=inputs.layer.device)
    layer = inputs.layer.float()
    for slot, start in zip(inputs.slots.tolist(), starts, strict=True):
        by_slot[slot] = start
        place = torch.arange(min(start, inputs.context_bound - 1), device=layer.device)
        place = place[place // block_size < inputs.block_table.shape[1]]
        blocks = inputs.block_table[slot, place // block_size].long()
        layer[blocks, :, place % block_size] = torch.nan
    return replace(inputs, layer=layer.to(inputs.layer.dtype)), by_slot


def attention_inputs(
    rows: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    padding: int = 0,
) -> AttentionInputs:
    """Random inputs for rows of (context, query tokens at its end); the layer is one of two, hence strided.

    Args: padding: query tokens at position 0 behind each row's own, counted in its num_query.
    """
    generator = torch.Generator(device).manual_seed(len(rows) * heads + head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    needed = [-(-context // block_size) for context, _ in rows]
    order = (1 + torch.randperm(sum(needed), generator=generator, device=device)).tolist()
    num_slots = len(rows) + 2
    slots = torch.randperm(num_slots, generator=generator, device=device)[: len(rows)]
    block_table = torch.zeros(num_slots, max(needed), dtype=torch.int32, device=device)
    kv = torch.full((sum(needed) + 1, 2, kv_heads, block_size, 2 * head_dim), torch.nan, device=device)
    layer = kv[:, 1]
    positions: list[int] = []
    for (context, num_new), count, slot in zip(rows, needed, slots.tolist(), strict=True):
        blocks = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64, device=device)
        block_table[slot, :count] = blocks
        place = torch.arange(context, device=device)
        layer[blocks[place // block_size], :, place % block_size] = random(context, kv_heads, 2 * head_dim)
        positions += [*range(context - num_new, context), *[0] * padding]
    num_query = torch.tensor([count + padding if count else 0 for _, count in rows], device=device)
    lengths = torch.tensor([0, *(count + padding for _, count in rows)], device=device)
    kv = kv.to(kv_dtype or dtype)
    return AttentionInputs(
        query=random(len(positions), heads, head_dim).to(dtype),
        layer=kv[:, 1],
        clean_layer=torch.nan_to_num(kv[:, 1].float(), nan=0.0).to(kv.dtype),
        first_token=lengths.cumsum(0)[:-1].contiguous(),
        num_query=num_query,
        slots=slots,
        positions=torch.tensor(positions, device=device),
        block_table=block_table,
        max_num_query=int(num_query.max()),
        context_bound=max(context for context, _ in rows) + 1,
    )
