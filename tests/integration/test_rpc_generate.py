"""Generate over a real connection: what arrives, and how a call ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from clients.aio import AsyncClient
from clients.errors import (
    CancelledCallError,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    MessageTooLargeError,
    OverloadedError,
    RequestFailedError,
)
from server.engine.protocol import (
    Delta,
    PositionLogprobs,
    PromptLogprobs,
    Started,
    StreamEvent,
    TokenLogprob,
)
from server.events import TokensStreamed
from server.preprocess import Preprocessor
from server.request import Request, SamplingParams
from server.tokenizer import Tokenizer
from tests.fakes.eventually import eventually
from tests.fakes.front import NO_RETRY, Front, running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine, finished


async def endless(request: Request) -> AsyncIterator[StreamEvent]:
    """Start, give one token, and go on for ever."""
    yield Started(request.request_id, len(request.prompt_token_ids), 0)
    yield Delta(0, "a", (1,))
    await asyncio.Event().wait()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(tiny_model_info(generation_defaults={"temperature": 0.25, "top_k": 7}))


@pytest.fixture
async def front(engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[Front]:
    async with running_front(engine, tokenizer) as running:
        yield running


async def test_deltas_join_to_the_whole(front: Front) -> None:
    generation = front.client.generate(token_ids=[5, 6, 7], max_tokens=4, n=3)
    deltas = [delta async for delta in generation]
    output = generation.output
    assert output.started is not None
    assert output.started.prompt_tokens == 3
    assert len(output.choices) == 3
    for choice in output.choices:
        mine = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in mine) == choice.text == "<5><6><7><5>"
        assert sum((delta.token_ids for delta in mine), ()) == choice.token_ids == (5, 6, 7, 5)
        assert choice.finished.finish_reason == "length"
        assert choice.finished.usage.completion_tokens == 4


async def test_presence_defaults_reach_the_engine(front: Front, engine: ScriptedEngine) -> None:
    await front.client.generate(token_ids=[5])
    await front.client.generate(token_ids=[5], top_k=0, max_tokens=2, speculation=False, priority=-3, cache_salt="s")
    unset, given = engine.submitted
    assert unset.sampling == SamplingParams(temperature=0.25, top_k=7, max_tokens=399)
    assert given.sampling == SamplingParams(temperature=0.25, top_k=0, max_tokens=2)
    assert (unset.priority, unset.cache_salt, unset.speculation.enabled) == (0, "", True)
    assert (given.priority, given.cache_salt, given.speculation.enabled) == (-3, "s", False)
    assert unset.request_id != given.request_id


async def test_prompts_are_tokenised_as_tokenize_does(front: Front, engine: ScriptedEngine) -> None:
    conversation = [{"role": "user", "content": "The brown dog"}]
    await front.client.generate("The brown dog", max_tokens=1)
    await front.client.generate(messages=conversation, max_tokens=1)
    text, chat = (list(request.prompt_token_ids) for request in engine.submitted)
    assert text == await front.client.tokenize("The brown dog")
    assert chat == await front.client.tokenize(messages=conversation)
    assert await front.client.detokenize(text) == "The brown dog"


async def test_bad_requests_name_fields_and_leave_nothing(front: Front, engine: ScriptedEngine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await front.client.generate("hi", top_p=2.0, logprobs=100)
    assert [violation.field for violation in caught.value.violations] == ["sampling.top_p", "sampling.logprobs"]
    with pytest.raises(InvalidRequestError) as caught:
        await front.client.generate(token_ids=[512])
    assert [violation.field for violation in caught.value.violations] == ["token_ids.ids[0]"]
    with pytest.raises(InvalidRequestError) as caught:
        await front.client.tokenize(messages=[{"role": "user", "content": "hi"}], add_special_tokens=False)
    assert [violation.field for violation in caught.value.violations] == ["add_special_tokens"]
    assert not engine.live
    assert not engine.submitted
    assert [call.status for call in front.calls()] == ["INVALID_ARGUMENT"] * 2


async def test_five_mebibytes_of_ids_are_refused_by_length(front: Front) -> None:
    with pytest.raises(InvalidRequestError, match=r"2621440 tokens, but max_model_len is 512"):
        await front.client.generate(token_ids=[300] * (5 << 19))


async def test_five_mebibytes_of_ids_are_taken_where_they_fit(tokenizer: Tokenizer) -> None:
    info = tiny_model_info(max_model_len=1 << 22, max_request_len=1 << 22)
    async with running_front(ScriptedEngine(info), tokenizer) as front:
        output = await front.client.generate(token_ids=[300] * (5 << 19), max_tokens=1)
    assert output.started is not None
    assert output.started.prompt_tokens == 5 << 19


async def test_a_live_id_is_refused_twice(front: Front, engine: ScriptedEngine) -> None:
    engine.script = endless
    first = front.client.generate("hi", request_id="mine")
    deltas = aiter(first)
    await anext(deltas)
    with pytest.raises(DuplicateRequestError, match="mine"):
        await front.client.generate("hi", request_id="mine")
    assert set(engine.live) == {"mine"}, "the first one is unharmed"
    assert await front.client.abort("mine", "other") == {"mine": True, "other": False}
    assert [delta async for delta in deltas] == []
    assert first.finished[0].finish_reason == "abort"
    assert [call.status for call in front.calls()] == ["ALREADY_EXISTS", "OK"]


async def test_an_id_is_in_use_until_its_client_has_read_all(front: Front, engine: ScriptedEngine) -> None:
    async def script(request: Request) -> AsyncIterator[StreamEvent]:
        for _ in range(8):
            yield Delta(0, "x" * (1 << 20), (1,))
        yield finished(request, 8)

    engine.script = script
    generation = front.client.generate("hi", request_id="mine")
    await eventually(lambda: bool(engine.submitted) and not engine.live)
    with pytest.raises(DuplicateRequestError):
        await front.client.generate("hi", request_id="mine")
    assert len(await generation.text()) == 8 << 20


async def test_a_full_queue_hints_when_to_come_back(front: Front, engine: ScriptedEngine) -> None:
    engine.max_live = 0
    with pytest.raises(OverloadedError) as caught:
        await front.client.generate("hi")
    assert caught.value.retry_after_s == 0.25


async def test_the_deadline_reaches_the_engine(front: Front, engine: ScriptedEngine) -> None:
    engine.script = endless
    with pytest.raises(DeadlineExceededError):
        await front.client.generate("hi", timeout_s=1.0)
    await eventually(lambda: bool(front.calls()))
    assert [call.status for call in front.calls()] == ["DEADLINE_EXCEEDED"]
    assert not engine.live


async def test_leaving_cancels_the_request(front: Front, engine: ScriptedEngine) -> None:
    engine.script = endless
    async for _ in front.client.generate("hi", request_id="left"):
        break
    await eventually(lambda: bool(front.calls()))
    assert engine.abort_calls == ["left"]
    assert not engine.live
    (call,) = front.calls()
    assert (call.status, call.request_id, call.num_completion_tokens) == ("CANCELLED", "left", 1)


async def test_a_vanished_client_cancels_its_requests(front: Front, engine: ScriptedEngine) -> None:
    engine.script = endless
    async with AsyncClient(front.target, retry=NO_RETRY) as leaving:
        generations = [leaving.generate("hi") for _ in range(5)]
        for generation in generations:
            await anext(aiter(generation))
    await eventually(lambda: len(front.calls()) == 5)
    assert not engine.live


class HeldPreprocessor:
    """Holds tokenising until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        self.entered, self.release = threading.Event(), threading.Event()
        build = Preprocessor.build

        def held(*args: object, **kwargs: object) -> Request:
            self.entered.set()
            assert self.release.wait(60)
            return build(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(Preprocessor, "build", held)


async def test_abort_works_while_tokenising(
    front: Front, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldPreprocessor(monkeypatch)
    try:
        generation = asyncio.ensure_future(front.client.generate("hi", request_id="early").result())
        await asyncio.to_thread(held.entered.wait, 60)
        assert await front.client.abort("early") == {"early": True}
        output = await generation
        assert output.started is None
        assert output.choices[0].finished.finish_reason == "abort"
    finally:
        held.release.set()
    assert not engine.submitted


async def test_cancel_works_while_tokenising(
    front: Front, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldPreprocessor(monkeypatch)
    try:
        generation = front.client.generate("hi", request_id="early")
        await asyncio.to_thread(held.entered.wait, 60)
        generation.cancel()
        with pytest.raises(CancelledCallError):
            await generation
        await eventually(lambda: bool(front.calls()))
        assert not engine.live
    finally:
        held.release.set()
    assert not engine.submitted


async def test_an_unknown_error_ends_its_request_alone(front: Front, engine: ScriptedEngine) -> None:
    async def broken(request: Request) -> AsyncIterator[StreamEvent]:
        yield Started(request.request_id, len(request.prompt_token_ids), 0)
        raise ValueError("a secret")

    engine.script = endless
    other = aiter(front.client.generate("hi", request_id="other"))
    await anext(other)
    engine.script = broken
    with pytest.raises(RequestFailedError, match="error id") as caught:
        await front.client.generate("hi")
    assert caught.value.error_id
    assert "secret" not in str(caught.value)
    assert set(engine.live) == {"other"}
    await front.client.abort("other")


async def test_messages_over_the_limit_name_it(front: Front) -> None:
    with pytest.raises(MessageTooLargeError, match=str(16 << 20)):
        await front.client.generate("x" * (100 << 20))
    assert await front.client.generate("still here", max_tokens=1).text()


async def test_logprobs_arrive_in_parts_with_texts(front: Front, engine: ScriptedEngine) -> None:
    token = TokenLogprob(2, -0.5, 1)
    position = PositionLogprobs(token, (token, TokenLogprob(1, -1.5, 2)))

    async def script(request: Request) -> AsyncIterator[StreamEvent]:
        yield Started(request.request_id, 1200, 0)
        yield PromptLogprobs((position,) * 1199)
        yield Delta(0, "late reader", (2,) * 1300, (position,) * 1300)
        yield finished(request, 1300)

    engine.script = script
    generation = front.client.generate("hi", logprobs=2, prompt_logprobs=2)
    deltas = [delta async for delta in generation]
    assert [len(delta.token_ids) for delta in deltas] == [len(delta.logprobs) for delta in deltas] == [1024, 276]
    assert [delta.text for delta in deltas] == ["", "late reader"]
    assert len(generation.output.prompt_logprobs) == 1199
    assert [token.text for token in deltas[0].logprobs[0].top] == ["<|im_end|>", "<|im_start|>"]


async def test_calls_are_recorded_once_with_metadata(front: Front) -> None:
    await front.client.generate("hi", max_tokens=2, seed=4, metadata=[("traceparent", "00-aa-bb-01")])
    await front.client.stats()
    await front.client.model_info()
    await front.client.tokenize("hi")
    await front.client.abort("nobody")
    (call,) = front.calls()
    assert call.metadata["traceparent"] == "00-aa-bb-01"
    assert (call.status, call.error, call.num_completion_tokens) == ("OK", "", 2)
    assert call.start_unix_ns <= call.end_unix_ns
    assert len(call.choices) == 1
    assert call.attributes["gen_ai.request.seed"] == 4
    for method in ("GetStats", "GetModelInfo", "Tokenize", "Abort"):
        assert [call.status for call in front.calls(method)] == ["OK"]
    streamed = [event for event in front.events if isinstance(event, TokensStreamed)]
    assert [event.gap_s is None for event in streamed] == [True, False]


async def test_model_and_statistics_arrive(front: Front) -> None:
    info = await front.client.model_info()
    assert (info.served_model_name, info.vocab_size, info.max_model_len) == ("tiny", 512, 512)
    assert (list(info.eos_token_ids), info.has_chat_template, info.speculative_method) == ([2], True, "ngram")
    assert info.rejection_sample_method == "standard"
    stats = await front.client.stats()
    assert (stats.num_running, stats.kv_blocks_total, list(stats.draft_tokens_per_position)) == (0, 64, [5, 4])


async def test_log_probabilities_fit_into_the_smallest_messages(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    token = TokenLogprob(2, -0.5, 2**31)
    position = PositionLogprobs(token, (token,) * 64)

    async def script(request: Request) -> AsyncIterator[StreamEvent]:
        yield PromptLogprobs((position,) * 100)
        yield Delta(0, "late reader", (2,) * 100, (position,) * 100)
        yield finished(request, 100)

    engine.script = script
    async with running_front(engine, tokenizer, max_message_bytes=1 << 16) as front:
        output = await front.client.generate("hi")
    assert len(output.prompt_logprobs) == len(output.choices[0].logprobs) == 100
