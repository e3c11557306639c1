"""The first segment of a step: the target model's forward pass over the batch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from server.kernels import jit, reference
from server.kernels.token_inputs import look_up_tokens
from server.model.attention import AttentionStep, bind_kv
from server.model.forward import run_model
from server.model.taps import LayerTaps
from server.worker.batch import BatchState
from server.worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """What the target made of T flat tokens.

    Attributes:
        hidden: [T, hidden], what the head takes. taps: by layer, what went into it, [T, hidden].
        positions: [T] int64, 0 for padding. is_real: [T] bool, no padding.
        is_broken: [N] bool, rows whose known tokens went NaN or infinite; None where each row has one known token
            and samples: what becomes of it is judged by its logits.
    """

    hidden: Tensor
    taps: Mapping[int, Tensor]
    positions: Tensor
    is_real: Tensor
    is_broken: Tensor | None


class Target:
    """The model on its KV cache; owned by the runner."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: Tensor,
        batch: BatchState,
        tapped: Iterable[int] = (),
        on_compute: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: kv: see kv_tensors.allocate_kv. tapped: layers whose inputs are wanted. on_compute: see Runner."""
        self._model = model.base_model
        bind_kv(self._model, kv)
        self._taps = LayerTaps(self._model, kv.shape[1], tapped)
        self._block_size = kv.shape[3]
        self._batch = batch
        self._on_compute = on_compute

    def forward(self, inputs: StepInputs) -> TargetOutputs:
        """Compute the known tokens and drafts that the plan names, as far as they exist."""
        batch = self._batch
        look_up = look_up_tokens if jit.is_available(batch.token_ids.device) else reference.look_up_tokens
        tokens = look_up(
            inputs.token_slot,
            inputs.token_offset,
            batch.num_computed,
            batch.num_tokens,
            batch.num_drafts,
            batch.token_ids,
            batch.block_table,
            self._block_size,
        )
        step = AttentionStep(
            write_blocks=tokens.write_blocks,
            write_offsets=tokens.write_offsets,
            positions=tokens.positions,
            first_token=inputs.first_token,
            num_query=inputs.num_query,
            slots=inputs.slots,
            block_table=batch.block_table,
            groups=inputs.groups,
        )
        self._on_compute()
        hidden: Tensor = run_model(self._model, tokens.token_ids, tokens.positions, step).last_hidden_state[0]
        is_broken = None
        if inputs.known_row is not None and inputs.chunk is not None:
            batch.num_computed.index_add_(0, inputs.slots, inputs.chunk)
            # Of drafts only the accepted ones count; they are judged by their logits.
            is_bad = tokens.is_real & ~(torch.linalg.vector_norm(hidden, torch.inf, dim=-1) < torch.inf)
            num_bad = inputs.slots.new_zeros(len(inputs.rows) + 1).index_add_(0, inputs.known_row, is_bad.long())
            is_broken = num_bad[:-1] > 0
        return TargetOutputs(hidden, self._taps.take(), tokens.positions, tokens.is_real, is_broken)
