"""The target model, loaded and made ready to run."""

import logging
from dataclasses import dataclass

import torch

from proposers.base import TargetModel, TargetView
from server.composition.proposers import choose_speculation
from server.config import Config, ModelConfig
from server.errors import ConfigError
from server.host import cpu_count
from server.kernels import jit
from server.kernels.invariant_linear import invariant_linear
from server.model.device import choose_device, choose_dtype, choose_kv_dtype
from server.model.footprint import Footprint
from server.model.fusion import can_pack, merge_linears, pack_linears
from server.model.head import LMHead
from server.model.invariance import make_invariant
from server.model.loader import LoadedModel, ModelFiles, find_model, load_files
from server.model.skinny_linears import fuse_linears
from server.model.traced_layers import trace_layers
from server.speculative_config import SpeculativeConfig
from server.worker.kv_tensors import KVGeometry, allocate_kv

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """The model, where it is, and the shape of its KV.

    Attributes:
        footprint: of the weights as they were before they were packed.
        max_num_tokens: no sequence is longer.
        num_threads: that operators on the host may use.
        is_packed: whether its linears are C++ operators on the CPU.
        speculative: what is to draft for it.
    """

    loaded: LoadedModel
    head: LMHead
    geometry: KVGeometry
    footprint: Footprint
    device: torch.device
    max_num_tokens: int
    num_threads: int
    is_packed: bool
    speculative: SpeculativeConfig | None

    def view(self, config: Config) -> TargetView:
        """What proposers may know of it."""
        loaded = self.loaded
        network = TargetModel(
            model=loaded.model,
            head=self.head,
            config=loaded.config,
            tokenizer=loaded.tokenizer,
            folder=loaded.folder,
            dtype=loaded.model.dtype,
            digest=loaded.weights_digest,
            block_size=self.geometry.block_size,
            max_num_tokens=self.max_num_tokens,
            trusts_code=config.model.trust_remote_code,
            runs_plain=config.model.enforce_eager,
        )
        return TargetView(loaded.vocab_size, self.device, config.scheduler.max_num_seqs, network)


def load_target(config: Config) -> LoadedTarget:
    """Find the model, refuse what does not fit it as far as files tell, load it. Raises: ConfigError, ModelError."""
    device, why_device = choose_device(config.model.device)
    dtype, why_dtype = choose_dtype(config.model.dtype, device)
    logger.info("device %s (%s), dtype %s (%s)", device, why_device, str(dtype).removeprefix("torch."), why_dtype)
    num_threads = cpu_count() if device.type == "cpu" else torch.get_num_threads()
    torch.set_num_threads(num_threads)
    logger.info("%d thread%s", num_threads, "" if num_threads == 1 else "s")
    _log_if_never_compiled(config.model, device)
    kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, device, dtype, "--kv-cache-dtype")
    files = find_model(config.model, device, dtype)
    _check_length(config.model, files)
    speculative = choose_speculation(config, files, device, dtype)
    loaded = load_files(files, device, dtype)
    geometry = KVGeometry(loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, config.cache.block_size, kv_dtype)
    footprint = Footprint.of(loaded.model, geometry.block_nbytes // geometry.block_size)
    is_packed = can_pack(device) and not config.model.enforce_eager
    if is_packed:
        pack_linears(loaded.model.base_model)
    elif jit.is_available(device) and not config.model.enforce_eager:
        (merge_linears if config.model.batch_invariant else fuse_linears)(loaded.model.base_model)
        if config.model.compile != "none" and not config.model.batch_invariant:
            trace_layers(loaded.model, loaded.num_layers, allocate_kv(geometry, 2, device))
    if config.model.batch_invariant:
        make_invariant(loaded.model, is_packed=is_packed)
        logger.info("batch-invariant: a request's tokens do not depend on what runs beside it")
    linear = invariant_linear if config.model.batch_invariant and device.type == "cuda" else None
    head = LMHead.of(loaded.model, loaded.config, is_packed=is_packed, linear=linear)
    return LoadedTarget(
        loaded=loaded,
        head=head,
        geometry=geometry,
        footprint=footprint,
        device=device,
        max_num_tokens=config.model.max_model_len or loaded.max_position_embeddings,
        num_threads=num_threads,
        is_packed=is_packed,
        speculative=speculative,
    )


def _log_if_never_compiled(config: ModelConfig, device: torch.device) -> None:
    if config.compile != "wait":
        return
    if config.enforce_eager:
        logger.warning("the decoder layers are not compiled, although compile is wait: enforce_eager excludes it")
    elif config.batch_invariant and device.type == "cuda":
        logger.warning(
            "the decoder layers are not compiled, although compile is wait: batch_invariant excludes it on CUDA"
        )


def _check_length(config: ModelConfig, files: ModelFiles) -> None:
    longest = files.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len ({config.max_model_len}) is above what the model was made for ({longest})")
