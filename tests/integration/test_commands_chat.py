"""`outrider chat` against a real server."""

from collections.abc import AsyncIterator

import pytest

from server import cli
from server.engine.protocol import Delta, StreamEvent
from server.request import Request
from server.tokenizer import Tokenizer
from tests.fakes.command_line import Outrider, outrider_at
from tests.fakes.front import Front, running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine, echo


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(tiny_model_info())


@pytest.fixture
async def front(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[Front]:
    async with running_front(engine, tokenizer) as running:
        yield running


@pytest.fixture
def outrider(front: Front, monkeypatch: pytest.MonkeyPatch) -> Outrider:
    return outrider_at(front.target, monkeypatch)


async def test_chat_keeps_the_conversation(
    outrider: Outrider, engine: ScriptedEngine, front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(request: Request) -> AsyncIterator[StreamEvent]:
        async for event in echo(request):
            yield Delta(0, "A", (5,)) if isinstance(event, Delta) else event

    engine.script = script
    stdin = "one\n\n two \n/reset\nthree\n/exit\nfour\n"
    assert await outrider("chat", "--system", "S", "--max-tokens", "2", stdin=stdin) == 0
    assert capsys.readouterr() == ("AA\n" * 3, "")

    def message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    system, answer = message("system", "S"), message("assistant", "AA")
    expected = [
        [system, message("user", "one")],
        [system, message("user", "one"), answer, message("user", "two")],
        [system, message("user", "three")],
    ]
    assert [list(request.prompt_token_ids) for request in engine.submitted] == [
        await front.client.tokenize(messages=conversation) for conversation in expected
    ]


async def test_chat_from_a_pipe_stops_at_the_first_error(
    outrider: Outrider, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await outrider("chat", "--max-tokens", "2", stdin=f"{'x ' * 600}\nhi\n") == 1
    assert "max_model_len is 512" in capsys.readouterr().err
    assert not engine.submitted


def test_chat_offers_what_it_can_honour(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["chat", "--help"])
    out = capsys.readouterr().out
    assert "logprobs" not in out
    assert "--n N" not in out
    assert "--temperature" in out
    assert "/reset" in out
    assert "/exit" in out
