"""Tells from a configuration alone whether a decoder can leave its last layers out."""

import copy
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from server.model.attention import ATTENTION_NAME
from server.model.decoder_layers import find_decoder_layers

logger = logging.getLogger(__name__)


class _RanOn(Exception):
    """A layer ran that was to be left out."""


@torch.inference_mode()
def runs_all_layers(config: PreTrainedConfig, *, trusts_code: bool) -> bool:
    """Whether a decoder runs layers beyond the number that its configuration is changed to.

    Takes neither weights nor memory for them: the model is built of tensors without content, and its layers do
    nothing. False also where that cannot be told so: then the loaded model must be asked.

    Args: config: of two layers or more. trusts_code: whether code of the model's own may be run.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=ATTENTION_NAME, trust_remote_code=trusts_code
            )
            token_ids = torch.zeros(1, 1, dtype=torch.int64)
        first, second, *_ = find_decoder_layers(model, config.num_hidden_layers)
        first.forward, second.forward = _pass_on, _run_on
        model.base_model.config.num_hidden_layers = 1
        model.base_model(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except _RanOn:
        return True
    except Exception as error:  # of any model's code, which may want to see content
        logger.debug("whether layers can be left out is not known before they are loaded: %r", error)
    return False


def _pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _run_on(*_: Any, **__: Any) -> Tensor:
    raise _RanOn
