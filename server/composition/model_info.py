"""What is known of a model once it is loaded and its KV cache has its size."""

import logging
from collections.abc import Sequence

import torch

from proposers.base import HostProposer, Proposer
from server.composition.target import LoadedTarget
from server.config import Config
from server.model.fingerprint import describe_kv, kv_fingerprint
from server.request import ModelInfo
from server.worker.rejection import Acceptance

logger = logging.getLogger(__name__)


def model_info(
    config: Config,
    target: LoadedTarget,
    proposers: Sequence[Proposer | HostProposer],
    acceptance: Acceptance,
    num_kv_blocks: int,
) -> ModelInfo:
    """Args: num_kv_blocks: usable ones."""
    loaded, kv_dtype = target.loaded, target.geometry.dtype
    longest, asked = loaded.max_position_embeddings, config.model.max_model_len
    pool_tokens = num_kv_blocks * config.cache.block_size
    max_model_len = asked if asked is not None else min(longest, pool_tokens)
    if asked is None and max_model_len < longest:
        logger.warning(
            "max_model_len is %d, what the KV cache holds; the model was made for %d", max_model_len, longest
        )
    speculative = target.speculative
    info = ModelInfo(
        model=loaded.source,
        served_model_name=config.model.served_model_name or loaded.source,
        architecture=loaded.architecture,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        max_request_len=min(max_model_len, pool_tokens),
        eos_token_ids=loaded.eos_token_ids,
        generation_defaults=loaded.generation_defaults,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(target.device),
        block_size=config.cache.block_size,
        num_kv_blocks=num_kv_blocks,
        speculative_method="none" if speculative is None else speculative.method,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        rejection_sample_method=acceptance.method.name.lower(),
        speculation_metrics=config.observability.speculation_metrics,
        drafts_on_host=any(isinstance(proposer, HostProposer) for proposer in proposers),
        fingerprint=kv_fingerprint(loaded.fingerprint, kv_dtype),
        kv_description=describe_kv(loaded.weights_digest, loaded.config, loaded.model.dtype, kv_dtype),
    )
    _log_capacity(info, kv_dtype)
    return info


def _log_capacity(info: ModelInfo, kv_dtype: torch.dtype) -> None:
    pool_tokens = info.num_kv_blocks * info.block_size
    logger.info(
        "KV cache: %d blocks of %d tokens in %s, %d tokens, %.2f requests of full length (%d tokens)",
        info.num_kv_blocks,
        info.block_size,
        str(kv_dtype).removeprefix("torch."),
        pool_tokens,
        pool_tokens / info.max_model_len,
        info.max_model_len,
    )
    if info.max_request_len < info.max_model_len:
        logger.warning("requests over %d tokens do not fit into the KV cache and are refused", info.max_request_len)
