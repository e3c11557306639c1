"""What two nodes stream as one is what one node streams: real servers on the tiny model."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.disaggregated import DisaggregatedClient
from clients.outputs import Choice, GenerationOutput
from tests.fakes.engine_under_test import ngram
from tests.fakes.eventually import eventually, eventually_stats
from tests.fakes.front import Front
from tests.fakes.hop import PATIENCE_S
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.served_model import served_model
from tests.tiny_model import build_tiny_model

PROMPT = [7, *range(30, 70)]
NUM_TOKENS = 16
MAX_LOGPROB_ERROR = 1e-4
"""Float32: a prompt that is computed in other chunks differs in its last bits."""

SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 5}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": SAMPLED,
    "one token": {**SAMPLED, "max_tokens": 1},
    "two tokens": {**SAMPLED, "max_tokens": 2},
    "three choices": {**SAMPLED, "n": 3},
    "three choices of one token": {**SAMPLED, "n": 3, "max_tokens": 1},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
    },
    "logprobs": {**SAMPLED, "n": 2, "logprobs": 3},
    "prompt_logprobs": {**SAMPLED, "logprobs": 0, "prompt_logprobs": 2},
    "stop tokens": {**SAMPLED, "n": 4, "stop_token_ids": range(3, 120)},
    "min_tokens": {**SAMPLED, "min_tokens": 3, "stop_token_ids": range(3, 300)},
    "stop strings": {**SAMPLED, "n": 4, "stop": ["e", "o", " t", "an"], "logprobs": 1},
    "stop strings included": {**SAMPLED, "n": 4, "stop": ["e", "on", "th"], "include_stop_str_in_output": True},
    "stop strings of min_tokens": {**SAMPLED, "n": 4, "min_tokens": 2, "stop": ["e", "o", "a"]},
    "special tokens": {**SAMPLED, "logit_bias": {1: 12.0, 2: 8.0}, "skip_special_tokens": False, "ignore_eos": True},
    "hidden special tokens": {**SAMPLED, "logit_bias": {1: 12.0}, "ignore_eos": True, "logprobs": 1},
    "grammar": {**SAMPLED, "n": 2, "regex": "(ab|cd){2,5}", "max_tokens": 40},
    "choice": {"temperature": 0.0, "choice": ["yes", "no"]},
    "bad words": {"temperature": 0.0, "bad_words": ["the", "e", " dog"]},
    "allowed tokens": {**SAMPLED, "allowed_token_ids": range(100, 104)},
    "no speculation": {"temperature": 0.0, "speculation": False},
}
INCOMPLETE = {**SAMPLED, "n": 4, "logprobs": 1, "ignore_eos": True}
"""With `allowed_token_ids` of single bytes above 127: characters that are incomplete at the hop."""


@dataclass
class Nodes:
    """One node that does all of it, and two that share the work."""

    alone: Front
    prefill: Front
    decode: Front
    client: DisaggregatedClient

    async def both(self, prompt: Mapping[str, Any], options: Mapping[str, Any]) -> list[GenerationOutput]:
        """What one node says, and what two say."""
        values = {"max_tokens": NUM_TOKENS, **options, **prompt}
        return [await self.alone.client.generate(**values), await self.client.generate(**values)]

    async def settle(self) -> None:
        """Every block of every node is free."""
        for node in (self.alone, self.prefill, self.decode):
            await eventually_stats(node.client, lambda stats: stats.kv_blocks_free == stats.kv_blocks_total)


@asynccontextmanager
async def running_nodes(
    folder: Path, *, kv_transfer: Mapping[str, Any] | None = None, **decode: object
) -> AsyncIterator[Nodes]:
    """Args:
    kv_transfer: the connector of both; without one both nodes could do all of it, and do as they are told.
    decode: further settings of the decode node.
    """
    plain: dict[str, object] = {"speculative_config": None}
    shared = {**plain, "kv_transfer_config": kv_transfer}
    roles = ("both", "both") if kv_transfer is None else ("prefill", "decode")
    async with AsyncExitStack() as stack:
        alone, first, second = [
            await stack.enter_async_context(served_model(folder, **settings))
            for settings in (plain, {**shared, "role": roles[0]}, {**shared, "role": roles[1], **decode})
        ]
        client = DisaggregatedClient(
            prefill=[first.target],
            decode=[second.target],
            min_prompt_tokens=0,
            remembers_prompts=False,
            hang_timeout_s=PATIENCE_S,
        )
        await stack.enter_async_context(client)
        yield Nodes(alone, first, second, client)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("hop"))


def assert_same(expected: GenerationOutput, found: GenerationOutput) -> None:
    assert len(expected.choices) == len(found.choices)
    for one, other in zip(expected.choices, found.choices, strict=True):
        assert (other.token_ids, other.text) == (one.token_ids, one.text)
        assert other.finished.finish_reason == one.finished.finish_reason
        assert other.finished.stop_reason == one.finished.stop_reason
        assert other.finished.usage.prompt_tokens == one.finished.usage.prompt_tokens
        assert other.finished.usage.completion_tokens == one.finished.usage.completion_tokens
        assert_same_logprobs(one, other)
    assert len(expected.prompt_logprobs) == len(found.prompt_logprobs)


def assert_same_logprobs(one: Choice, other: Choice) -> None:
    assert len(one.logprobs) == len(other.logprobs)
    for expected, found in zip(one.logprobs, other.logprobs, strict=True):
        for token, other_token in zip((expected.chosen, *expected.top), (found.chosen, *found.top), strict=True):
            assert (token.token_id, token.rank, token.text) == (
                other_token.token_id,
                other_token.rank,
                other_token.text,
            )
            assert abs(token.logprob - other_token.logprob) < MAX_LOGPROB_ERROR


async def ask_all(nodes: Nodes) -> None:
    """Each request by ids, at lengths around whole blocks; one as text and as a conversation."""

    async def ask(prompt: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        assert_same(*await nodes.both(prompt, options))

    decoded = [await nodes.alone.client.detokenize([token_id]) for token_id in range(3, 259)]
    odd_bytes = [token_id for token_id, text in enumerate(decoded, start=3) if text == "\ufffd"]
    conversation = [{"role": "user", "content": "naïve café"}]
    async with asyncio.TaskGroup() as tasks:
        for number, options in enumerate(REQUESTS.values()):
            tasks.create_task(ask({"token_ids": [number + 3, *PROMPT]}, options))
        for length in (1, 15, 16, 17, 33):
            tasks.create_task(ask({"token_ids": [100, *PROMPT][:length]}, REQUESTS["seed"]))
        for stop in ([], ["\ufffd"], ["é", "语"]):
            tasks.create_task(ask({"token_ids": PROMPT}, {**INCOMPLETE, "allowed_token_ids": odd_bytes, "stop": stop}))
        tasks.create_task(ask({"prompt": "Once upon a time there was a dog"}, REQUESTS["logprobs"]))
        tasks.create_task(ask({"messages": conversation}, REQUESTS["greedy"]))
    await nodes.settle()


async def test_without_a_connector_the_prompt_is_computed_again(folder: Path) -> None:
    async with running_nodes(folder) as nodes:
        await ask_all(nodes)


async def test_with_speculation_where_tokens_are_generated(folder: Path) -> None:
    async with running_nodes(folder, speculative_config=ngram(4)) as nodes:
        await ask_all(nodes)
        assert sum((await nodes.decode.client.stats()).draft_tokens_per_position) > 0


@pytest.fixture(params=CONNECTORS)
def kv_config(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, Any]:
    return kv_transfer(request, tmp_path)


async def test_blocks_of_the_prompt_come_from_the_other_node(folder: Path, kv_config: Mapping[str, Any]) -> None:
    async with running_nodes(folder, kv_transfer=kv_config) as nodes:
        await ask_all(nodes)
        before = (await nodes.decode.client.stats()).prefix_hit_tokens
        output = await nodes.client.generate(token_ids=[99, *PROMPT, *PROMPT], max_tokens=3)
        hits = (await nodes.decode.client.stats()).prefix_hit_tokens - before
        assert hits == len([99, *PROMPT, *PROMPT]) // 16 * 16, "every full block of a prompt that it has never seen"
        assert output.choices[0].finished.timing.transfer_seconds > 0
        assert output.choices[0].finished.usage.cached_tokens == 0, "nothing of it was cached where it was computed"
        await nodes.settle()


async def test_a_first_token_with_a_stop_string_is_the_prefill_nodes_alone(folder: Path) -> None:
    async with running_nodes(folder) as nodes:
        [token_id] = (
            (await nodes.alone.client.generate(token_ids=PROMPT, max_tokens=1, temperature=0)).choices[0].token_ids
        )
        text = await nodes.alone.client.detokenize([token_id])
        generation = nodes.client.generate(token_ids=PROMPT, max_tokens=9, temperature=0, stop=[text])
        output = await generation
        assert (output.text, output.choices[0].finished.stop_reason) == ("", text)
        assert generation.decode_target is None
        await nodes.settle()


async def test_leaving_at_any_moment_leaves_nothing(folder: Path) -> None:
    async with running_nodes(folder) as nodes:

        async def leave_after(num_deltas: int) -> None:
            num_read = 0
            async with nodes.client.generate(token_ids=[num_deltas + 3, *PROMPT], max_tokens=60, n=2) as generation:
                async for _ in generation:
                    num_read += 1
                    if num_read > num_deltas:
                        break

        await asyncio.gather(*map(leave_after, range(12)))
        await nodes.settle()
        await eventually(lambda: all(node.load == 0 for node in nodes.client._decode.nodes))


async def test_leases_that_nobody_wants_end_at_once(folder: Path) -> None:
    """They would last for an hour otherwise."""
    config = {"kv_connector": "tcp", "kv_connector_extra_config": {"lease_seconds": 3600}}
    async with running_nodes(folder, kv_transfer=config) as nodes:
        text = await nodes.alone.client.generate(token_ids=PROMPT, max_tokens=1, temperature=0).text()
        await nodes.prefill.client.generate(token_ids=PROMPT, max_tokens=9, temperature=0, stop=[text])
        await nodes.settle()
        output = await nodes.prefill.client.generate(token_ids=PROMPT, max_tokens=9, request_id="mine")
        assert output.choices[0].finished.finish_reason == "handed_on"
        stats = await nodes.prefill.client.stats()
        assert stats.kv_blocks_free < stats.kv_blocks_total
        assert await nodes.prefill.client.abort("mine") == {"mine": False}
        await nodes.settle()


async def test_a_choice_that_a_stop_string_ends_does_not_take_the_handle_along(folder: Path) -> None:
    async with running_nodes(folder, kv_transfer={"kv_connector": "tcp"}) as nodes:
        for seed in range(20):
            sampling: dict[str, Any] = {"seed": seed, "temperature": 1.5, "n": 2}
            output = await nodes.alone.client.generate(token_ids=PROMPT, max_tokens=1, **sampling)
            first, second = (choice.text for choice in output.choices)
            if first and first not in second:
                break
        output = await nodes.client.generate(token_ids=PROMPT, max_tokens=3, stop=[first], **sampling)
        assert output.choices[0].finished.stop_reason == first
        assert (await nodes.decode.client.stats()).prefix_hit_tokens == len(PROMPT) // 16 * 16
        await nodes.settle()
