"""Where greedy answers in bfloat16 leave those of the model in float32, and how near the two tokens were there.

`python -m tests.gpu.report_forks MODEL [--device cuda] [--max-tokens 64] [--k 4]`, from the repository root. Each token
is compared with the likeliest one of transformers in float32 behind the same tokens. What transformers itself chooses
in bfloat16 behind them stands beside: rounding alone.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from server.request import SamplingParams
from tests.fakes.engine_under_test import engine_on, ngram
from tests.fakes.prompts import load_prompts
from tests.fakes.reference_model import Reference

LIMIT = 1024
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "captured": {},
    "compiled": {"compile": "wait"},
    "n-gram drafts": {"speculation": True},
    "batch-invariant": {"batch_invariant": True},
}


class Forks:
    """Gaps of logits, in float32, by which a chosen token was below the likeliest one."""

    def __init__(self) -> None:
        self._gaps: list[Tensor] = []
        self._num_tokens = 0

    def take(self, logits: Tensor, token_ids: Tensor) -> None:
        """Args: logits: [n, vocab] float32. token_ids: [n], chosen."""
        gaps = logits.amax(-1) - logits.gather(1, token_ids[:, None])[:, 0]
        self._gaps.append(gaps[gaps > 0])
        self._num_tokens += len(token_ids)

    def __str__(self) -> str:
        gaps = torch.cat(self._gaps)
        if not len(gaps):
            return f"{self._num_tokens} tokens, none differs"
        share, middle, largest = len(gaps) / self._num_tokens, float(gaps.median()), float(gaps.max())
        return f"{self._num_tokens} tokens, {len(gaps)} differ ({share:.2%}): gaps {middle:.3f}, at most {largest:.3f}"


def compare(name: str, prompts: Sequence[list[int]], answers: Sequence[list[int]], exact: Reference) -> None:
    """Print how far answers are from the model in float32."""
    forks = Forks()
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = exact.logits(prompt + answer)[len(prompt) - 1 : -1]
        forks.take(logits, torch.tensor(answer))
    print(f"{name:>16}: {forks}", flush=True)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    given = parser.parse_args()
    prompts = load_prompts(AutoTokenizer.from_pretrained(given.model), LIMIT - given.max_tokens)
    exact = Reference(given.model, given.device)
    rounded = Reference(given.model, given.device, torch.bfloat16)
    greedy = SamplingParams(temperature=0, max_tokens=given.max_tokens, ignore_eos=True)
    for number, name in enumerate(given.modes):
        settings = {"dtype": "bfloat16", "max_model_len": LIMIT, "kv_cache_memory_bytes": 1 << 30, **MODES[name]}
        settings["speculative_config"] = ngram(given.k) if settings.pop("speculation", False) else None
        with engine_on(given.model, given.device, **settings) as engine:
            answers = [outcome.only.token_ids for outcome in engine.generate(prompts, greedy)]
        compare(name, prompts, answers, exact)
        if number == 0:
            own = [
                rounded.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            forks = Forks()
            for prompt, answer, chosen in zip(prompts, answers, own, strict=True):
                forks.take(exact.logits(prompt + answer)[len(prompt) - 1 : -1], torch.tensor(chosen))
            print(f"{'transformers':>16}: {forks}", flush=True)


if __name__ == "__main__":
    main()
