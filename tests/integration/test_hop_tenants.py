"""KV of one tenant is of no use to another, whatever that one says about where it is."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.channel import CHANNEL_OPTIONS
from clients.progress import Progress
from clients.requests import GenerateOptions, generate_request
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub
from tests.fakes.front import Front
from tests.fakes.hop import Counts, full_tokens, settle
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.served_model import served_model
from tests.tiny_model import build_tiny_model

NUM_TOKENS = 6
OWNER = "salt of a"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tenants"))


@dataclass(frozen=True)
class Nodes:
    """Two that share the work, driven message by message, as a client may that keeps to no rule."""

    prefill: Front
    decode: Front

    async def begun(self, prompt: list[int]) -> Progress:
        """A request of the owner's that the prefill node has handed on."""
        options = GenerateOptions(
            token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, cache_salt=OWNER
        )
        progress = Progress(generate_request(None, options))
        for message in await _messages(self.prefill, progress.first_request()):
            progress.take_in(message)
        return progress

    async def go_on(self, request: pb.GenerateRequest) -> tuple[list[int], Counts]:
        """All tokens of the only choice, and what the decode node has counted meanwhile."""
        before = Counts.of(await self.decode.client.stats())
        tokens = [
            token_id for begun in request.continuation.choices for token_id in begun.token_ids[: begun.delivered_tokens]
        ]
        for message in await _messages(self.decode, request):
            tokens += message.delta.token_ids
        return tokens, Counts.of(await self.decode.client.stats()) - before


async def _messages(node: Front, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with grpc.aio.insecure_channel(node.target, options=CHANNEL_OPTIONS) as channel:
        return [message async for message in InferenceStub(channel).Generate(request)]


@pytest.fixture
async def nodes(folder: Path, kv_config: Mapping[str, Any]) -> AsyncIterator[Nodes]:
    shared: dict[str, object] = {"speculative_config": None, "kv_transfer_config": kv_config}
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(served_model(folder, **shared, role=role)) for role in ("prefill", "decode")
        ]
        yield Nodes(first, second)
        for node in (first, second):
            await settle(node.client)


@pytest.fixture(params=CONNECTORS)
def kv_config(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, Any]:
    return kv_transfer(request, tmp_path)


def prompt_of(length: int, first: int) -> list[int]:
    return [first, *range(30, 29 + length)]


async def test_only_who_has_the_salt_gets_the_kv(nodes: Nodes) -> None:
    """Others have the same prompt, and even the owner's handle: they compute it, and their answer is right."""
    for number, salt in enumerate((OWNER, "salt of b", "")):
        length = 40 + number
        progress = await nodes.begun(prompt_of(length, number + 3))
        request = progress.continuation()
        request.cache_salt = salt
        tokens, counts = await nodes.go_on(request)
        loaded = full_tokens(length) if salt == OWNER else 0
        assert (counts.loaded, counts.hits) == (loaded, loaded)
        assert counts.computed == length - loaded
        alone, _ = await nodes.go_on(_plain(request))
        assert tokens == alone


async def test_what_the_owner_has_brought_here_is_not_for_others_either(nodes: Nodes) -> None:
    """It is in this node's own cache by then."""
    request = (await nodes.begun(prompt_of(40, 9))).continuation()
    _, counts = await nodes.go_on(request)
    assert counts.loaded == full_tokens(40)
    request.cache_salt = "salt of b"
    _, counts = await nodes.go_on(request)
    assert counts == Counts(computed=40, hits=0, loaded=0, failed_loads=counts.failed_loads)


async def test_another_prompt_gets_nothing_for_the_handle(nodes: Nodes) -> None:
    """Under the owner's own salt: a handle is no more than where to look."""
    request = (await nodes.begun(prompt_of(40, 10))).continuation()
    request.token_ids.ids[20] += 1
    tokens, counts = await nodes.go_on(request)
    [first] = request.continuation.choices[0].token_ids
    assert counts.loaded <= 16, "at most the block in which they are the same"
    plain = _plain(request)
    plain.token_ids.ids.append(first)
    plain.sampling.max_tokens = NUM_TOKENS - 1
    assert tokens == [first, *(await nodes.go_on(plain))[0]]


def _plain(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The same prompt of nobody who was here before, and nothing begun."""
    plain = pb.GenerateRequest()
    plain.CopyFrom(request)
    plain.ClearField("continuation")
    plain.ClearField("request_id")
    plain.cache_salt = f"{request.cache_salt} alone"
    return plain
