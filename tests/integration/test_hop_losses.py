"""Decode nodes that are lost while they work: the answer is still that of one node."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from clients.disaggregated import DisaggregatedClient, DisaggregatedGeneration
from tests.fakes.served_model import served_model
from tests.integration.test_hop import PROMPT, assert_same
from tests.tiny_model import build_tiny_model

SAMPLED: Mapping[str, Any] = {"seed": 5, "temperature": 1.2, "max_tokens": 240, "ignore_eos": True}
REQUESTS: tuple[Mapping[str, Any], ...] = (
    {**SAMPLED, "temperature": 0.0},
    {**SAMPLED, "n": 3, "logprobs": 1},
    {**SAMPLED, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {**SAMPLED, "stop": ["no such text", "the the the"], "skip_special_tokens": False},
    {**SAMPLED, "min_tokens": 230, "stop_token_ids": range(3, 100)},
    {**SAMPLED, "regex": "(ab|cd){200,205}", "ignore_eos": False},
)
PROMPTS = [[3 + i, *PROMPT] for i in range(len(REQUESTS))]
NUM_TOKENS = 100
"""Of all requests, when a node is stopped: none is near its end, which would be lost for good."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("losses"))


@pytest.mark.full
async def test_the_other_decode_node_goes_on_where_the_first_one_was_lost(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill, *decode = [
            await stack.enter_async_context(served_model(folder, speculative_config=None)) for _ in range(3)
        ]
        client = await stack.enter_async_context(
            DisaggregatedClient(prefill=[prefill.target], decode=[node.target for node in decode], min_prompt_tokens=0)
        )
        asked = list(zip(PROMPTS, REQUESTS, strict=True))
        expected = [await prefill.client.generate(token_ids=prompt, **options) for prompt, options in asked]
        generations = [client.generate(token_ids=prompt, **options) for prompt, options in asked]
        num_tokens = 0
        is_time = asyncio.Event()

        async def read(generation: DisaggregatedGeneration) -> None:
            nonlocal num_tokens
            async for delta in generation:
                num_tokens += len(delta.token_ids)
                if num_tokens >= NUM_TOKENS:
                    is_time.set()

        async with asyncio.TaskGroup() as tasks:
            for generation in generations:
                tasks.create_task(read(generation))
            await is_time.wait()
            lost = max(decode, key=lambda node: len(unfinished(generations, node.target)))
            interrupted = unfinished(generations, lost.target)
            await lost.server.stop()
        assert any(generation.decode_target != lost.target for generation in interrupted)
        for output, generation in zip(expected, generations, strict=True):
            assert_same(output, generation.output)


def unfinished(generations: list[DisaggregatedGeneration], target: str) -> list[DisaggregatedGeneration]:
    """Those that a decode node works on."""
    return [each for each in generations if each.decode_target == target and not each.output.choices]
