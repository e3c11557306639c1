"""Compares other code for an EAGLE head with its own."""

from dataclasses import replace

import torch

from proposers.eagle_body import EagleBody, RunsBody
from server.model.attention_operator import attending
from server.model.layer_check import CHECK_LEN, compare_outputs, prompt_step


@torch.inference_mode()
def check_body(body: EagleBody, run: RunsBody, num_features: int) -> None:
    """On a prompt and a single token; writes to block 0 of the head's KV, which belongs to nobody.

    Raises: ValueError where they differ.
    """
    generator = torch.Generator().manual_seed(0)
    for length in (CHECK_LEN, 1):
        features = torch.randn(length, num_features, generator=generator).to(body.embedding)
        step = prompt_step(length, features.device)
        step = replace(step, starts=torch.zeros_like(step.slots))
        token_ids = step.positions + 1
        hidden = body.condense(features)
        compare_outputs("what condenses hidden states", run.condense(features), hidden, features)
        with attending(step):
            expected = body(hidden, token_ids, step)
        compare_outputs("the draft head", run(hidden, token_ids, step), expected, hidden)
        compare_outputs("what lies behind it", run.output(expected), body.output(expected), expected)
