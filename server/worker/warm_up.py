"""The first generation, before anybody's request."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from server.errors import ModelError
from server.model.attention import AttentionGroup, AttentionStep
from server.model.head import LMHead
from server.plan import PlanRow, SequenceStart, StepPlan
from server.request import Request, SamplingParams
from server.worker.runner import Runner

PROMPT_LEN = 4


def warm_up(runner: Runner, model: PreTrainedModel, head: LMHead, capture_sizes: Sequence[int]) -> None:
    """Prefill a prompt, decode a token, compare the head with the model's own logits, capture steps.

    Uses slot 0 and block 1, which nobody has yet and whoever gets them overwrites.

    Args: capture_sizes: see Runner.capture; empty where nothing is to be captured.
    Raises: ModelError if the model yields NaN here, or transforms its logits in an unknown way.
    """
    request = Request(request_id="warm-up", prompt_token_ids=(1,) * PROMPT_LEN, sampling=SamplingParams(temperature=0))
    start = SequenceStart(
        slot=0,
        request=request,
        key=0,
        token_ids=request.prompt_token_ids,
        num_prompt=PROMPT_LEN,
        num_computed=0,
        block_ids=(1,),
        num_speculative_tokens=0,
    )
    steps = (StepPlan((start,), (_row(PROMPT_LEN, PROMPT_LEN),)), StepPlan((), (_row(1, PROMPT_LEN + 1),)))
    for plan in steps:
        error = runner.settle(runner.launch(plan)).rows[0].error
        if error is not None:
            raise ModelError(f"the warm-up generation failed: {error}; try --dtype bfloat16 or float32")
    _check_head(model, head, runner.kv)
    if capture_sizes:
        runner.capture(capture_sizes)


def _row(num_query: int, context_bound: int) -> PlanRow:
    return PlanRow(
        slot=0,
        seq_id=-1,
        epoch=0,
        num_query=num_query,
        num_drafts=0,
        context_bound=context_bound,
        is_sampling=True,
    )


@torch.inference_mode()
def _check_head(model: PreTrainedModel, head: LMHead, kv: Tensor) -> None:
    positions = torch.arange(PROMPT_LEN, device=kv.device)
    zero = positions[:1]
    step = AttentionStep(
        write_blocks=torch.ones_like(positions),
        write_offsets=positions,
        positions=positions,
        first_token=zero,
        num_query=zero + PROMPT_LEN,
        slots=zero,
        block_table=torch.ones(1, 1, dtype=torch.int64, device=kv.device),
        groups=(AttentionGroup(0, 1, 0, PROMPT_LEN, PROMPT_LEN),),
    )
    inputs = {
        "input_ids": torch.ones_like(positions)[None],
        "position_ids": positions[None],
        "use_cache": False,
        "attention_step": step,
    }
    hidden = model.base_model(**inputs).last_hidden_state[0]
    head.check(hidden, model(**inputs).logits[0])
