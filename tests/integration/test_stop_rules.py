"""Where an answer ends is the same with and without speculation, at every place of an accepted run.

The drafter knows the answer, so that runs of k + 1 tokens are accepted; the stop falls on each
offset of a run in turn, and so does the limit.
"""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import AutoTokenizer

from server.engine.protocol import FinishReason
from server.request import SamplingParams
from tests.fakes.engine_under_test import Answer, EngineUnderTest, engine_on
from tests.fakes.scripted_proposer import ScriptedProposer
from tests.tiny_model import build_tiny_model

K = 3
NUM_TOKENS = 12


@dataclass(frozen=True)
class Story:
    """A prompt, its greedy answer of `allowed` tokens, and the two engines that should tell it alike."""

    prompt: list[int]
    token_ids: list[int]
    allowed: list[int]
    plain: EngineUnderTest
    speculating: EngineUnderTest

    def both(self, params: list[SamplingParams]) -> tuple[list[Answer], list[Answer]]:
        """The answers without and with speculation."""
        prompts = [self.prompt] * len(params)
        plain, speculating = (e.generate(prompts, params) for e in (self.plain, self.speculating))
        return [outcome.only for outcome in plain], [outcome.only for outcome in speculating]

    def params(self, max_tokens: int, **others: Any) -> SamplingParams:
        """Greedy, over the story's tokens."""
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=1, allowed_token_ids=self.allowed, **others
        )

    def text(self, count: int) -> str:
        """The text of the first tokens of the answer."""
        return self.plain.core.preprocessor.detokenize(self.token_ids[:count])


@pytest.fixture(scope="module", params=[0, 1], ids=["depth-0", "depth-1"])
def story(
    tmp_path_factory: pytest.TempPathFactory, device_name: str, request: pytest.FixtureRequest
) -> Iterator[Story]:
    folder = build_tiny_model(tmp_path_factory.mktemp("stop"))
    proposer = ScriptedProposer(K, [])
    with (
        engine_on(folder, device_name, pipeline_depth=request.param) as plain,
        engine_on(folder, device_name, proposer=proposer, pipeline_depth=request.param) as speculating,
    ):
        whole = whole_characters(AutoTokenizer.from_pretrained(folder))
        rng = random.Random(0)
        token_ids: list[int] = []
        while len(set(token_ids)) < NUM_TOKENS:  # all differ, so that each can be the stop
            prompt = [rng.randrange(260, 400) for _ in range(8)]
            asked = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=whole)
            token_ids = plain.generate([prompt], asked)[0].only.token_ids
        proposer.texts.append(prompt + token_ids)
        yield Story(prompt, token_ids, whole, plain, speculating)
        accepted = speculating.statistics().accepted_tokens_per_position
        assert len(accepted) == K
        assert min(accepted) > 0


def whole_characters(tokenizer: Any) -> list[int]:
    """Tokens whose text stands for itself."""
    texts = {token_id: tokenizer.decode([token_id], skip_special_tokens=True) for token_id in range(3, 512)}
    return [token_id for token_id, text in texts.items() if text and "\ufffd" not in text]


def assert_alike(plain: Answer, speculating: Answer) -> None:
    """Ids, text, log probabilities, usage and reason, joined from what was streamed."""
    assert speculating.token_ids == plain.token_ids
    assert speculating.text == plain.text
    assert len(plain.logprobs) == len(plain.token_ids)
    assert len(speculating.logprobs) == len(speculating.token_ids)
    for wanted, got in zip(plain.logprobs, speculating.logprobs, strict=True):
        assert got.chosen.token_id == wanted.chosen.token_id
        assert got.chosen.rank == wanted.chosen.rank
        assert got.chosen.logprob == pytest.approx(wanted.chosen.logprob, abs=1e-4)
    for answer in (plain, speculating):
        assert answer.end.num_completion_tokens == len(answer.token_ids)
    assert speculating.end.finish_reason == plain.end.finish_reason
    assert speculating.end.stop_reason == plain.end.stop_reason
    assert speculating.end.num_prompt_tokens == plain.end.num_prompt_tokens


OFFSETS = range(2 * (K + 1))
LIMITS = range(1, 2 * (K + 1) + 2)


@pytest.mark.parametrize("kind", ["stop id", "eos"])
def test_a_stop_token_at_every_offset_and_every_limit(story: Story, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for offset in OFFSETS:
        stop_id = story.token_ids[offset]
        others: dict[str, object] = {"ignore_eos": True, "stop_token_ids": [stop_id]}
        if kind == "eos":
            others = {}
            for engine in (story.plain, story.speculating):
                info = engine.core.preprocessor.model_info
                eos = dataclasses.replace(info, eos_token_ids=(stop_id,))
                monkeypatch.setattr(engine.core.preprocessor, "model_info", eos)
        asked = [story.params(limit, **others) for limit in LIMITS]
        for limit, plain, speculating in zip(LIMITS, *story.both(asked), strict=True):
            assert_alike(plain, speculating)
            assert plain.token_ids == story.token_ids[: min(offset + 1, limit)]
            is_stopped = offset < limit
            assert plain.end.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
            assert plain.end.stop_reason == (stop_id if is_stopped else None)
            # A stop token is in the ids and not in the text.
            assert plain.text == story.text(offset if is_stopped else limit)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_begins_and_ends_anywhere(story: Story, include: bool) -> None:
    """Every substring of 1 to 4 characters of the text: inside a token, over tokens, ending inside one."""
    text = story.text(2 * (K + 1))
    asked, stops = [], []
    for first in range(len(text)):
        for length in (1, 4):
            stop = text[first : first + length]
            if len(stop) == length:
                for limit in (5, 8, NUM_TOKENS):
                    stops.append(stop)
                    asked.append(story.params(limit, stop=stop, include_stop_str_in_output=include, ignore_eos=True))
    whole = story.text(NUM_TOKENS)
    num_stopped = 0
    for stop, plain, speculating in zip(stops, *story.both(asked), strict=True):
        assert_alike(plain, speculating)
        if plain.end.finish_reason is FinishReason.STOP:
            num_stopped += 1
            assert plain.end.stop_reason == stop
            end = whole.index(stop) + (len(stop) if include else 0)
            assert plain.text == whole[:end]
            # Ids run through the token that completes the match, and no further.
            count = len(plain.token_ids)
            assert stop in story.text(count)
            assert stop not in story.text(count - 1)
    assert num_stopped > len(asked) / 3


def test_a_stop_string_goes_before_a_later_stop_token_and_after_an_earlier_one(story: Story) -> None:
    first, second = story.text(3)[len(story.text(2)) :], story.token_ids[5]
    asked = [
        story.params(12, stop=first, stop_token_ids=[second], ignore_eos=True),
        story.params(12, stop=story.text(7)[len(story.text(6)) :], stop_token_ids=[second], ignore_eos=True),
        story.params(3, stop=first, ignore_eos=True),  # match and limit on one token: the match wins
    ]
    plain, speculating = story.both(asked)
    for one, other in zip(plain, speculating, strict=True):
        assert_alike(one, other)
    assert plain[0].end.stop_reason == first
    assert plain[1].end.stop_reason == second
    assert plain[2].end.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("min_tokens", [1, 3, 4, 5, 9])
def test_min_tokens_puts_stops_off(story: Story, min_tokens: int) -> None:
    stop_id = story.token_ids[2]
    asked = [
        story.params(12, stop_token_ids=[stop_id], min_tokens=min_tokens, ignore_eos=True),
        story.params(12, stop=story.text(3)[len(story.text(2)) :], min_tokens=min_tokens, ignore_eos=True),
    ]
    plain, speculating = story.both(asked)
    for one, other in zip(plain, speculating, strict=True):
        assert_alike(one, other)
        assert len(one.token_ids) >= min_tokens
    assert stop_id not in plain[0].token_ids[:min_tokens]


def test_ignored_eos_is_an_ordinary_token(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (story.plain, story.speculating):
        info = dataclasses.replace(engine.core.preprocessor.model_info, eos_token_ids=(story.token_ids[4],))
        monkeypatch.setattr(engine.core.preprocessor, "model_info", info)
    plain, speculating = story.both([story.params(10, ignore_eos=True)])
    assert_alike(plain[0], speculating[0])
    assert plain[0].token_ids == story.token_ids[:10]
    assert plain[0].end.finish_reason is FinishReason.LENGTH
