"""Our own engine, offline."""

import time
from collections.abc import Mapping
from typing import Any

from server.llm import LLM
from server.request import SamplingParams
from server.version import VERSION


class Engine:
    """One LLM; the settings are those of `outrider serve`."""

    def __init__(self, model: str, sampling: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Args: sampling: parameters in place of greedy ones to the full length."""
        self.versions = {"outrider": VERSION}
        self._sampling = {"temperature": 0.0, "ignore_eos": True, **(sampling or {})}
        self._llm = LLM(model, **settings)

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        """The fields of a Sample; requests arrive within a few milliseconds, which is not told apart."""
        params = SamplingParams(max_tokens=output_len, **self._sampling)
        start_s = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        wall_s = time.perf_counter() - start_s
        choices = [output.outputs[0] for output in outputs]
        first_s = max(choice.timing.ttft_s for choice in choices)
        return {
            "ttft_s": first_s,
            "decode_s": max(choice.timing.ttft_s + choice.timing.decode_s for choice in choices) - first_s,
            "wall_s": wall_s,
            "num_tokens": sum(len(choice.token_ids) for choice in choices),
            "num_first": len(choices),
        }
