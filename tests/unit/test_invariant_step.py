"""Whole steps of a batch-invariant model, its kernels run by Triton's interpreter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.kernels import cpu_attention
from server.kernels.invariant_linear import invariant_linear
from server.model.attention import CUDA_ATTENTION_NAME
from server.model.fusion import merge_linears
from server.model.invariance import make_invariant
from server.request import Request, SamplingParams
from tests.fakes.stepping import Stepping
from tests.tiny_model import build_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_tokens_are_those_of_plain_steps(tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "load", lambda _: False)
    folder = build_tiny_model(tmp_path, vocab_size=320, num_layers=1)
    prompts = [(5, 6, 7), tuple(range(3, 30)), (9,)]
    made = [Request(request_id=str(i), prompt_token_ids=prompt, sampling=GREEDY) for i, prompt in enumerate(prompts)]

    def stepping() -> Stepping:
        return Stepping(folder, torch.device(kernel_device), torch.float32, max_num_seqs=3, max_num_batched_tokens=16)

    expected = stepping().generate(made)
    invariant = stepping()
    merge_linears(invariant.model.base_model)
    invariant.model.config._attn_implementation = CUDA_ATTENTION_NAME
    make_invariant(invariant.model, is_packed=False)
    head = replace(invariant.head, linear=invariant_linear)
    monkeypatch.setattr(invariant.runner._generation, "_head", head)
    assert invariant.generate(made) == expected
