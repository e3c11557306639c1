"""Servers that `outrider bench disaggregated` starts."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from clients.aio import AsyncClient
from clients.errors import DeadlineExceededError
from clients.retry import RetryPolicy
from protos.outrider.v1 import inference_pb2 as pb
from server.commands.bench_disaggregated_process import LoggedProcess, free_port
from server.commands.bench_settings import resolve_compiled
from server.commands.own_module import module_command
from server.config_sources import ENV_PREFIX

_POLL_S = 0.5
_PROBE_NBYTES = 256 << 20
NO_RETRY = RetryPolicy(max_attempts=1)
HANG_TIMEOUT_S = 60.0
"""A node that is given up is one that was not measured: on cores that are shared all may come late."""


class ServerNode:
    """A server process that is ready.

    Attributes: target: where it answers. info: of its model. settings: all of them.
    """

    def __init__(self, target: str, info: pb.GetModelInfoResponse, settings: Mapping[str, object]) -> None:
        self.target = target
        self.info = info
        self.settings = settings


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Blocks of the KV cache, of all groups together. Attributes: nbytes: of one. num_tokens: in one."""

    nbytes: int
    num_tokens: int

    def room_for(self, count: int, num_tokens: int) -> int:
        """Bytes that so many sequences of this length fill."""
        return count * -(-num_tokens // self.num_tokens) * self.nbytes


class Starter:
    """Starts servers with settings in common."""

    def __init__(self, settings: Mapping[str, object], folder: Path, timeout_s: float) -> None:
        """Args:
        settings: as they were given by flags; the environment may have more.
        folder: for logs and files of settings. timeout_s: how long a start may take.
        """
        self._settings = dict(settings)
        self._folder = folder
        self._timeout_s = timeout_s

    def resolve(self, **settings: object) -> dict[str, object]:
        """All settings of a server with these. Raises: ConfigError."""
        return resolve_compiled({**self._settings, **settings}).config.flat()

    async def block_shape(self, cores: Sequence[int]) -> BlockShape:
        """What blocks the servers have, by what one makes of so much memory. Raises: see `running`."""
        async with self.running("probe", cores, kv_cache_memory_bytes=_PROBE_NBYTES) as node:
            return BlockShape(_PROBE_NBYTES // node.info.num_kv_blocks, node.info.block_size)

    @asynccontextmanager
    async def pair(
        self, prefill: Sequence[int], decode: Sequence[int], **settings: object
    ) -> AsyncIterator[tuple[ServerNode, ServerNode]]:
        """A prefill and a decode node, which start at the same time. Args: the cores of each. Raises: see `running`."""
        async with AsyncExitStack() as stack:
            one, other = await asyncio.gather(
                stack.enter_async_context(self.running("prefill", prefill, role="prefill", **settings)),
                stack.enter_async_context(self.running("decode", decode, role="decode", **settings)),
                return_exceptions=True,
            )
            if isinstance(one, BaseException):
                raise one
            if isinstance(other, BaseException):
                raise other
            yield one, other

    @asynccontextmanager
    async def running(self, name: str, cores: Sequence[int], **settings: object) -> AsyncIterator[ServerNode]:
        """A server with these settings besides the common ones, until the block ends.

        Raises: ConfigError; OutriderError if it does not start, with the last line of its log.
        """
        port = free_port()
        resolved = self.resolve(**{"role": "both", **settings}, host="127.0.0.1", port=port, uds=None)
        path = self._folder / f"{name.replace(' ', '-')}.yaml"
        path.write_text(json.dumps(resolved), encoding="utf-8")  # JSON is YAML
        command, environ = module_command("server", "serve", "--config", str(path))
        process = LoggedProcess(name, command, self._folder, cores, environ=environ, hidden_prefix=ENV_PREFIX)
        try:
            target = f"127.0.0.1:{port}"
            yield ServerNode(target, await self._ready(process, target), resolved)
        finally:
            await asyncio.to_thread(process.close)

    async def _ready(self, process: LoggedProcess, target: str) -> pb.GetModelInfoResponse:
        until_s = time.monotonic() + self._timeout_s
        async with AsyncClient(target, retry=RetryPolicy(max_attempts=1, initial_backoff_s=0.05)) as client:
            while True:
                process.check_alive()
                try:
                    await client.wait_ready(timeout_s=_POLL_S)
                    return await client.model_info(timeout_s=self._timeout_s)
                except DeadlineExceededError:
                    if time.monotonic() > until_s:
                        raise process.failure(f"was not ready within {self._timeout_s:g} s") from None
