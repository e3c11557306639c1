"""Has torch.compile trace an EAGLE head in this process: what CUDA graphs are captured from."""

import logging
import time

from torch import Tensor

from proposers.eagle_body import EagleBody, RunsBody
from proposers.eagle_check import check_body
from server.errors import first_line
from server.model.attention import AttentionStep
from server.model.attention_operator import attending
from server.model.tracing import traced, tracing

logger = logging.getLogger(__name__)


class _TracedBody:
    """Takes the place of a body, whatever memory that has for K and V."""

    def __init__(self, body: EagleBody) -> None:
        self._at, self._condense, self._output = traced(body.at), traced(body.condense), traced(body.output)

    def __call__(self, hidden: Tensor, token_ids: Tensor, step: AttentionStep) -> Tensor:
        with attending(step):
            output: Tensor = self._at(hidden, token_ids, step.positions)
        return output

    def condense(self, features: Tensor) -> Tensor:
        condensed: Tensor = self._condense(features)
        return condensed

    def output(self, hidden: Tensor) -> Tensor:
        output: Tensor = self._output(hidden)
        return output


def trace_body(body: EagleBody, num_features: int) -> RunsBody | None:
    """What computes as a body does whose attention is the operator's and whose KV is bound, traced in seconds.

    Returns: None for a head that cannot be traced; the log says why.
    """
    started_s = time.monotonic()
    run = _TracedBody(body)
    try:
        with tracing():
            check_body(body, run, num_features)
    except Exception as error:  # whatever tracer and compiler have to say about an architecture
        logger.warning("the draft head cannot be compiled, and runs as it is: %s", first_line(error))
        logger.debug("why it cannot be compiled", exc_info=True)
        return None
    logger.info("compiled the draft head in %.1f s", time.monotonic() - started_s)
    return run
