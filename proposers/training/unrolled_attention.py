"""Attention of a head that runs over its own drafts, for all places of a text at a time.

A draft model that starts behind each place of a text makes, in pass i, the draft that is i places behind its start:

    pass 0   the pair (token p, hidden state of the target before it) sits in slot p
    pass i   the pair (token p, what pass i - 1 made of slot p - 1) would take slot p, i slots behind the start p - i

What pass i sees at slot p is what is in the K and V of a server at that moment: pass 0 up to the start p - i, then one
slot of each later pass, pass j in slot p - i + j. The first token of a text has no pair: nobody sees slot 0.

Source: the training-time test of Li et al. 2025, arXiv:2503.01840.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from proposers.training.packing import PADDING, PackedRows

UNROLLED_ATTENTION_NAME = "outrider_unrolled"


def shift(values: Tensor, by: int, dim: int) -> Tensor:
    """Move values towards the end, so that slot p has what slot p - by had; the first ones are 0."""
    if by == 0:
        return values
    length = values.shape[dim]
    moved = values.narrow(dim, 0, length - by)
    empty = torch.zeros_like(values.narrow(dim, 0, by))
    return torch.cat((empty, moved), dim=dim)


class Unrolling:
    """K and V of the passes so far; one for each time that a head is unrolled over rows.

    Attributes:
        index: of the pass that runs; whoever runs it counts on.
    """

    def __init__(self, rows: PackedRows) -> None:
        self.index = 0
        places = torch.arange(rows.row_length, device=rows.documents.device)
        is_same = (rows.documents[:, :, None] == rows.documents[:, None, :]) & (rows.documents != PADDING)[:, None, :]
        self._has_pair = is_same & (rows.positions >= 1)[:, None, :]
        self._distance = places[:, None] - places
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def first_mask(self) -> Tensor:
        """[B, 1, L, L] bool: the slots of pass 0 that the running pass sees. In pass 0 every slot sees itself."""
        sees = self._has_pair & (self._distance >= self.index)
        return (sees if self.index else sees | (self._distance == 0))[:, None]

    def remember(self, layer: int, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Take in [B, heads, L, head_dim] of the running pass. Returns: those of a layer, pass by pass."""
        passes = self._passes.setdefault(layer, [])
        assert len(passes) == self.index, "each layer runs once in each pass"
        passes.append((key, value))
        return passes


def unrolled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    unrolling: Unrolling,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query [B, heads, L, head_dim], key and value [B, kv_heads, L, head_dim] -> [B, L, heads, head_dim].

    Later passes are one slot for each query, so their scores are sums over heads' dimensions, not products of rows.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]  # torch types attributes as modules and tensors
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    (first_key, first_value), *later = unrolling.remember(layer, key, value)
    scores = (query @ first_key.transpose(-1, -2)).float() * scaling
    scores = scores.masked_fill(~unrolling.first_mask(), -torch.inf)
    # Pass j sits in slot p - i + j of pass i's query p.
    moved = [
        (shift(past_key, unrolling.index - j, 2), shift(past_value, unrolling.index - j, 2))
        for j, (past_key, past_value) in enumerate(later, 1)
    ]
    single = [(query * past_key).float().sum(-1, keepdim=True) * scaling for past_key, _ in moved]
    weights = torch.cat([scores, *single], dim=-1).softmax(-1).to(value.dtype)
    length = first_key.shape[2]
    mixed = weights[..., :length] @ first_value
    for index, (_key, past_value) in enumerate(moved, length):
        mixed = mixed + weights[..., index, None] * past_value
    return mixed.transpose(1, 2), None


AttentionInterface.register(UNROLLED_ATTENTION_NAME, unrolled_attention)
