"""`outrider generate --prefill --decode`, and the blocking client under it."""

import asyncio
import dataclasses
import io
import json
from collections.abc import AsyncIterator
from functools import partial

import pytest

from clients.disaggregated_sync import BlockingDisaggregatedClient
from clients.errors import InvalidRequestError
from server import cli
from server.engine.protocol import StreamEvent
from server.request import Request
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually
from tests.fakes.scripted_nodes import PROMPT, Nodes, expected, running_nodes, sharing, stopping_short

IDS = ",".join(map(str, PROMPT * 8))


async def outrider(nodes: Nodes, *arguments: str, command: str = "generate") -> int:
    targets = ["--prefill", nodes.fronts[0].target, "--decode", nodes.fronts[1].target]
    return await asyncio.to_thread(cli.main, [command, *targets, *arguments])


async def handing_on(request: Request) -> AsyncIterator[StreamEvent]:
    """As a node of role prefill, whatever is asked."""
    async for event in sharing(dataclasses.replace(request, hands_on=True)):
        yield event


async def test_the_answer_of_two_nodes_is_printed(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        assert await outrider(nodes, "--token-ids", IDS, "--max-tokens", "4") == 0
        assert capsys.readouterr().out == expected(4) + "\n"
        assert len(nodes.begun) == len(nodes.gone_on) == 1
        assert await outrider(nodes, "--token-ids", IDS, "--max-tokens", "3", "--json") == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [next(iter(event)) for event in events] == ["started", "delta", "delta", "delta", "finished"]
    assert events[-1]["finished"]["text"] == expected(3)


async def test_a_prefill_node_alone_gives_no_whole_answer(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_nodes(tokenizer, [handing_on], [sharing]) as nodes:
        alone = ["generate", "--target", nodes.fronts[0].target, "--token-ids", IDS]
        assert await asyncio.to_thread(cli.main, [*alone, "--max-tokens", "4"]) == 1
        out, error = capsys.readouterr()
        assert await asyncio.to_thread(cli.main, [*alone, "--max-tokens", "1"]) == 0
    assert out == expected(1) + "\n"
    assert "role prefill" in error


async def test_a_chat_with_a_prefill_node_alone_ends(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nare you there?\n"))
    async with running_nodes(tokenizer, [handing_on], [sharing]) as nodes:
        alone = ["chat", "--target", nodes.fronts[0].target, "--max-tokens", "4"]
        assert await asyncio.to_thread(cli.main, alone) == 1
        assert len(nodes.begun) == 1
    assert "role prefill" in capsys.readouterr().err


async def test_a_chat_with_two_nodes(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    any_prompt = partial(BlockingDisaggregatedClient, min_prompt_tokens=1)
    monkeypatch.setattr("server.commands.node_flags.BlockingDisaggregatedClient", any_prompt)
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        assert await outrider(nodes, "--max-tokens", "4", command="chat") == 0
        assert len(nodes.begun) == len(nodes.gone_on) == 1
        prompt = nodes.begun[0].prompt_token_ids
    assert capsys.readouterr().out == "".join(f"<{token_id}>" for token_id in prompt[:4]) + "\n"


async def test_the_first_failure_is_named(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        assert await outrider(nodes, "--token-ids", IDS, "--max-tokens", "0") == 1
        error = capsys.readouterr().err
    assert f"{nodes.fronts[0].target},{nodes.fronts[1].target}: sampling.max_tokens" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "a:1"], "--prefill needs --decode"),
        (["--decode", "a:1", "--target", "b:1"], "either --target or"),
        (["--prefill", "nowhere", "--decode", "a:1"], "HOST:PORT"),
    ],
)
def test_flags_that_contradict_are_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["generate", "hello", *flags])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert words in capsys.readouterr().err


async def test_the_blocking_client_is_the_other_one_in_a_thread(tokenizer: Tokenizer) -> None:
    def ask(nodes: Nodes) -> None:
        prefill, decode = ([front.target] for front in nodes.fronts)
        with BlockingDisaggregatedClient(prefill=prefill, decode=decode, min_prompt_tokens=8) as client:
            generation = client.generate(token_ids=PROMPT, max_tokens=4)
            assert "".join(delta.text for delta in generation) == expected(4)
            assert generation.started is not None
            assert generation.finished[0].finish_reason == "length"
            assert client.generate(token_ids=PROMPT, max_tokens=3).text() == expected(3)
            with pytest.raises(InvalidRequestError):
                client.generate()
            nodes.decode[0].script = stopping_short
            with client.generate(token_ids=PROMPT[1:], max_tokens=4) as generation:
                assert next(iter(generation)).token_ids == (PROMPT[1],)
            leaving = client.generate(token_ids=PROMPT[2:], max_tokens=4)
            for _ in leaving.events():
                break

    async with running_nodes(tokenizer, [sharing], [sharing]) as nodes:
        await asyncio.to_thread(ask, nodes)
        await eventually(lambda: not any(engine.live for engine in (*nodes.prefill, *nodes.decode)))
