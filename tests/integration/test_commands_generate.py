"""`outrider generate` against a real server; where servers are lost, `outrider chat` too."""

import asyncio
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.errors import UnavailableError
from clients.requests import SamplingOptions
from server import cli
from server.commands.call_errors import explain
from server.engine.protocol import (
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    SpeculationStats,
    Started,
    StreamEvent,
    Timing,
    TokenLogprob,
)
from server.guidance.params import StructuredOutputsParams
from server.request import Request, SamplingParams, SpeculationOptions
from server.tokenizer import Tokenizer
from tests.fakes.command_line import Outrider, outrider_at
from tests.fakes.eventually import eventually
from tests.fakes.front import Front, running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine, finished
from tests.fakes.scripted_server import ScriptedServer, running_script

ROOT = Path(__file__).resolve().parents[2]


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


async def endless(request: Request) -> AsyncIterator[StreamEvent]:
    yield Delta(0, "a\n", (1,))
    await asyncio.Event().wait()


async def test_text_goes_to_stdout_and_nothing_to_stderr(
    outrider: Outrider, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await outrider("generate", "--token-ids", "5,6", "--max-tokens", "3") == 0
    assert capsys.readouterr() == ("<5><6><5>\n", "")


async def test_several_choices_come_one_after_the_other(outrider: Outrider, capsys: pytest.CaptureFixture[str]) -> None:
    assert await outrider("generate", "--token-ids", "5,6", "--max-tokens", "3", "--n", "2") == 0
    assert capsys.readouterr().out == "--- choice 0 (length)\n<5><6><5>\n--- choice 1 (length)\n<5><6><5>\n"


async def test_every_way_to_give_a_prompt(
    outrider: Outrider, engine: ScriptedEngine, front: Front, tmp_path: Path
) -> None:
    text = "The quick\nbrown fox "
    (tmp_path / "prompt.txt").write_text(text)
    assert await outrider("generate", text) == 0
    assert await outrider("generate", "-", stdin=text) == 0
    assert await outrider("generate", "--file", str(tmp_path / "prompt.txt")) == 0
    expected = tuple(await front.client.tokenize(text))
    assert [request.prompt_token_ids for request in engine.submitted] == [expected] * 3

    assert await outrider("generate", "hi", "--chat") == 0
    assert await outrider("generate", "hi", "--system", "Be brief.") == 0
    user = {"role": "user", "content": "hi"}
    assert [list(request.prompt_token_ids) for request in engine.submitted[3:]] == [
        await front.client.tokenize(messages=[user]),
        await front.client.tokenize(messages=[{"role": "system", "content": "Be brief."}, user]),
    ]


async def test_every_parameter_has_its_flag(outrider: Outrider, engine: ScriptedEngine) -> None:
    flags = {
        "temperature": "0.5",
        "top-k": "-1",
        "top-p": "0.25",
        "min-p": "0.125",
        "repetition-penalty": "1.5",
        "frequency-penalty": "-1",
        "presence-penalty": "2",
        "logit-bias": "3:-1.5,4:2",
        "bad-words": "first",
        "allowed-token-ids": "1,2,3,4",
        "seed": "-9",
        "n": "3",
        "max-tokens": "7",
        "min-tokens": "2",
        "stop": "end, or not",
        "stop-token-ids": "8",
        "logprobs": "0",
        "prompt-logprobs": "4",
    }
    switches = ("include-stop-str-in-output", "ignore-eos", "no-skip-special-tokens")
    named = {name.replace("-", "_") for name in (*flags, *switches)}
    constraints = {"json_schema", "json_object", "regex", "grammar", "choice"}  # at most one of them: see below
    assert {name.removeprefix("no_") for name in named} | constraints == set(SamplingOptions.__annotations__)
    arguments = [f"--{name}={value}" for name, value in flags.items()] + [f"--{name}" for name in switches]
    more = (
        "--json",
        "--no-speculation",
        "--num-speculative-tokens=2",
        "--speculation-metrics=detailed",
        "--priority=-4",
        "--cache-salt=s",
        "--request-id=mine",
    )
    assert await outrider("generate", "hi", *arguments, *more) == 0
    (request,) = engine.submitted
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_k=-1,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=-1,
        presence_penalty=2,
        logit_bias={3: -1.5, 4: 2},
        bad_words=["first"],
        allowed_token_ids=[1, 2, 3, 4],
        seed=-9,
        n=3,
        max_tokens=7,
        min_tokens=2,
        stop=["end, or not"],
        stop_token_ids=[8],
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=4,
        skip_special_tokens=False,
    )
    assert request.speculation == SpeculationOptions(enabled=False, num_speculative_tokens=2, metrics="detailed")
    assert (request.priority, request.cache_salt, request.request_id) == (-4, "s", "mine")


async def test_json_prints_every_event(
    outrider: Outrider, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    token = TokenLogprob(2, -0.5, 1)
    position = PositionLogprobs(token, (token,))

    async def script(request: Request) -> AsyncIterator[StreamEvent]:
        yield Started(request.request_id, 4, 1)
        yield PromptLogprobs((position,))
        yield Delta(0, "é", (5,), (position,))
        yield Delta(0, "\n.", (6, 7), (position, position))
        yield Finished(
            0,
            FinishReason.STOP,
            7,
            4,
            3,
            1,
            Timing(1, 2, 3, 4, 5),
            SpeculationStats(1, 5, 2, (0, 0, 1, 0, 0, 0), (5,), (2,)),
        )

    engine.script = script
    assert await outrider("generate", "hi", "--json", "--logprobs", "1", "--request-id", "r") == 0
    lines: list[Any] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    entry = {"token_id": 2, "logprob": -0.5, "rank": 1, "text": "<|im_end|>"}
    logprobs = {"chosen": entry, "top": [entry]}
    assert lines == [
        {"started": {"request_id": "r", "prompt_tokens": 4, "cached_tokens": 1}},
        {"prompt_logprobs": [logprobs]},
        {"delta": {"index": 0, "text": "é", "token_ids": [5], "logprobs": [logprobs]}},
        {"delta": {"index": 0, "text": "\n.", "token_ids": [6, 7], "logprobs": [logprobs, logprobs]}},
        {
            "finished": {
                "index": 0,
                "text": "é\n.",
                "token_ids": [5, 6, 7],
                "finish_reason": "stop",
                "stop_reason": 7,
                "usage": {"prompt_tokens": 4, "completion_tokens": 3, "cached_tokens": 1},
                "timing": {
                    "queue_seconds": 1,
                    "prefill_seconds": 2,
                    "decode_seconds": 3,
                    "time_to_first_token_seconds": 4,
                    "total_seconds": 5,
                    "transfer_seconds": 0,
                },
                "speculation": {
                    "num_spec_steps": 1,
                    "num_draft_tokens": 5,
                    "num_accepted_draft_tokens": 2,
                    "mean_acceptance_length": 3,
                    "draft_acceptance_rate": 0.4,
                    "acceptance_histogram": [0, 0, 1, 0, 0, 0],
                    "proposed_per_step": [5],
                    "accepted_per_step": [2],
                    "is_synthetic": False,
                },
            }
        },
    ]


async def test_what_speculation_did_goes_to_stderr_if_asked_for(
    outrider: Outrider, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(request: Request) -> AsyncIterator[StreamEvent]:
        yield Started(request.request_id, 4, 0)
        for index in range(request.sampling.n):
            yield Delta(index, "é", (5,))
            drafted = SpeculationStats(2, 10, 7, (0, 0, 1, 0, 0, 1), (5, 5), (2, 5))
            speculation = drafted if index == 0 else SpeculationStats()
            yield dataclasses.replace(finished(request, 1, index), speculation=speculation)

    engine.script = script
    assert await outrider("generate", "hi", "--speculation-metrics", "detailed") == 0
    printed = capsys.readouterr()
    assert printed.out == "é\n"
    assert printed.err.splitlines() == [
        "speculation: 7 of 10 drafts accepted, 70%, 4.50 tokens per step with drafts",
        "speculation: steps by how many they accepted: 0: 0, 1: 0, 2: 1, 3: 0, 4: 0, 5: 1",
        "speculation: accepted/drafted of each: 2/5 5/5",
    ]
    assert await outrider("generate", "hi", "--speculation-metrics", "summary", "--n", "2") == 0
    printed = capsys.readouterr()
    assert printed.out == "--- choice 0 (length)\né\n--- choice 1 (length)\né\n"
    assert printed.err.splitlines()[-1] == "speculation, choice 1: no step verified drafts"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--json-schema", '{"type": "object"}'], {"json": '{"type": "object"}'}),
        (["--json-schema", "FILE"], {"json": '{"type": "array"}'}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--grammar", "start: /a/"], {"grammar": "start: /a/"}),
        (["--grammar", "FILE"], {"grammar": "start: /a/"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_every_constraint_has_its_flag(
    outrider: Outrider, engine: ScriptedEngine, tmp_path: Path, flags: list[str], expected: dict[str, Any]
) -> None:
    (tmp_path / "file").write_text(expected.get("json") or "start: /a/")
    arguments = [str(tmp_path / "file") if flag == "FILE" else flag for flag in flags]
    assert await outrider("generate", "hi", *arguments) == 0
    (request,) = engine.submitted
    assert request.sampling.structured_outputs == StructuredOutputsParams(**expected)
    assert request.grammar is not None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "exactly one prompt"),
        (("hi", "--token-ids", "1"), 2, "exactly one prompt"),
        (("--file", "/no/such/file"), 2, "/no/such/file"),
        (("--token-ids", "1,x"), 2, "--token-ids: must be ID[,ID...], got '1,x'"),
        (("--token-ids", "1", "--chat"), 2, "--token-ids cannot be a message"),
        (("hi", "--timeout", "0"), 2, "--timeout: must be a number of seconds above 0"),
        (("hi", "--timeout", "abc"), 2, "--timeout: must be a number of seconds above 0, got 'abc'"),
        (("hi", "--max-tokens", "abc"), 2, "--max-tokens: must be an integer, got 'abc'"),
        (("hi", "--temperature", "hot"), 2, "--temperature: must be a number, got 'hot'"),
        (("hi", "--logit-bias", "504"), 2, "--logit-bias: must be ID:BIAS[,ID:BIAS...], got '504'"),
        (("hi", "--logprobs", "1"), 2, "--logprobs is reported with --json only"),
        (("hi", "--prompt-logprobs", "0"), 2, "--prompt-logprobs is reported with --json only"),
        (("hi", "--json-schema", "no/such"), 2, "--json-schema: 'no/such' cannot be read as a file"),
        (("hi", "--num-speculative-tokens", "-1"), 2, "--num-speculative-tokens: must be an integer of at least 0"),
        (("hi", "--grammar", ""), 2, "--grammar: must be a file or text, and is empty"),
        (("hi", "--regex", ""), 1, "sampling.regex: must not be empty"),
        (("hi", "--choice", ""), 1, "sampling.choice: must not be empty"),
        (("hi", "--json-schema", "false"), 1, "sampling.json_schema: Unsatisfiable schema: schema is false"),
        (("hi", "--json-schema", "{"), 1, "sampling.json_schema: is no JSON schema"),
        (("hi", "--regex", "a", "--choice", "a"), 1, "at most one of json_schema"),
        (("hi", "--temprature", "0"), 2, "did you mean --temperature?"),
        (("hi", "--temperature", "nan"), 1, "sampling.temperature"),
        (("hi", "--seed", str(2**63)), 1, "sampling.seed"),
        (("--token-ids", ""), 1, "the prompt has no tokens"),
    ],
)
async def test_mistakes_are_one_line(
    outrider: Outrider, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    assert await outrider("generate", *arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


async def test_a_deadline_is_an_error(
    outrider: Outrider, front: Front, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(request: Request) -> AsyncIterator[StreamEvent]:
        yield Delta(0, "a", (1,))
        await asyncio.Event().wait()

    engine.script = script
    line = f"outrider: {front.target}: no complete answer within --timeout 2 s\n"
    assert await outrider("generate", "hi", "--timeout", "2") == 1
    assert capsys.readouterr() == ("a\n", line), "the partial answer ends its line"
    assert await outrider("chat", "--timeout", "2", stdin="hi\n") == 1
    assert capsys.readouterr() == ("a\n", line)


async def test_json_ends_with_the_error(
    outrider: Outrider, engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.script = endless
    assert await outrider("generate", "hi", "--json", "--timeout", "0.2") == 1
    out, err = capsys.readouterr()
    message = "no complete answer within --timeout 0.2 s"
    assert json.loads(out.splitlines()[-1]) == {"error": {"code": "DEADLINE_EXCEEDED", "message": message}}
    assert message in err

    assert await outrider("generate", "hi", "--json", "--temperature", "nan") == 1
    (line,) = capsys.readouterr().out.splitlines()
    error = json.loads(line)["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert [violation["field"] for violation in error["violations"]] == ["sampling.temperature"]


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",), ("bench", "serve")])
def test_no_server_says_what_to_do(
    command: tuple[str, ...],
    unused_tcp_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert cli.main([*command, "--target", f"127.0.0.1:{unused_tcp_port}"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "Connection refused" in err
    assert "start one with `outrider serve`" in err


@pytest.mark.parametrize("wrong", ["127.0.0.1", "foo", "foo:", ":50051", "foo:http", "unix:"])
def test_a_target_names_its_port(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--target", wrong]) == 2
    assert capsys.readouterr().err == f"outrider: argument --target: give HOST:PORT or unix:PATH, got {wrong!r}\n"


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",)])
async def test_a_server_lost_within_an_answer_is_one_line(command: tuple[str, ...]) -> None:
    async with running_script(ScriptedServer(bursts=(1, 1), pause_s=60)) as script:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server", *command, "--target", script.address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hi\n")
        assert await process.stdout.read(1) == b"x"
    stdout, stderr = await process.communicate()
    assert (process.returncode, stdout) == (1, b"\n")
    words = f"outrider: {script.address}: the server shut down or was lost before the answer ended"
    assert stderr.decode().startswith(words)
    assert stderr.count(b"\n") == 1


def test_a_lost_server_is_named_as_such() -> None:
    lost = UnavailableError("Socket closed", grpc.StatusCode.UNAVAILABLE)
    assert explain(lost, 1) == "the server shut down or was lost before the answer ended (Socket closed)"


async def test_an_interrupt_ends_the_request(front: Front, engine: ScriptedEngine) -> None:
    engine.script = endless
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server", "generate", "hi", "--json", "--target", front.target),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    assert json.loads(await process.stdout.readline())["delta"]["text"] == "a\n", "each line is flushed"
    process.send_signal(signal.SIGINT)
    _, stderr = await process.communicate()
    assert process.returncode == 130
    assert stderr == b""
    await eventually(lambda: bool(front.calls()))
    assert [call.status for call in front.calls()] == ["CANCELLED"]
