"""llama.cpp, in process; needs an environment with llama-cpp-python."""

import os
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found]  # of another environment
import numpy as np

_MAX_BATCH_TOKENS = 2048


class Engine:
    """One context that decodes several sequences together, greedily, with all cores."""

    def __init__(self, model: str, max_model_len: int, max_num_seqs: int) -> None:
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_num_seqs * max_model_len
        params.n_seq_max = max_num_seqs
        params.n_batch = _MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_MAX_BATCH_TOKENS, 0, 1)

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        """The fields of a Sample."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        start_s = time.perf_counter()
        entries = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        next_ids: dict[int, int] = {}
        for first in range(0, len(entries), _MAX_BATCH_TOKENS):
            next_ids |= self._decode(entries[first : first + _MAX_BATCH_TOKENS])
        first_s = time.perf_counter()
        for step in range(output_len - 1):
            next_ids = self._decode(
                [(next_ids[sequence], len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)]
            )
        end_s = time.perf_counter()
        return {
            "ttft_s": first_s - start_s,
            "decode_s": end_s - first_s,
            "wall_s": end_s - start_s,
            "num_tokens": len(prompts) * output_len,
            "num_first": len(prompts),
        }

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (token id, position, sequence, whether it is wanted). Returns: likeliest next id by sequence."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (token_id, position, sequence, is_wanted) in enumerate(entries):
            batch.token[index] = token_id
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = is_wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        return {
            sequence: self._likeliest(index) for index, (*_, sequence, is_wanted) in enumerate(entries) if is_wanted
        }

    def _likeliest(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._num_vocab,)).argmax())
