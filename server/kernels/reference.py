"""Eager twins of the kernels: what each must compute, in plain tensor operations."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from server.kernels.token_inputs import TokenInputs


def attention_mask(
    positions: Tensor, num_positions: int, sliding_window: int | None, starts: Tensor | None = None
) -> Tensor:
    """Which positions each query token sees: itself and those before it, within the window, from its row's start on.

    Args:
        positions: [num_rows, num_query] int64. sliding_window: positions seen, itself included; None sees all.
        starts: [num_rows] int64; None is 0.

    Returns: [num_rows, 1, num_query, num_positions] bool.
    """
    query = positions[:, None, :, None]
    key = torch.arange(num_positions, device=positions.device)
    mask = key <= query
    if sliding_window is not None:
        mask &= key > query - sliding_window
    if starts is not None:
        mask &= key >= starts[:, None, None, None]
    return mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention with an explicit mask.

    Args:
        query: [num_rows, heads, num_query, head_dim]; key, value: [num_rows, kv_heads, positions, head_dim].
        mask: [num_rows, 1, num_query, positions] bool.
        softcap: logits become softcap * tanh(logits / softcap). sinks: [heads], a logit without a value.
    Returns: [num_rows, heads, num_query, head_dim], 0 for a query that sees nothing.
    """
    return _attend(query, key, value, mask, scaling, softcap, sinks).masked_fill(~mask.any(-1, keepdim=True), 0.0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Anything for a query that sees nothing."""
    key, value = key.to(query.dtype), value.to(query.dtype)
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    num_groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(num_groups, 1), value.repeat_interleave(num_groups, 1)
    logits = (query @ key.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink_column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sink_column), dim=-1)
    weights = logits.softmax(-1)[..., : mask.shape[-1]]
    return weights.to(value.dtype) @ value


def paged_attention(
    query: Tensor,
    layer: Tensor,
    first_token: Tensor,
    num_query: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Each row's tokens against its own blocks; arguments as in paged_attention.paged_attention.

    Returns: [T, heads, head_dim], NaN for tokens of no row. Reads lengths on the host.
    """
    output = torch.full_like(query, torch.nan)
    for first, count, slot in zip(first_token.tolist(), num_query.tolist(), slots.tolist(), strict=True):
        if count == 0:
            continue
        tokens = slice(first, first + count)
        position = positions[tokens].clamp(min=int(positions[first]))
        num_blocks = int(position.max()) // layer.shape[2] + 1
        blocks = layer[block_table[slot, :num_blocks].long()]
        key, value = blocks.transpose(0, 1).flatten(1, 2).chunk(2, dim=-1)
        start = None if starts is None else starts[slot, None]
        mask = attention_mask(position[None], key.shape[1], sliding_window, start)
        rows = query[tokens].transpose(0, 1)[None]
        attended = attention(rows, key[None], value[None], mask, scaling, softcap=softcap, sinks=sinks)
        output[tokens] = attended[0].transpose(0, 1)
    return output


def write_kv(layer: Tensor, key: Tensor, value: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Store keys and values in their blocks; arguments as in kv_write.write_kv.

    NaN and infinity are stored as 0: a masked position has weight 0, and 0 times NaN would reach
    whoever reads the block. The request they come from is ended by the runner all the same.
    """
    largest = torch.finfo(layer.dtype).max
    kv = torch.cat((key, value), dim=-1).float()
    kv = torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0).clamp(-largest, largest)
    layer[blocks.long(), :, offsets.long()] = kv.to(layer.dtype)


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
    """What tokens are and where their keys and values go; arguments as in token_inputs.look_up_tokens."""
    positions = num_computed[slots] + offsets
    is_real = positions < (num_known + num_drafts)[slots]
    positions = positions * is_real  # padding may lie beyond what the model can embed
    return TokenInputs(
        positions=positions,
        is_real=is_real,
        token_ids=token_ids[slots, positions],
        write_blocks=block_table[slots, positions // block_size] * is_real.long(),
        write_offsets=positions % block_size,
    )


def penalise(
    logits: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    num_prompt: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalise tokens of each position's context, in place; arguments as in penalties.penalise.

    `token_ids` may be cut behind the longest row's drafts: its width is what this takes its time for.
    """
    num_rows, num_positions, vocab_size = logits.shape
    text = token_ids[slots].long()
    place = torch.arange(text.shape[1], device=logits.device)
    known = num_tokens[slots, None]
    is_prompt = place < num_prompt[slots, None]
    is_output = ~is_prompt & (place < known)
    nothing = logits.new_zeros(num_rows, vocab_size)
    in_prompt = nothing.scatter_add(1, text, is_prompt.float()) > 0
    counts = nothing.scatter_add(1, text, is_output.float())
    for position in range(num_positions):
        if position > 0:  # the draft before this position is part of its context
            counts.scatter_add_(1, text.gather(1, known + position - 1), counts.new_ones(num_rows, 1))
        row_logits = logits[:, position]
        factor = repetition[slots, None]
        scaled = torch.where(row_logits > 0, row_logits / factor, row_logits * factor)
        scaled = torch.where(in_prompt | (counts > 0), scaled, row_logits)
        logits[:, position] = scaled - frequency[slots, None] * counts - presence[slots, None] * (counts > 0)


def restrict(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Mask what the sampling parameters leave out of [n, q, vocab] logits (temperature applied); in place.

    Args: top_k: [n] int64, below 1 keeps all. top_p, min_p: [n] float32. None where no row needs it.
    Ties at the k-th place are all kept, as are those at top-p's edge.
    """
    if min_p is not None:
        floor = logits.amax(-1, keepdim=True) + min_p[:, None, None].log()
        logits.masked_fill_(logits < floor, -torch.inf)
    if top_k is None and top_p is None:
        return logits
    ordered, _ = logits.sort(-1, descending=True)
    vocab_size = logits.shape[-1]
    if top_k is not None:
        k = torch.where(top_k < 1, vocab_size, top_k).clamp(max=vocab_size)
        kth = ordered.gather(-1, (k - 1)[:, None, None].expand(-1, logits.shape[1], 1))
        logits.masked_fill_(logits < kth, -torch.inf)
        ordered.masked_fill_(ordered < kth, -torch.inf)
    if top_p is not None:
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of what is likelier: the first token that reaches top_p stays
        # Rounding takes the sum to 1 early: a row that keeps all must not lose its tail by a neighbour's top_p.
        mass = torch.where(top_p < 1, top_p, torch.inf)
        num_kept = (before < mass[:, None, None]).sum(-1, keepdim=True)
        edge = ordered.gather(-1, (num_kept - 1).clamp(min=0))  # none where every logit is NaN or minus infinity
        logits.masked_fill_(logits < edge, -torch.inf)
    return logits
