"""The first generation, before anybody's request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from server.errors import ModelError
from server.kernels import jit
from server.kernels.attention_tiling import SHORT_QUERY
from server.kernels.token_mask import mask_tokens
from server.model.forward import run_model
from server.model.head import LMHead
from server.model.layer_check import CHECK_LEN, prompt_step
from server.plan import PlanRow, SequenceStart, StepPlan
from server.request import Request, SamplingParams
from server.worker.runner import Runner

PROMPT_LEN = 4


def warm_up(
    runner: Runner, model: PreTrainedModel, head: LMHead, capture_sizes: Sequence[int], longest_chunk: int
) -> None:
    """Prefill a prompt, decode a token, compare the head with the model's own logits; on CUDA load kernels, capture.

    Uses all slots and the blocks from 1 on, which nobody has yet and whoever gets them overwrites.

    Args:
        capture_sizes: see Runner.capture; empty where nothing is to be captured.
        longest_chunk: most tokens in a step.

    Raises: ModelError if the model yields NaN here, or transforms its logits in an unknown way.
    """
    has_kernels = jit.is_available(runner.kv.device)
    if has_kernels:
        with jit.rehearsing():
            _load_kernels(runner, longest_chunk)
    greedy = SamplingParams(temperature=0)
    block_size = runner.kv.shape[3]
    for num_query, context in ((PROMPT_LEN, PROMPT_LEN), (1, PROMPT_LEN + 1)):
        plan = _plan(num_query, context, greedy, block_size=block_size)
        error = runner.settle(runner.launch(plan)).rows[0].error
        if error is not None:
            raise ModelError(f"the warm-up generation failed: {error}; try --dtype bfloat16 or float32")
    _check_head(model, head, runner.kv.device)
    if has_kernels:
        _load_kernels(runner, longest_chunk)  # once more, for those that were only compiled
        _load_mask_kernel(head.vocab_size, runner.kv.device)
    if capture_sizes:
        runner.capture(capture_sizes)


def _load_kernels(runner: Runner, longest_chunk: int) -> None:
    """Run a step of every kind that kernels are compiled for, so that no request waits for a compiler.

    Attention has a variant for each tile size, which follows from the query length, with and without splits, and
    one for each number of splits, which follows from the bound of the context: what lies below the bound need not be
    there; for many short rows others, which merge splits at once. Proposers draft behind each step: those that are
    networks launch variants of their own, which do what the steps before left out as well.
    """
    block_size = runner.kv.shape[3]
    longest = min(runner.max_tokens, (runner.kv.shape[0] - 1) * block_size)
    lengths = [*(1 << i for i in range(8)), longest_chunk]
    shapes = {(min(length, longest), min(bound, longest)) for length in lengths for bound in (length, longest)}
    shapes |= {(1, 1 << i) for i in range(7, longest.bit_length())}
    everything = SamplingParams(
        temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1, logprobs=1
    )
    options: dict[str, Any] = {"num_proposed": runner.num_device_drafts, "block_size": block_size}
    for num_query, bound in sorted(shapes):
        runner.settle(runner.launch(_plan(num_query, num_query, everything, bound=bound, **options)))
    for num_query in (length for length in lengths if 1 < length <= min(SHORT_QUERY, longest)):
        num_rows = max(1, min(runner.batch.spare_slot, longest_chunk // num_query))
        runner.settle(runner.launch(_plan(num_query, num_query, everything, num_rows=num_rows, **options)))
    for num_drafts in range(1, runner.max_drafts + 1):
        context = PROMPT_LEN + num_drafts
        if context <= longest:
            plan = _plan(1 + num_drafts, context, everything, num_drafts=num_drafts, **options)
            runner.settle(runner.launch(plan))


def _load_mask_kernel(vocab_size: int, device: torch.device) -> None:
    """What steps of guided rows run besides; there is no grammar to make one with."""
    bits = torch.zeros(1, 1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    mask_tokens(torch.zeros(1, 1, vocab_size, device=device), torch.zeros(1, dtype=torch.int64, device=device), bits)


def _plan(
    num_query: int,
    context: int,
    sampling: SamplingParams,
    *,
    block_size: int,
    bound: int | None = None,
    num_drafts: int = 0,
    num_proposed: int = 0,
    num_rows: int = 1,
) -> StepPlan:
    """Rows in the first slots that compute the last tokens of a context, of which some could be drafts.

    Args: bound: of the context; None for its length. num_rows: which share their blocks.
    """
    request = Request(request_id="warm-up", prompt_token_ids=(1,) * (context - num_drafts), sampling=sampling)
    start = SequenceStart(
        slot=0,
        request=request,
        key=0,
        token_ids=request.prompt_token_ids,
        num_prompt=len(request.prompt_token_ids),
        num_computed=context - num_query,
        block_ids=tuple(range(1, 1 + -(-context // block_size))),
        num_speculative_tokens=num_proposed,
    )
    row = PlanRow(
        slot=0,
        seq_id=-1,
        epoch=0,
        num_query=num_query,
        num_drafts=num_drafts,
        context_bound=bound or context,
        is_sampling=True,
    )
    slots = range(num_rows)
    return StepPlan(tuple(replace(start, slot=i) for i in slots), tuple(row._replace(slot=i) for i in slots))


@torch.inference_mode()
def _check_head(model: PreTrainedModel, head: LMHead, device: torch.device) -> None:
    step = prompt_step(CHECK_LEN, device)
    token_ids, positions = step.positions + 1, step.positions
    hidden = run_model(model.base_model, token_ids, positions, step).last_hidden_state[0]
    head.check(hidden, run_model(model, token_ids, positions, step).logits[0])
