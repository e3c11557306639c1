"""transformers itself, as the oracle of what a model says."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel

TIE_GAP = 1e-4
"""Where the two likeliest logits are closer, float32 rounding may choose either."""
TOKENS_PER_FORK = 10_000


@dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy answer, and for each token how far its logit was above the next."""

    token_ids: list[int]
    gaps: list[float]


class RoundingCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped there
    """Keeps keys and values as a cache of another type would give them back."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        super().__init__()
        self._kv_dtype = kv_dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """transformers' own, of rounded numbers."""
        rounded = (states.to(self._kv_dtype).to(states.dtype) for states in (key_states, value_states))
        updated: tuple[Tensor, Tensor] = super().update(*rounded, *args, **kwargs)
        return updated


class Reference:
    """A model as transformers loads it; greedy answers are kept."""

    def __init__(
        self,
        folder: Path | str,
        device: str,
        dtype: torch.dtype = torch.float32,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Args: kv_dtype: of keys and values between the tokens of greedy answers; None is `dtype`."""
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        self.model.to(device).eval()
        self._device = device
        self._kv_dtype = dtype if kv_dtype is None else kv_dtype
        self._answers: dict[tuple[tuple[int, ...], int, int | None], Greedy] = {}

    def greedy(self, prompt: Sequence[int], max_tokens: int, *, eos_token_id: int | None = None) -> Greedy:
        """transformers' own generate; None as EOS never stops."""
        key = (tuple(prompt), max_tokens, eos_token_id)
        if key not in self._answers:
            self._answers[key] = self._generate(*key)
        return self._answers[key]

    def confirm(self, prompt: Sequence[int], guess: Sequence[int]) -> Greedy:
        """The greedy answer, of as many tokens as a guess at it has: by one pass as far as that is right.

        Keys and values are of the model's own type.
        """
        logits = self.logits([*prompt, *guess[:-1]])[len(prompt) - 1 :]
        best_two = logits.topk(2, dim=-1)
        token_ids, gaps = best_two.indices[:, 0].tolist(), (best_two.values[:, 0] - best_two.values[:, 1]).tolist()
        num_known = 1 + sum(itertools.takewhile(bool, map(operator.eq, token_ids[:-1], guess)))
        known = Greedy(token_ids[:num_known], gaps[:num_known])
        if num_known == len(guess):
            return known
        rest = self.greedy([*prompt, *known.token_ids], len(guess) - num_known)
        return Greedy(known.token_ids + rest.token_ids, known.gaps + rest.gaps)

    @torch.inference_mode()
    def _generate(self, prompt: tuple[int, ...], max_tokens: int, eos_token_id: int | None) -> Greedy:
        input_ids = torch.tensor([prompt], device=self._device)
        self.model.generation_config = GenerationConfig(eos_token_id=eos_token_id, pad_token_id=0)
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=RoundingCache(self._kv_dtype),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best_two = torch.cat(output.logits).topk(2, dim=-1).values
        gaps = (best_two[:, 0] - best_two[:, 1]).tolist()
        return Greedy(output.sequences[0, len(prompt) :].tolist(), gaps)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab] float32 of one plain forward, on the CPU."""
        logits: Tensor = self.model(torch.tensor([list(token_ids)], device=self._device), use_cache=False).logits
        return logits[0].float().cpu()


class ForkCounter:
    """Compares answers with the oracle; ids may differ from a tie on, and ties must be rare."""

    def __init__(self, tie_gap: float = TIE_GAP) -> None:
        self._tie_gap = tie_gap
        self.num_tokens = 0
        self.num_forks = 0

    def check(self, expected: Greedy, token_ids: Sequence[int]) -> None:
        """Compare one answer."""
        assert len(token_ids) == len(expected.token_ids)
        for i, (wanted, got) in enumerate(zip(expected.token_ids, token_ids, strict=True)):
            self.num_tokens += 1
            if wanted != got:
                assert expected.gaps[i] < self._tie_gap, (
                    f"token {i} is {got}, not {wanted}, by a gap of {expected.gaps[i]}"
                )
                self.num_forks += 1
                break
        assert self.num_forks <= max(1, self.num_tokens / TOKENS_PER_FORK)
