"""What compiles decoder layers on the CPU while the engine runs."""

import logging
from collections.abc import Sequence
from functools import partial

from proposers.base import HostProposer, Proposer
from proposers.draft_model import CausalNetwork
from proposers.drafting import NetworkProposer
from proposers.eagle_compiled import order_of, use_compiled
from proposers.eagle_network import EagleNetwork
from proposers.network import KVShape
from server.composition.target import LoadedTarget
from server.config import ModelConfig
from server.model.attention import CPU_ATTENTION_NAME
from server.model.compilation import Compilation
from server.model.compiled_layers import install
from server.model.compiled_model import CompileOrder
from server.model.loader import LoadedModel
from server.worker.kv_tensors import KVGeometry

logger = logging.getLogger(__name__)


def compilations_of(
    config: ModelConfig, target: LoadedTarget, proposers: Sequence[Proposer | HostProposer]
) -> list[Compilation]:
    """One for each model whose operators are all C++: target, draft models, EAGLE heads; the others run as they are."""
    compilations: list[Compilation] = []
    if target.is_packed and config.compile != "none":
        networks = [proposer.network for proposer in proposers if isinstance(proposer, NetworkProposer)]
        decoders = [(target.loaded, target.geometry)] + [
            (network.loaded, _draft_geometry(network.kv_shape, target.geometry.block_size))
            for network in networks
            if isinstance(network, CausalNetwork)
        ]
        compilations = [
            Compilation(
                _order(config, loaded, geometry, target.num_threads),
                config.compile,
                partial(install, loaded.model, geometry.num_layers),
            )
            for loaded, geometry in decoders
            if loaded.model.config._attn_implementation == CPU_ATTENTION_NAME
        ] + [
            Compilation(order_of(network, target.num_threads), config.compile, partial(use_compiled, network))
            for network in networks
            if isinstance(network, EagleNetwork) and network.is_compilable
        ]
    if config.compile == "wait" and target.device.type == "cpu" and not compilations and not config.enforce_eager:
        logger.warning("the decoder layers are not compiled, although compile is wait: the C++ operators are missing")
    return compilations


def _order(config: ModelConfig, loaded: LoadedModel, geometry: KVGeometry, num_threads: int) -> CompileOrder:
    return CompileOrder(
        model_folder=str(loaded.folder),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        kv_dtype=str(geometry.dtype).removeprefix("torch."),
        attention=CPU_ATTENTION_NAME,
        kv_shape=(geometry.num_layers, geometry.num_kv_heads, geometry.block_size, 2 * geometry.head_dim),
        num_threads=num_threads,
        trusts_code=config.trust_remote_code,
    )


def _draft_geometry(shape: KVShape, block_size: int) -> KVGeometry:
    return KVGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, shape.dtype)
