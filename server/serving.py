"""The process from its first signal to its last: serve, drain, stop."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable

from server.compose import Core, build_core
from server.config import Config
from server.errors import EngineDead
from server.rpc.address import check_address
from server.rpc.lifecycle import GrpcServer
from server.telemetry.pipeline import Telemetry

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A key, a supervisor, and the end of the terminal."""
READERS_POLL_S = 0.05


def serve(config: Config) -> None:
    """Serve until a signal to stop, then drain; a second one ends it at once.

    Raises: ConfigError, ModelError, before anything is served; EngineDead if the engine fails, so that the
        process ends and its supervisor starts another.
    """
    logging.basicConfig(level=config.observability.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    check_address(config.server)  # now rather than after minutes of loading
    # Before there is an event loop: that one would keep an interrupt to itself until the model is loaded.
    core = build_core(config)
    asyncio.run(_serve(config, core))


async def _serve(config: Config, core: Core) -> None:
    server = GrpcServer(config.server, core.engine, core.preprocessor, core.bus, role=config.disaggregation.role)
    is_serving = False
    telemetry = Telemetry.start(
        config.observability, core.engine, core.bus, lambda: is_serving, lambda: core.engine.is_alive, os.environ
    )
    port = await server.start()
    stopping = asyncio.Event()
    try:
        await core.engine.start(on_death=stopping.set)
        gc.collect()
        gc.freeze()  # the model's objects are here to stay: looking through them would cost a step tens of milliseconds
        _on_signal_to_stop(lambda _: stopping.set())  # before anybody is told that there is something to stop
        await server.set_serving()
        is_serving = True
        address = f"unix:{config.server.uds}" if config.server.uds else f"{config.server.host}:{port}"
        logger.info("serving %s on %s", core.engine.model_info.served_model_name, address)
        if config.server.admin_uds is not None:
            logger.info("taking admin calls on unix:%s", config.server.admin_uds)
        if telemetry.metrics_port is not None:
            logger.info("metrics on http://%s:%d/metrics", config.observability.metrics_host, telemetry.metrics_port)
        await stopping.wait()
        # By os._exit: an orderly end of the interpreter would wait for the step thread, or tear it down in its step.
        _on_signal_to_stop(os._exit)
        if not core.engine.is_alive:
            raise EngineDead("the engine has failed, see the log; start the server again")
        logger.info("stopping: live requests have %g s", config.server.shutdown_timeout_seconds)
    finally:
        is_serving = False
        gc.unfreeze()  # though the interpreter then ends a second later: Triton would tell of leaks on standard error
        until_s = core.engine.now() + config.server.shutdown_timeout_seconds
        await server.stop()
        await _wait_for_readers(core, until_s)
        await core.engine.stop()
        await asyncio.to_thread(telemetry.shutdown, 2.0)
        logger.info("stopped")


async def _wait_for_readers(core: Core, until_s: float) -> None:
    """Return once no KV is held for other nodes or stores, or at a moment of the engine's clock."""
    engine = core.engine
    if num_held := engine.statistics().num_held_blocks:
        logger.info("stopping: others may read %d KV blocks for %.1f s", num_held, max(0.0, until_s - engine.now()))
    # Whoever lets go of blocks tells the step thread alone.
    while engine.is_alive and engine.statistics().num_held_blocks and engine.now() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(READERS_POLL_S)


def _on_signal_to_stop(action: Callable[[int], object]) -> None:
    """Args: action: called with the exit code that a signal stands for, in place of what was called before."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, action, 128 + number)
