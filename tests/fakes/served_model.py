"""A tiny model served for real: loader, scheduler, worker, speculation and front."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

from server.config import Config
from tests.fakes.device import DEVICE, few_batch_sizes
from tests.fakes.front import Front, running_server

SETTINGS: dict[str, object] = {
    "device": DEVICE,
    "dtype": "float32",
    "block_size": 16,
    "kv_cache_memory_bytes": 4 << 20,
    "compile": "none",
    "stream_interval": 1,
    "speculative_config": {
        "method": "ngram",
        "policy": "fixed",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
}


@asynccontextmanager
async def served_model(folder: Path, **settings: object) -> AsyncIterator[Front]:
    """Serve the model in `folder` until the block ends; `settings` are those of `outrider serve`."""
    from server.compose import build_core

    config = Config.from_kwargs(model=str(folder), **{**SETTINGS, **settings})
    with patch("server.compose.batch_sizes", few_batch_sizes):
        core = build_core(config)
    await core.engine.start()
    try:
        async with running_server(core.engine, core.preprocessor, core.bus, role=config.disaggregation.role) as front:
            yield front
    finally:
        await core.engine.stop()
