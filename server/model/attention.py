"""Attention over paged KV, registered with transformers under a name of its own.

No mask function is registered under that name, so transformers builds no mask: causality and
sliding windows are decided here, from positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from server.kernels import cpu_attention, jit
from server.kernels import kv_write as triton_kv_write
from server.kernels import paged_attention as triton_attention
from server.kernels.attention_tiling import SHORT_QUERY, fills_device
from server.kernels.reference import attention, attention_mask, write_kv
from server.model.cache import cache_root

ATTENTION_NAME = "outrider_paged"
CPU_ATTENTION_NAME = "outrider_paged_cpu"
CUDA_ATTENTION_NAME = "outrider_paged_cuda"
INVARIANT_ATTENTION_NAME = "outrider_paged_invariant"
"""The one on CUDA with a fixed order of summation, see invariance.py."""
OPERATOR_ATTENTION_NAME = "outrider_paged_operator"
"""That of traced code, see attention_operator.py."""
INVARIANT_SPAN = 512
"""Positions that are summed in one go in invariant attention."""


def attention_name(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What a model is to be loaded with: kernels in Triton, C++ operators built here if need be, or plain tensors."""
    if jit.is_available(device):
        return CUDA_ATTENTION_NAME
    has_operators = (
        device.type == "cpu"
        and cpu_attention.supports(dtype, head_dim)
        and cpu_attention.load(cache_root() / "kernels")
    )
    return CPU_ATTENTION_NAME if has_operators else ATTENTION_NAME


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Adjacent rows that are laid out with the same number of query tokens, shorter ones padded.

    Attributes:
        first_row, num_rows: the rows. first_token: where they start in the flat tokens.
        num_query: flat tokens of each. context_bound: its rows read positions below this.
    """

    first_row: int
    num_rows: int
    first_token: int
    num_query: int
    context_bound: int

    @property
    def rows(self) -> slice:
        """Its rows among those of the step."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def tokens(self) -> slice:
        """Its tokens among those of the step."""
        return slice(self.first_token, self.first_token + self.num_rows * self.num_query)


class AttentionLaunch(NamedTuple):
    """Adjacent rows that a kernel does in one go; see kernels.paged_attention.

    Attributes:
        first_token, num_query, slots: [num_rows] int64, those of the step.
        max_num_query: no row has more tokens. context_bound: no position reaches it.
    """

    first_token: Tensor
    num_query: Tensor
    slots: Tensor
    max_num_query: int
    context_bound: int


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention needs to know about a step; passed through the model as one keyword.

    Attributes:
        write_blocks, write_offsets: [num_tokens] int64, where each token's K and V go; block 0 for padding.
        positions: [num_tokens] int64, 0 for padding.
        first_token, num_query: [num_rows] int64, the flat tokens of each row, padding behind them left out.
        slots: [num_rows] int64, each row's place in `block_table`.
        block_table: [slots, blocks] int32 or int64.
        groups: the rows, in order.
        starts: [slots] int64, by slot: a row sees no position below its own; None sees all.
    """

    write_blocks: Tensor
    write_offsets: Tensor
    positions: Tensor
    first_token: Tensor
    num_query: Tensor
    slots: Tensor
    block_table: Tensor
    groups: tuple[AttentionGroup, ...]
    starts: Tensor | None = None
    _tables: dict[AttentionGroup, Tensor] = field(init=False, default_factory=dict)
    _masks: dict[tuple[AttentionGroup, int | None], Tensor] = field(init=False, default_factory=dict)
    _arrivals: dict[int, Tensor] = field(init=False, default_factory=dict)
    _launches: list[AttentionLaunch] = field(init=False, default_factory=list)

    def launches(self) -> Sequence[AttentionLaunch]:
        """Its rows for kernels that need no padding: groups of similar length together; made once per step."""
        if not self._launches:
            for _, members in groupby(self.groups, key=_length_class):
                groups = list(members)
                rows = slice(groups[0].first_row, groups[-1].rows.stop)
                self._launches.append(
                    AttentionLaunch(
                        self.first_token[rows],
                        self.num_query[rows],
                        self.slots[rows],
                        max(group.num_query for group in groups),
                        max(group.context_bound for group in groups),
                    )
                )
        return self._launches

    def table(self, group: AttentionGroup, block_size: int) -> Tensor:
        """[num_rows, num_blocks] int64, made once per step."""
        if group not in self._tables:
            num_blocks = -(-group.context_bound // block_size)
            self._tables[group] = self.block_table[self.slots[group.rows], :num_blocks].long()
        return self._tables[group]

    def mask(self, group: AttentionGroup, num_positions: int, sliding_window: int | None) -> Tensor:
        """[num_rows, 1, num_query, num_positions] bool, made once per step and window."""
        key = (group, sliding_window)
        if key not in self._masks:
            positions = self.positions[group.tokens].view(group.num_rows, group.num_query)
            starts = None if self.starts is None else self.starts[self.slots[group.rows]]
            self._masks[key] = attention_mask(positions, num_positions, sliding_window, starts)
        return self._masks[key]

    def arrivals(self, num_heads: int) -> Tensor:
        """[num_rows, num_heads] int32 zeros, made once per step: each launch leaves them as it found them.

        A captured step has its own, which each replay makes zero first.
        """
        if num_heads not in self._arrivals:
            shape = (self.first_token.shape[0], num_heads)
            self._arrivals[num_heads] = torch.zeros(shape, dtype=torch.int32, device=self.first_token.device)
        return self._arrivals[num_heads]


def _length_class(group: AttentionGroup) -> int:
    """Lengths up to 1, 16, 256 and so on: programs beyond the end of a shorter row have nothing to do."""
    return ((group.num_query - 1).bit_length() + 3) // 4


def is_traced(model: PreTrainedModel) -> bool:
    """Whether a model's layers are traced, or about to be."""
    return bool(model.config._attn_implementation == OPERATOR_ATTENTION_NAME)


def bind_kv(model: PreTrainedModel, kv: Tensor) -> None:
    """Give each attention module the blocks of its layer, as `kv_blocks`.

    A buffer, but where code is traced: a tracer takes the sizes of buffers for constants, and would compile again for
    another number of blocks.

    Args: kv: [num_blocks, layers, kv_heads, block_size, 2 * head_dim], K then V in the last dimension.
    """
    attends_by_operator = is_traced(model)
    for module in model.modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int) and not any(hasattr(child, "layer_idx") for child in module.children()):
            layer = kv[:, layer_idx]
            if hasattr(module, "kv_blocks"):
                del module.kv_blocks
            if attends_by_operator:
                torch._dynamo.mark_static(layer, [1, 2, 3])
                module.kv_blocks = layer
            else:
                module.register_buffer("kv_blocks", layer, persistent=False)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What an architecture asks of its attention; sinks: [heads], a logit without a value."""

    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None


Attend = Callable[[AttentionStep, Tensor, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(step, layer, query [T, heads, head_dim], key and value [T, kv_heads, head_dim], options) -> [T, heads, head_dim]."""


def _for_transformers(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """Give an implementation the signature that transformers calls.

    That has query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim], no mask, and wants
    [1, T, heads, head_dim] with attention weights, of which there are none.
    """

    def attention_function(
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
        layer: Tensor = module.kv_blocks  # type: ignore[assignment]  # torch types buffers as modules, too
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
        return attend(attention_step, layer, query, key, value, options)[None], None

    return attention_function


def attend_by_tensors(
    step: AttentionStep, layer: Tensor, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """By plain tensor operations, anywhere."""
    write_kv(layer, key, value, step.write_blocks, step.write_offsets)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in step.groups:
        rows = query[group.tokens].unflatten(0, (group.num_rows, group.num_query)).transpose(1, 2)
        keys, values = read_kv(layer, step.table(group, block_size=layer.shape[2]))
        mask = step.mask(group, keys.shape[2], options.sliding_window)
        attended = attention(rows, keys, values, mask, options.scaling, softcap=options.softcap, sinks=options.sinks)
        output[group.tokens] = attended.transpose(1, 2).flatten(0, 1)
    return output


def _attend_on_cpu(
    step: AttentionStep, layer: Tensor, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    cpu_attention.write_kv(layer, key, value, step.write_blocks, step.write_offsets)
    return cpu_attention.paged_attention(
        query,
        layer,
        step.first_token,
        step.num_query,
        step.slots,
        step.positions,
        step.block_table,
        options.scaling,
        sliding_window=options.sliding_window,
        softcap=options.softcap,
        sinks=None if options.sinks is None else options.sinks.float(),
        starts=step.starts,
    )


def attend_on_cuda(
    step: AttentionStep,
    layer: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    split_span: int | None = None,
) -> Tensor:
    """By Triton kernels; split_span: see paged_attention."""
    triton_kv_write.write_kv(layer, key, value, step.write_blocks, step.write_offsets)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for launch in step.launches():
        is_merged_at_once = (
            split_span is None
            and launch.max_num_query <= SHORT_QUERY
            and fills_device(launch.slots.shape[0], layer.shape[1], query.device)
        )
        triton_attention.paged_attention(
            query,
            layer,
            output,
            launch.first_token,
            launch.num_query,
            launch.slots,
            step.positions,
            step.block_table,
            max_num_query=launch.max_num_query,
            context_bound=launch.context_bound,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
            starts=step.starts,
            split_span=split_span,
            arrivals=step.arrivals(query.shape[1]) if is_merged_at_once else None,
        )
    return output


def read_kv(layer: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values, each [num_rows, kv_heads, num_blocks * block_size, head_dim]."""
    gathered = layer[block_table].transpose(1, 2).flatten(2, 3)
    return gathered.chunk(2, dim=-1)  # type: ignore[return-value]


paged_attention = _for_transformers(attend_by_tensors)
paged_attention_cpu = _for_transformers(_attend_on_cpu)
paged_attention_cuda = _for_transformers(attend_on_cuda)
paged_attention_invariant = _for_transformers(partial(attend_on_cuda, split_span=INVARIANT_SPAN))

AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionInterface.register(CPU_ATTENTION_NAME, paged_attention_cpu)
AttentionInterface.register(CUDA_ATTENTION_NAME, paged_attention_cuda)
AttentionInterface.register(INVARIANT_ATTENTION_NAME, paged_attention_invariant)
