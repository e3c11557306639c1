"""Attention over paged KV, registered with transformers under a name of its own.

No mask function is registered under that name, so transformers builds no mask: causality and
sliding windows are decided here, from positions.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from server.kernels import cpu_attention
from server.kernels.reference import attention, attention_mask
from server.model.cache import cache_root

ATTENTION_NAME = "outrider_paged"
CPU_ATTENTION_NAME = "outrider_paged_cpu"


def attention_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What a model is to be loaded with: C++ operators, built here if need be, or plain tensor operations."""
    has_operators = (
        device.type == "cpu"
        and cpu_attention.supports(dtype, head_dim)
        and cpu_attention.load(cache_root() / "kernels")
    )
    return CPU_ATTENTION_NAME if has_operators else ATTENTION_NAME


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows with the same number of query tokens, adjacent in the flat tokens of a step.

    Attributes:
        first_token: where the group starts in the flat tokens.
        block_table: [num_rows, num_blocks] int64, covering every position its rows may read.
        positions: [num_rows, num_query] int64, of the query tokens.
    """

    first_token: int
    num_rows: int
    num_query: int
    block_table: Tensor
    positions: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, block_size: int, sliding_window: int | None) -> Tensor:
        """[num_rows, 1, num_query, num_blocks * block_size] bool, made once per step and window."""
        if sliding_window not in self.masks:
            num_positions = self.block_table.shape[1] * block_size
            self.masks[sliding_window] = attention_mask(self.positions, num_positions, sliding_window)
        return self.masks[sliding_window]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention needs to know about a step; passed through the model as one keyword.

    Attributes:
        kv: [num_blocks, layers, kv_heads, block_size, 2 * head_dim], K then V in the last dimension.
        write_blocks, write_offsets: [num_tokens] int64, where each token's K and V go; block 0 for padding.
        positions: [num_tokens] int64, 0 for padding.
        first_token, num_query: [num_rows] int64, the flat tokens of each row, padding behind them left out.
        slots: [num_rows] int64, each row's place in `block_table`.
        block_table: [slots, blocks] int32 or int64.
        groups: the same rows, as plain tensor operations take them.
    """

    kv: Tensor
    write_blocks: Tensor
    write_offsets: Tensor
    positions: Tensor
    first_token: Tensor
    num_query: Tensor
    slots: Tensor
    block_table: Tensor
    groups: tuple[AttentionGroup, ...]


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_step: AttentionStep,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write the step's K and V, then attend each row to its own blocks.

    Args:
        query: [1, heads, num_tokens, head_dim]; key, value: [1, kv_heads, num_tokens, head_dim].
        attention_mask: always None.
        s_aux: [heads] sink logits.
    Returns: [1, num_tokens, heads, head_dim], and no weights.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]  # torch types every attribute as a tensor or module
    layer = attention_step.kv[:, layer_idx]
    write_kv(layer, key[0], value[0], attention_step)
    num_heads, num_tokens, head_dim = query.shape[1:]
    output = query.new_empty(num_tokens, num_heads, head_dim)
    for group in attention_step.groups:
        tokens = slice(group.first_token, group.first_token + group.num_rows * group.num_query)
        rows = query[0, :, tokens].unflatten(1, (group.num_rows, group.num_query)).transpose(0, 1)
        keys, values = read_kv(layer, group.block_table)
        mask = group.mask(layer.shape[2], sliding_window)
        attended = attention(rows, keys, values, mask, scaling, softcap=softcap, sinks=s_aux)
        output[tokens] = attended.transpose(1, 2).flatten(0, 1)
    return output[None], None


def paged_attention_cpu(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_step: AttentionStep,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same as paged_attention, by the C++ operators."""
    step = attention_step
    layer_idx: int = module.layer_idx  # type: ignore[assignment]  # see above
    layer = step.kv[:, layer_idx]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    cpu_attention.write_kv(layer, key, value, step.write_blocks, step.write_offsets)
    output = cpu_attention.paged_attention(
        query,
        layer,
        step.first_token,
        step.num_query,
        step.slots,
        step.positions,
        step.block_table,
        scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return output[None], None


def write_kv(layer: Tensor, key: Tensor, value: Tensor, step: AttentionStep) -> None:
    """Store [kv_heads, num_tokens, head_dim] keys and values in a layer's blocks.

    NaN and infinity are stored as 0: a masked position has weight 0, and 0 times NaN would reach
    whoever reads the block. The request they come from is ended by the runner all the same.
    """
    kv = torch.cat((key, value), dim=-1).transpose(0, 1)
    kv = torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0)
    layer[step.write_blocks, :, step.write_offsets] = kv.to(layer.dtype)


def read_kv(layer: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values, each [num_rows, kv_heads, num_blocks * block_size, head_dim]."""
    gathered = layer[block_table].transpose(1, 2).flatten(2, 3)
    return gathered.chunk(2, dim=-1)  # type: ignore[return-value]


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionInterface.register(CPU_ATTENTION_NAME, paged_attention_cpu)
