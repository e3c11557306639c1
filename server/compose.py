"""Builds every object once and wires it; the only module that knows all the classes."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from connectors.base import Connector, ConnectorContext
from proposers.base import HostProposer, Proposer, TargetModel, TargetOutline, TargetView
from proposers.config import ProposerConfig
from proposers.draft_model import CausalNetwork
from proposers.drafting import NetworkProposer
from proposers.network import KVShape
from proposers.registry import likely_methods
from server.config import Config, ModelConfig
from server.engine.engine import NativeEngine
from server.engine.speculation_control import SpeculationControl
from server.errors import ConfigError, ModelError
from server.events import EventBus
from server.host import available_memory_nbytes, cpu_count
from server.kernels import jit
from server.kernels.invariant_linear import invariant_linear
from server.kernels.rejection import Method
from server.kv.block_pool import BlockPool
from server.model.attention import CPU_ATTENTION_NAME
from server.model.compilation import Compilation
from server.model.compiled_model import CompileOrder
from server.model.device import choose_device, choose_dtype, choose_kv_dtype
from server.model.fingerprint import describe_kv, kv_fingerprint
from server.model.footprint import Footprint
from server.model.fusion import can_pack, merge_linears, pack_linears
from server.model.head import LMHead
from server.model.invariance import make_invariant
from server.model.loader import LoadedModel, ModelFiles, find_model, load_files
from server.model.traced_layers import trace_layers
from server.passing_thread import run_in_passing_thread
from server.preprocess import Preprocessor
from server.request import ModelInfo
from server.scheduler.draft_policy import make_policy
from server.scheduler.scheduler import Scheduler
from server.speculative_config import SpeculativeConfig
from server.worker.buckets import batch_sizes
from server.worker.kv_tensors import KVGeometry, allocate_kv, num_blocks_for
from server.worker.memory import activation_nbytes, kept_nbytes, kv_budget
from server.worker.rejection import Acceptance
from server.worker.runner import Runner
from server.worker.warm_up import warm_up

logger = logging.getLogger(__name__)

CONNECTOR_SHUTDOWN_S = 5.0
"""How long blocks that are being saved may take once the engine has stopped."""


@dataclass(frozen=True, slots=True)
class Core:
    """An engine on a loaded model, not started, and what turns prompts into its requests."""

    engine: NativeEngine
    preprocessor: Preprocessor
    scheduler: Scheduler
    bus: EventBus
    footprint: Footprint


def build_core(config: Config) -> Core:
    """Load the model, size the KV pool, build the engine. Blocks for as long as loading takes.

    Raises: ConfigError, ModelError.
    """
    return run_in_passing_thread(partial(_build_core, config), "outrider-load")


def _build_core(config: Config) -> Core:
    device, why_device = choose_device(config.model.device)
    dtype, why_dtype = choose_dtype(config.model.dtype, device)
    logger.info("device %s (%s), dtype %s (%s)", device, why_device, str(dtype).removeprefix("torch."), why_dtype)
    num_threads = cpu_count() if device.type == "cpu" else torch.get_num_threads()
    torch.set_num_threads(num_threads)
    logger.info("%d thread%s", num_threads, "" if num_threads == 1 else "s")
    _check_budget(config)
    _log_if_never_compiled(config.model, device)
    kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, device, dtype, "--kv-cache-dtype")
    files = find_model(config.model, device, dtype)
    _check_length(config.model, files)
    check_proposers(config, files, device, dtype)
    loaded = load_files(files, device, dtype)
    geometry = KVGeometry(loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, config.cache.block_size, kv_dtype)
    footprint = Footprint.of(loaded.model, geometry.block_nbytes // geometry.block_size)
    is_packed = can_pack(device) and not config.model.enforce_eager
    if is_packed:
        pack_linears(loaded.model.base_model)
    elif jit.is_available(device) and not config.model.enforce_eager:
        merge_linears(loaded.model.base_model)
        if config.model.compile != "none" and not config.model.batch_invariant:
            trace_layers(loaded.model, loaded.num_layers, allocate_kv(geometry, 2, device))
    if config.model.batch_invariant:
        make_invariant(loaded.model, is_packed=is_packed)
        logger.info("batch-invariant: a request's tokens do not depend on what runs beside it")
    num_slots = config.scheduler.max_num_seqs
    linear = invariant_linear if config.model.batch_invariant and device.type == "cuda" else None
    head = LMHead.of(loaded.model, loaded.config, is_packed=is_packed, linear=linear)
    network = _target_model(config, loaded, head)
    proposers = build_proposers(config, TargetView(loaded.vocab_size, device, num_slots, network))
    num_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    activations = activation_nbytes(
        config.scheduler.max_num_batched_tokens,
        num_slots * (1 + num_drafts),
        loaded.config.hidden_size,
        # GPT-2 and its kin name it otherwise, or leave it to this default.
        getattr(loaded.config, "intermediate_size", None) or 4 * loaded.config.hidden_size,
        loaded.vocab_size,
    )
    acceptance = _acceptance(config.speculative)
    build_runner = partial(Runner, loaded.model, head, num_slots=num_slots, proposers=proposers, acceptance=acceptance)
    sizes = batch_sizes(num_slots) if jit.is_available(device) and not config.model.enforce_eager else []
    longest = config.model.max_model_len or loaded.max_position_embeddings
    is_measured = bool(sizes) and config.cache.kv_cache_memory_bytes is None
    graphs = _graph_nbytes(partial(build_runner, max_tokens=longest), geometry, sizes, device) if is_measured else 0
    budget = kv_budget(config.cache, device, available_memory_nbytes(), activations + graphs)
    num_blocks = num_blocks_for(geometry, budget, extra=sum(getattr(each, "block_nbytes", 0) for each in proposers))
    info = _model_info(config, loaded, num_blocks - 1, device, kv_dtype, proposers)
    _log_capacity(info, kv_dtype)
    kv = allocate_kv(geometry, num_blocks, device)
    connector = _connector(config, info, notify=lambda: engine.run_between_steps(lambda: None))
    runner = build_runner(
        kv,
        max_tokens=info.max_request_len,
        connector=None if connector is None else connector.worker,
        fingerprint=info.fingerprint.hex(),
        on_compute=(lambda: engine.hand_over()) if device.type == "cpu" else (lambda: None),
    )
    bus = EventBus()
    scheduler = Scheduler(
        config.scheduler,
        info,
        BlockPool(num_blocks),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        clock=time.monotonic,
        num_lookahead_tokens=num_drafts if any(getattr(each, "writes_kv", False) for each in proposers) else 0,
        connector=None if connector is None else connector.scheduler,
        reads_from=() if config.kv_transfer is None else config.kv_transfer.carriers("in"),
        fails_on_bad_loads=config.kv_transfer is not None and config.kv_transfer.kv_load_failure_policy == "fail",
        draft_policy=make_policy(config.speculative.policy, num_drafts) if config.speculative else None,
    )
    depth = config.scheduler.pipeline_depth
    drafters = [each.network for each in proposers if isinstance(each, NetworkProposer)]
    decoders = [
        (loaded, geometry),
        *[
            (drafter.loaded, _draft_geometry(drafter.kv_shape, config.cache.block_size))
            for drafter in drafters
            if isinstance(drafter, CausalNetwork)
        ],
    ]
    compilations = _compilations(config, decoders, num_threads) if is_packed else []
    if config.model.compile == "wait" and device.type == "cpu" and not compilations and not config.model.enforce_eager:
        logger.warning("the decoder layers are not compiled, although compile is wait: the C++ operators are missing")

    def prepare() -> None:
        torch.set_num_threads(num_threads)  # each thread has a count of its own
        for compilation in compilations:
            compilation.prepare(engine.run_when_quiet)
        warm_up(runner, loaded.model, head, sizes, config.scheduler.max_num_batched_tokens)

    def end_transfers() -> None:
        if connector is not None and scheduler.external is not None:
            connector.worker.shutdown(CONNECTOR_SHUTDOWN_S)
            scheduler.external.end(connector.worker.get_finished())

    def cancel_compilations() -> None:
        for compilation in compilations:
            compilation.cancel()

    engine: NativeEngine = NativeEngine(
        scheduler,
        runner,
        loaded.tokenizer,
        info,
        bus,
        pipeline_depth=int(device.type == "cuda") if depth == "auto" else depth,
        max_queued_requests=config.scheduler.max_queued_requests,
        max_num_seqs=config.scheduler.max_num_seqs,
        stream_interval=config.server.stream_interval,
        transferring=None if connector is None else runner,
        speculation=SpeculationControl(config.speculative, proposers, scheduler.drafts),
        warm_up=prepare,
        on_stop=cancel_compilations,
        on_stopped=end_transfers,
        clock=time.monotonic,
    )
    return Core(engine, Preprocessor(loaded.tokenizer, info), scheduler, bus, footprint)


def _connector(config: Config, info: ModelInfo, notify: Callable[[], None]) -> Connector | None:
    """What moves KV in and out, as configured. Raises: ConfigError."""
    given = config.kv_transfer
    if given is None:
        return None
    logger.info("role %s, %s of connector %s", config.disaggregation.role, given.kv_role, given.name)
    logger.info("KV of %s", info.kv_description)
    return given.settings.build(
        ConnectorContext(
            name=given.name,
            engine_id=given.new_engine_id(),
            block_size=info.block_size,
            fingerprint=info.fingerprint.hex(),
            notify=notify,
            clock=time.monotonic,
            is_producer=given.is_producer,
            is_consumer=given.is_consumer,
            kv_description=info.kv_description,
        )
    )


def _target_model(config: Config, loaded: LoadedModel, head: LMHead) -> TargetModel:
    return TargetModel(
        model=loaded.model,
        head=head,
        config=loaded.config,
        tokenizer=loaded.tokenizer,
        folder=loaded.folder,
        dtype=loaded.model.dtype,
        digest=loaded.weights_digest,
        block_size=config.cache.block_size,
        max_num_tokens=config.model.max_model_len or loaded.max_position_embeddings,
        trusts_code=config.model.trust_remote_code,
        runs_plain=config.model.enforce_eager,
    )


def check_proposers(config: Config, files: ModelFiles, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what drafts if it does not fit the target, as far as files tell. Raises: ConfigError, ModelError."""
    outline = TargetOutline(
        config=files.config,
        tokenizer=files.tokenizer,
        device=device,
        dtype=dtype,
        trusts_code=config.model.trust_remote_code,
        digest=lambda: files.weights_digest,
    )
    for name, settings in config.speculative.named_proposers() if config.speculative else ():
        with _refused_as(name, settings):
            settings.check(outline)


def build_proposers(config: Config, target: TargetView) -> list[Proposer | HostProposer]:
    """What drafts, in the order in which it is asked; nothing without speculation. Raises: ConfigError, ModelError."""
    built: list[Proposer | HostProposer] = []
    for name, settings in config.speculative.named_proposers() if config.speculative else ():
        with _refused_as(name, settings):
            built.append(settings.build(target))
    return built


@contextmanager
def _refused_as(name: str, settings: ProposerConfig) -> Iterator[None]:
    """Let what a proposer refuses say which proposer it was, by its setting, and what its model is for instead."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        is_setting = str(error).partition(":")[0] in type(settings).model_fields
        likely = likely_methods("model", getattr(settings, "model", None))
        is_ours = settings.method in likely_methods("model", None)
        is_other = isinstance(error, ModelError) and is_ours and settings.method not in likely
        hint = f"; by its config.json it is for the method {likely[0]}" if is_other and len(likely) == 1 else ""
        raise type(error)(f"{name}{'.' if is_setting else ': '}{error}{hint}") from error


def _check_length(config: ModelConfig, files: ModelFiles) -> None:
    longest = files.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len ({config.max_model_len}) is above what the model was made for ({longest})")


def _acceptance(config: SpeculativeConfig | None) -> Acceptance:
    if config is None:
        return Acceptance()
    method = Method[config.acceptance.rejection_sample_method.upper()]
    return Acceptance(method, config.acceptance.rates(config.num_speculative_tokens))


def _graph_nbytes(
    build_runner: Callable[[Tensor], Runner], geometry: KVGeometry, sizes: Sequence[int], device: torch.device
) -> int:
    """What a runner with captured graphs takes besides the KV cache: measured on one without a cache."""

    def capture() -> Runner:
        runner = build_runner(allocate_kv(geometry, 2, device))
        runner.capture(sizes)
        return runner

    started_s = time.monotonic()
    nbytes = kept_nbytes(device, capture)
    logger.info(
        "CUDA graphs for batches up to %d and the batch's state take %d MiB, measured in %.1f s",
        sizes[-1],
        nbytes >> 20,
        time.monotonic() - started_s,
    )
    return nbytes


def _compilations(
    config: Config, decoders: Sequence[tuple[LoadedModel, KVGeometry]], num_threads: int
) -> list[Compilation]:
    """What compiles the layers of models whose operators are all C++; the others run as they are."""
    if config.model.compile == "none":
        return []
    found: list[Compilation] = []
    for loaded, geometry in decoders:
        attention = loaded.model.config._attn_implementation
        if attention == CPU_ATTENTION_NAME:
            order = CompileOrder(
                model_folder=str(loaded.folder),
                dtype=str(loaded.model.dtype).removeprefix("torch."),
                kv_dtype=str(geometry.dtype).removeprefix("torch."),
                attention=attention,
                kv_shape=(geometry.num_layers, geometry.num_kv_heads, geometry.block_size, 2 * geometry.head_dim),
                num_threads=num_threads,
                trusts_code=config.model.trust_remote_code,
            )
            found.append(Compilation(loaded.model, order, config.model.compile))
    return found


def _draft_geometry(shape: KVShape, block_size: int) -> KVGeometry:
    return KVGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, shape.dtype)


def _log_if_never_compiled(config: ModelConfig, device: torch.device) -> None:
    if config.compile != "wait":
        return
    if config.enforce_eager:
        logger.warning("the decoder layers are not compiled, although compile is wait: enforce_eager excludes it")
    elif config.batch_invariant and device.type == "cuda":
        logger.warning(
            "the decoder layers are not compiled, although compile is wait: batch_invariant excludes it on CUDA"
        )


def _check_budget(config: Config) -> None:
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({scheduler.max_num_seqs}): each running sequence needs a token per step"
        )


def _model_info(
    config: Config,
    loaded: LoadedModel,
    num_kv_blocks: int,
    device: torch.device,
    kv_dtype: torch.dtype,
    proposers: Sequence[Proposer | HostProposer],
) -> ModelInfo:
    longest, asked = loaded.max_position_embeddings, config.model.max_model_len
    pool_tokens = num_kv_blocks * config.cache.block_size
    max_model_len = asked if asked is not None else min(longest, pool_tokens)
    if asked is None and max_model_len < longest:
        logger.warning(
            "max_model_len is %d, what the KV cache holds; the model was made for %d", max_model_len, longest
        )
    speculative = config.speculative
    return ModelInfo(
        model=loaded.source,
        served_model_name=config.model.served_model_name or loaded.source,
        architecture=loaded.architecture,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        max_request_len=min(max_model_len, pool_tokens),
        eos_token_ids=loaded.eos_token_ids,
        generation_defaults=loaded.generation_defaults,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(device),
        block_size=config.cache.block_size,
        num_kv_blocks=num_kv_blocks,
        speculative_method="none" if speculative is None else speculative.method,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
        rejection_sample_method=_acceptance(speculative).method.name.lower(),
        speculation_metrics=config.observability.speculation_metrics,
        drafts_on_host=any(isinstance(proposer, HostProposer) for proposer in proposers),
        fingerprint=kv_fingerprint(loaded.fingerprint, kv_dtype),
        kv_description=describe_kv(loaded.weights_digest, loaded.config, loaded.model.dtype, kv_dtype),
    )


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
