"""vLLM's CPU build, offline; needs its environment."""

import time
from typing import Any

import vllm  # type: ignore[import-not-found]  # of another environment


class Engine:
    """One LLM; prefix caching is off as no prompt comes twice."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self.versions = {"vllm": vllm.__version__}
        self._llm = vllm.LLM(
            model,
            dtype="bfloat16",
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            disable_log_stats=False,  # or outputs have no times
        )

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        """The fields of a Sample; first and last tokens by vLLM's own times."""
        params = vllm.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        start_s = time.monotonic()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        wall_s = time.monotonic() - start_s
        first_s = max(output.metrics.first_token_ts for output in outputs)
        return {
            "ttft_s": first_s - start_s,
            "decode_s": max(output.metrics.last_token_ts for output in outputs) - first_s,
            "wall_s": wall_s,
            "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "num_first": len(prompts),
        }
