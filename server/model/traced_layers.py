"""Has torch.compile trace a model's decoder layers in this process: what CUDA graphs are captured from.

Layers of one kind share compiled code, because their weights and KV are inputs to it, so that a model takes as
long as one layer. There are two versions of it: for one token, and for any other number.
"""

import logging
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from server.errors import first_line
from server.kernels import jit
from server.model.attention import OPERATOR_ATTENTION_NAME, bind_kv
from server.model.decoder_layers import find_decoder_layers
from server.model.layer_check import CHECK_LEN, check_layers, run_prompt
from server.model.tracing import traced, tracing

logger = logging.getLogger(__name__)


def trace_layers(model: PreTrainedModel, num_layers: int, kv: Tensor) -> bool:
    """Let the decoder layers run compiled, in seconds; an architecture that cannot be traced runs as it is.

    Called once the model's modules are final, and before anything else is bound to or captured from it.

    Args: kv: of a few blocks, see kv_tensors.allocate_kv; written to, and needed no longer.
    Returns: whether they do; otherwise the log says why.
    """
    started_s = time.monotonic()
    attention = model.config._attn_implementation
    model.config._attn_implementation = OPERATOR_ATTENTION_NAME
    bind_kv(model.base_model, kv)
    try:
        layers = find_decoder_layers(model, num_layers)
        compiled = [traced(layer.forward) for layer in layers]

        def run(index: int, hidden: Tensor, /, **arguments: Any) -> Tensor:
            output: Tensor = compiled[index](hidden, **arguments)
            return output

        if jit.is_available(kv.device):
            _compile_kernels(model)
        with tracing():
            check_layers(model, layers, run)
    except Exception as error:  # whatever tracer and compiler have to say about an architecture
        model.config._attn_implementation = attention
        logger.warning("the decoder layers cannot be compiled, and run as they are: %s", first_line(error))
        logger.debug("why they cannot be compiled", exc_info=True)
        return False
    for layer, forward in zip(layers, compiled, strict=True):
        layer.forward = forward
    logger.info("compiled the decoder layers in %.1f s", time.monotonic() - started_s)
    return True


@torch.inference_mode()
def _compile_kernels(model: PreTrainedModel) -> None:
    """Side by side, those that `check_layers` would have compiled one after the other."""
    with jit.rehearsing():
        for length in (CHECK_LEN, 1):
            run_prompt(model, length)
