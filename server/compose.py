"""Builds every object once and wires it; the only module that knows all the classes."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from connectors.base import Connector, ConnectorContext
from server.composition.compilations import compilations_of
from server.composition.kv_cache import num_kv_blocks
from server.composition.model_info import model_info
from server.composition.proposers import build_proposers
from server.composition.target import load_target
from server.config import Config
from server.engine.engine import NativeEngine
from server.engine.speculation_control import SpeculationControl
from server.engine.step_loop import StepLoop
from server.errors import ConfigError
from server.events import EventBus
from server.kernels import jit
from server.kernels.rejection import Method
from server.kv.block_pool import BlockPool
from server.model.footprint import Footprint
from server.passing_thread import run_in_passing_thread
from server.preprocess import Preprocessor
from server.request import ModelInfo
from server.scheduler.policy_choice import MakePolicy, make_policy
from server.scheduler.scheduler import Scheduler
from server.speculative_config import SpeculativeConfig
from server.worker.buckets import batch_sizes
from server.worker.kv_tensors import allocate_kv
from server.worker.rejection import Acceptance
from server.worker.runner import Runner
from server.worker.warm_up import warm_up

logger = logging.getLogger(__name__)

CONNECTOR_SHUTDOWN_S = 5.0
"""How long blocks that are being saved may take once the engine has stopped."""
STREAM_PATIENCE_S = 0.03
"""How long a token may wait for the next ones on the CPU, if nothing else was asked for; see docs/adr/0018."""


@dataclass(frozen=True, slots=True)
class Core:
    """An engine on a loaded model, not started, and what turns prompts into its requests.

    Attributes: make_policy: decides how many drafts are verified, on what the engine runs on.
    """

    engine: NativeEngine
    steps: StepLoop
    preprocessor: Preprocessor
    scheduler: Scheduler
    bus: EventBus
    footprint: Footprint
    make_policy: MakePolicy


def build_core(config: Config) -> Core:
    """Load the model, size the KV pool, build the engine. Blocks for as long as loading takes.

    Raises: ConfigError, ModelError.
    """
    return run_in_passing_thread(partial(_build_core, config), "outrider-load")


def _build_core(config: Config) -> Core:
    _check_budget(config)
    target = load_target(config)
    loaded, device, num_slots = target.loaded, target.device, config.scheduler.max_num_seqs
    speculative = target.speculative
    proposers = build_proposers(speculative, target.view(config))
    acceptance = _acceptance(speculative)
    build_runner = partial(
        Runner, loaded.model, target.head, num_slots=num_slots, proposers=proposers, acceptance=acceptance
    )
    sizes = batch_sizes(num_slots) if jit.is_available(device) and not config.model.enforce_eager else []
    build_longest = partial(build_runner, max_tokens=target.max_num_tokens)
    num_blocks = num_kv_blocks(config, target, proposers, build_longest, sizes)
    info = model_info(config, target, proposers, acceptance, num_blocks - 1)
    kv = allocate_kv(target.geometry, num_blocks, device)
    connector = _connector(config, info, notify=lambda: steps.run_between_steps(lambda: None))
    runner = build_runner(
        kv,
        max_tokens=info.max_request_len,
        connector=None if connector is None else connector.worker,
        fingerprint=info.fingerprint.hex(),
        on_compute=(lambda: steps.hand_over()) if device.type == "cpu" else (lambda: None),
    )
    bus = EventBus()
    num_drafts = info.num_speculative_tokens
    writes_kv = any(getattr(each, "writes_kv", False) for each in proposers)
    policy_of = partial(make_policy, is_captured=bool(sizes), catches_up=writes_kv)
    scheduler = Scheduler(
        config.scheduler,
        info,
        BlockPool(num_blocks),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        clock=time.monotonic,
        num_lookahead_tokens=num_drafts if writes_kv else 0,
        connector=None if connector is None else connector.scheduler,
        reads_from=() if config.kv_transfer is None else config.kv_transfer.carriers("in"),
        fails_on_bad_loads=config.kv_transfer is not None and config.kv_transfer.kv_load_failure_policy == "fail",
        draft_policy=policy_of(speculative.policy, num_drafts) if speculative else None,
    )
    depth = config.scheduler.pipeline_depth
    compilations = compilations_of(config.model, target, proposers)

    def prepare() -> None:
        torch.set_num_threads(target.num_threads)  # each thread has a count of its own
        for compilation in compilations:
            compilation.prepare(steps.run_when_quiet)
        warm_up(runner, loaded.model, target.head, sizes, config.scheduler.max_num_batched_tokens)

    def end_transfers() -> None:
        if connector is not None and scheduler.external is not None:
            connector.worker.shutdown(CONNECTOR_SHUTDOWN_S)
            scheduler.external.end(connector.worker.get_finished())

    def cancel_compilations() -> None:
        for compilation in compilations:
            compilation.cancel()

    steps: StepLoop = StepLoop(
        scheduler,
        runner,
        bus,
        pipeline_depth=int(device.type == "cuda") if depth == "auto" else depth,
        stream_patience_s=STREAM_PATIENCE_S if config.server.stream_interval is None and device.type == "cpu" else 0.0,
        transferring=None if connector is None else runner,
        warm_up=prepare,
        clock=time.monotonic,
    )
    engine = NativeEngine(
        steps,
        loaded.tokenizer,
        info,
        SpeculationControl(speculative, proposers, scheduler.drafts, policy_of),
        max_queued_requests=config.scheduler.max_queued_requests,
        max_num_seqs=config.scheduler.max_num_seqs,
        stream_interval=config.server.stream_interval or 1,
        on_stop=cancel_compilations,
        on_stopped=end_transfers,
        clock=time.monotonic,
    )
    return Core(engine, steps, Preprocessor(loaded.tokenizer, info), scheduler, bus, target.footprint, policy_of)


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


def _acceptance(config: SpeculativeConfig | None) -> Acceptance:
    if config is None:
        return Acceptance()
    method = Method[config.acceptance.rejection_sample_method.upper()]
    return Acceptance(method, config.acceptance.rates(config.num_speculative_tokens))


def _check_budget(config: Config) -> None:
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({scheduler.max_num_seqs}): each running sequence needs a token per step"
        )
