"""A tiny model behind the whole server, with the parts that a test of robustness must reach."""

import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.aio import AsyncClient
from protos.outrider.v1 import inference_pb2 as pb
from server.config import Config
from server.engine.engine import NativeEngine
from server.engine.step_loop import StepLoop
from server.preprocess import Preprocessor
from server.scheduler.scheduler import Scheduler
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually_stats
from tests.fakes.front import Front, running_server

BLOCK_SIZE = 16
BLOCK_NBYTES = BLOCK_SIZE * 2 * 2 * 32 * 4
"""Of the tiny model in float32: 2 layers, 2 KV heads, K and V of 16 each."""

SLOW = "a slow text: "
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "policy": "fixed",
}


class SlowTokenizer:
    """The model's tokenizer, but texts that begin with SLOW take a while.

    Attributes:
        encoding: the slow texts that are being encoded.
        begun: the slow texts that ever were.
    """

    def __init__(self, inner: Tokenizer, delay_s: float = 0.05) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self.encoding: list[str] = []
        self.begun: set[str] = set()
        self.chat_template: Any = inner.chat_template
        self.backend_tokenizer = inner.backend_tokenizer  # type: ignore[attr-defined]  # the protocol has no need of it

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        return self._inner.added_tokens_decoder

    def get_vocab(self) -> Mapping[str, int]:
        return self._inner.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if text.startswith(SLOW):
            with self._lock:
                self.encoding.append(text)
                self.begun.add(text)
            time.sleep(self._delay_s)
            with self._lock:
                self.encoding.remove(text)
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        return self._inner.apply_chat_template(
            conversation, tokenize=tokenize, add_generation_prompt=add_generation_prompt
        )


@dataclass
class RealServer:
    """A running server; `client` does not retry."""

    front: Front
    engine: NativeEngine
    steps: StepLoop
    scheduler: Scheduler
    tokenizer: SlowTokenizer

    @property
    def client(self) -> AsyncClient:
        """A client of it."""
        return self.front.client

    def is_live(self, request_id: str) -> bool:
        """Whether the engine has yet to end the request; its caller may read for longer."""
        return request_id in self.engine._live

    async def stats(self) -> pb.GetStatsResponse:
        """What GetStats says."""
        return await self.client.stats()

    async def settle(self) -> None:
        """Wait until nothing runs or waits and every block is free; the pool must be consistent then."""
        await eventually_stats(self.client, _is_idle, timeout_s=60)
        self.scheduler.check_integrity()


def _is_idle(stats: pb.GetStatsResponse) -> bool:
    return stats.num_running == stats.num_waiting == 0 and stats.kv_blocks_free == stats.kv_blocks_total


@asynccontextmanager
async def real_server(
    model: Path, *, num_blocks: int = 64, front: Mapping[str, object] | None = None, **settings: object
) -> AsyncIterator[RealServer]:
    """Serve the model in `model` in float32 until the block ends.

    Args:
        num_blocks: usable blocks of the KV pool, 16 tokens each.
        front: fields of ServerConfig.
        settings: any other setting, by its flag's name.
    """
    from transformers import AutoTokenizer

    from server.compose import build_core

    nbytes = (num_blocks + 1) * BLOCK_NBYTES
    fixed = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "compile": "none"}
    values: dict[str, object] = {**fixed, **settings}
    core = build_core(Config.from_kwargs(model=str(model), kv_cache_memory_bytes=nbytes, **values))
    tokenizer = SlowTokenizer(AutoTokenizer.from_pretrained(model))
    preprocessor = Preprocessor(tokenizer, core.engine.model_info)
    await core.engine.start()
    try:
        async with running_server(core.engine, preprocessor, core.bus, **(front or {})) as running:
            yield RealServer(running, core.engine, core.steps, core.scheduler, tokenizer)
    finally:
        await core.engine.stop()
