"""What a model's generation_config.json recommends."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from server.errors import InvalidRequest, ModelError
from server.model.no_tokenizer import NoTokenizer
from server.request import SamplingParams

# The fields that vLLM takes over, too, under the names SamplingParams has for them.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(folder: Path) -> dict[str, float | int]:
    """SamplingParams fields that generation_config.json sets; empty without the file.

    Read as written rather than through transformers, which cannot tell a value that equals its
    own default (top_k 50) from one not given. `do_sample` is not looked at, as in vLLM: a request
    that wants greedy output says temperature 0.
    Raises: ModelError if a value is out of range; every request would be refused for it.
    """
    given = _read(folder)
    defaults = {ours: given[theirs] for theirs, ours in _FIELDS.items() if given.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError) as error:
        raise ModelError(
            f"generation_config.json of {folder} is not usable: {error}; correct it, or ignore it with "
            "--generation-config vllm"
        ) from error
    return defaults


def eos_token_ids(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | NoTokenizer
) -> tuple[int, ...]:
    """Sorted ids that end a text according to generation config, config or tokenizer."""
    sources = (_read(folder).get("eos_token_id"), getattr(config, "eos_token_id", None), tokenizer.eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else () if source is None else (source,))
    return tuple(sorted(ids))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch the model again") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path} does not hold a JSON object; fetch the model again")
    return entries
