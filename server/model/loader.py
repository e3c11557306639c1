"""Loads a model once, ready for the worker: checked, frozen, on its device."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from server.config import ModelConfig
from server.errors import ModelError, first_line
from server.model.attention import attention_name
from server.model.dummy import dummy_folder, dummy_weights, make_dummy_model
from server.model.fingerprint import fingerprint, weights_digest
from server.model.generation_defaults import eos_token_ids, generation_defaults
from server.model.memory import check_fits
from server.model.no_tokenizer import NoTokenizer, has_tokenizer
from server.model.progress import without_foreign_bars
from server.model.resolve import pull
from server.model.support import check_config, check_model
from server.model.tokenizer import load_tokenizer
from server.model.weights import WeightFiles, read_weight_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found, and whose files go together; its weights are not read yet.

    Attributes:
        given: how it was named. folder: with its files.
        config: of the language model. weights: what its files hold.
        tokenizer: as LoadedModel has it.
    """

    given: ModelConfig
    folder: Path
    config: PreTrainedConfig
    weights: WeightFiles
    tokenizer: PreTrainedTokenizerBase | NoTokenizer

    @cached_property
    def weights_digest(self) -> str:
        """Hex; equal for equal files of weights, which are read as a whole when it is first asked for."""
        return weights_digest(self.weights)

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence that the model was made for. Raises: ModelError if nobody says so."""
        limit: int | None = getattr(self.config, "max_position_embeddings", None) or self.given.max_model_len
        if limit is None:
            raise ModelError(f"{self.given.model} does not say how long its context may be: pass --max-model-len")
        return limit


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and all that comes with it; made once, owned by compose.py, lives as long as the process.

    Attributes:
        model: in eval mode, no gradients, its attention dispatched to server.model.attention.
        tokenizer: shared; its calls are thread-safe as long as nobody changes its padding or truncation.
        config: of the language model.
        source: MODEL as it was given.
        folder: where the files are.
        architecture: class name, such as "LlamaForCausalLM".
        head_dim: the same for K and V in all layers.
        eos_token_ids: sorted; end a choice unless ignore_eos.
        generation_defaults: SamplingParams fields that the model's makers recommend.
        weights_digest: hex; equal for equal files of weights.
        fingerprint: SHA-256; equal in all processes that compute the same KV.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | NoTokenizer
    config: PreTrainedConfig
    source: str
    folder: Path
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float | int]
    weights_digest: str
    fingerprint: bytes


def load_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Resolve, check and load `config.model`; what can be refused is refused before the weights are read.

    Raises: ModelError or ConfigError naming cause and remedy.
    """
    return load_files(find_model(config, device, dtype), device, dtype)


def find_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> ModelFiles:
    """Resolve and check `config.model`, and fetch what is missing; its weights are not read.

    Raises: ModelError or ConfigError naming cause and remedy.
    """
    is_dummy = config.load_format == "dummy"
    if is_dummy:
        folder = dummy_folder(config.model)
    else:
        folder = pull(config.model, config.revision, with_code=config.trust_remote_code)
    model_config = _load_config(folder, config)
    check_config(model_config, trusts_code=config.trust_remote_code)
    weights = dummy_weights(model_config, config) if is_dummy else read_weight_files(folder)
    check_fits(config.model, weights, device, dtype)
    if is_dummy and config.tokenizer is None and not has_tokenizer(folder):
        tokenizer: PreTrainedTokenizerBase | NoTokenizer = NoTokenizer()
    else:
        tokenizer = load_tokenizer(folder, config, vocab_size=model_config.vocab_size)
    return ModelFiles(config, folder, model_config, weights, tokenizer)


def load_files(files: ModelFiles, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load the weights of a model that was found. Raises: ModelError naming cause and remedy."""
    config, folder, model_config = files.given, files.folder, files.config
    if config.load_format == "dummy":
        attention = attention_name(device, dtype, head_dim=_kv_geometry(model_config)[1])
        model = make_dummy_model(model_config, config, device, dtype, attention)
    else:
        model = _load_weights(files, device, dtype)
    check_model(model)
    num_kv_heads, head_dim = _kv_geometry(model_config)
    return LoadedModel(
        model=model,
        tokenizer=files.tokenizer,
        config=model_config,
        source=config.model,
        folder=folder,
        architecture=type(model).__name__,
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=model_config.vocab_size,
        max_position_embeddings=files.max_position_embeddings,
        eos_token_ids=eos_token_ids(folder, model_config, files.tokenizer),
        generation_defaults=generation_defaults(folder) if config.generation_config == "auto" else {},
        weights_digest=files.weights_digest,
        fingerprint=fingerprint(files.weights_digest, model_config, dtype),
    )


def _load_config(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    try:
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # whatever the JSON leads to: ValueError, KeyError, TypeError, OSError, ...
        raise _load_error(folder, config, error) from error
    return loaded


def _load_weights(files: ModelFiles, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    folder, config = files.folder, files.given
    attention = attention_name(device, dtype, head_dim=_kv_geometry(files.config)[1])
    try:
        with without_foreign_bars():
            loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
                folder,
                config=files.config,
                dtype=dtype,
                device_map={"": device},
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{config.model} does not fit into the memory of {device}: {error}") from error
    except Exception as error:  # a model's own code, run from the repository, may raise anything
        raise _load_error(folder, config, error) from error
    model, info = loaded
    # transformers fills missing weights with random numbers; such a model would only talk nonsense.
    if missing := sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"]):
        raise ModelError(
            f"{folder} lacks {len(missing)} weights that its config.json calls for, such as {missing[0]}; "
            "fetch the model again"
        )
    if unused := sorted(info["unexpected_keys"]):
        logger.warning("%d weights of %s are not used, such as %s", len(unused), folder, unused[0])
    return model.eval().requires_grad_(False)


def _kv_geometry(config: PreTrainedConfig) -> tuple[int, int]:
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return num_kv_heads, head_dim


def _load_error(folder: Path, config: ModelConfig, error: Exception) -> ModelError:
    reason = first_line(error)
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{config.model} brings Python code of its own, which is not run unasked: read it, then pass "
            "--trust-remote-code"
        )
    return ModelError(f"cannot load {folder}: {reason}; the files are broken, or of a kind transformers does not know")
