"""Prompts with transformers' own greedy answers, and engines compared with them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from server.request import SamplingParams
from tests.fakes.engine_under_test import EngineUnderTest
from tests.fakes.prompts import load_prompts
from tests.fakes.reference_model import TIE_GAP, ForkCounter, Greedy, Reference


@dataclass(frozen=True)
class Oracle:
    """A model, the prompts as its tokens, and the answers transformers gives to them.

    `limit` is the context length of the engines under test.
    """

    folder: Path
    limit: int
    max_tokens: int
    prompts: list[list[int]]
    answers: list[Greedy]
    forks: ForkCounter

    @property
    def texts(self) -> list[list[int]]:
        """Prompts with their answers."""
        return [prompt + answer.token_ids for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def check(self, engine: EngineUnderTest, arrivals: random.Random | None = None) -> None:
        """Generate for all prompts and compare."""
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
        outcomes = engine.generate(self.prompts, params, arrivals=arrivals)
        for expected, outcome in zip(self.answers, outcomes, strict=True):
            self.forks.check(expected, outcome.only.token_ids)


def ask_transformers(
    folder: Path,
    device: str,
    *,
    limit: int,
    max_tokens: int,
    chosen: Sequence[int],
    kv_dtype: torch.dtype = torch.float32,
    tie_gap: float = TIE_GAP,
    guess: Callable[[list[list[int]], list[int]], list[list[int]]] | None = None,
) -> Oracle:
    """An oracle in float32 for the prompts of these numbers.

    Args:
        kv_dtype: of what it keeps between tokens.
        guess: answers to prompts, of so many tokens each, that are likely to be right; large models are far quicker
            to confirm than to generate from. They are not taken on trust.
    """
    everything = load_prompts(AutoTokenizer.from_pretrained(folder), limit)
    prompts = [everything[number] for number in chosen]
    reference = Reference(folder, device, kv_dtype=kv_dtype)
    lengths = [min(max_tokens, limit - len(prompt)) for prompt in prompts]
    if guess is None:
        answers = [reference.greedy(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    else:
        assert kv_dtype == torch.float32, "nothing is rounded between the tokens of one pass"
        guesses = guess(prompts, lengths)
        answers = [reference.confirm(prompt, guessed) for prompt, guessed in zip(prompts, guesses, strict=True)]
    return Oracle(folder, limit, max_tokens, prompts, answers, ForkCounter(tie_gap))
