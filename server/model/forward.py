"""One forward pass of a model over a step's tokens, whichever way its attention learns of the step."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from server.model.attention import INVARIANT_ATTENTION_NAME, OPERATOR_ATTENTION_NAME, AttentionStep
from server.model.attention_operator import attending
from server.model.invariance import Invariant


def run_model(model: PreTrainedModel, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Any:
    """What transformers makes of flat tokens: with last_hidden_state or logits, [1, T, ...].

    Args: model: one with a head, or its decoder alone. token_ids, positions: [T] int64.
    """
    arguments = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
    attention = model.config._attn_implementation
    if attention == OPERATOR_ATTENTION_NAME:
        with attending(step):
            return model(**arguments)
    with Invariant() if attention == INVARIANT_ATTENTION_NAME else nullcontext():
        return model(**arguments, attention_step=step)
