"""The gRPC front on a free port before any engine, with its events collected."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from clients.aio import AsyncClient
from clients.retry import RetryPolicy
from server.config import ServerConfig
from server.engine.protocol import Engine
from server.events import CallFinished, Event, EventBus
from server.preprocess import Preprocessor
from server.request import ModelInfo
from server.rpc.lifecycle import GrpcServer
from server.tokenizer import Tokenizer

NO_RETRY = RetryPolicy(max_attempts=1)


def tiny_model_info(**changes: object) -> ModelInfo:
    """A ModelInfo that goes with the tiny model's tokenizer."""
    values: dict[str, object] = {
        "model": "/models/tiny",
        "served_model_name": "tiny",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 512,
        "max_model_len": 512,
        "max_request_len": 400,
        "eos_token_ids": (2,),
        "generation_defaults": {},
        "dtype": "float32",
        "device": "cpu",
        "block_size": 16,
        "num_kv_blocks": 64,
        "speculative_method": "ngram",
        "num_speculative_tokens": 5,
    }
    return ModelInfo(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Front:
    """A running front; `client` does not retry."""

    server: GrpcServer
    target: str
    client: AsyncClient
    events: list[Event]

    def calls(self, method: str = "Generate") -> list[CallFinished]:
        """The calls of a method that have ended."""
        return [event for event in self.events if isinstance(event, CallFinished) and event.method == method]


@asynccontextmanager
async def running_front(
    engine: Engine, tokenizer: Tokenizer, *, role: Any = "both", **settings: object
) -> AsyncIterator[Front]:
    """Serve `engine` until the block ends; `settings` are ServerConfig fields."""
    preprocessor = Preprocessor(tokenizer, engine.model_info)
    async with running_server(engine, preprocessor, EventBus(), role=role, **settings) as front:
        yield front


@asynccontextmanager
async def running_server(
    engine: Engine, preprocessor: Preprocessor, bus: EventBus, *, role: Any = "both", **settings: object
) -> AsyncIterator[Front]:
    """The same with a preprocessor and a bus that are there already."""
    config = ServerConfig.model_validate({"port": 0, "shutdown_timeout_seconds": 0, **settings})
    events: list[Event] = []
    bus.subscribe(events.append)
    server = GrpcServer(config, engine, preprocessor, bus, role=role)
    port = await server.start()
    await server.set_serving()
    target = f"unix:{config.uds}" if config.uds else f"127.0.0.1:{port}"
    try:
        async with AsyncClient(target, retry=NO_RETRY) as client:
            yield Front(server, target, client, events)
    finally:
        await server.stop()
