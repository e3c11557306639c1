"""Prompts, limits and ids against the model, as every front checks them."""

from pathlib import Path
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.guidance.params import StructuredOutputsParams
from server.preprocess import ChatPrompt, Preprocessor, Prompt, TextPrompt, TokensPrompt
from server.request import Request, SamplingParams, SpeculationOptions
from server.tokenizer import Tokenizer, longest_token
from tests.fakes.front import tiny_model_info
from tests.fakes.tokenizers import tiny_tokenizer

TO_THE_END = SamplingParams(max_tokens=None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def preprocessor(tokenizer: Tokenizer) -> Preprocessor:
    return Preprocessor(tokenizer, tiny_model_info())


def build(preprocessor: Preprocessor, prompt: Prompt, sampling: SamplingParams = TO_THE_END) -> Request:
    return preprocessor.build(prompt, sampling, request_id="r")


def refusal(preprocessor: Preprocessor, prompt: Prompt, sampling: SamplingParams = TO_THE_END) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        build(preprocessor, prompt, sampling)
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize("pool", [512, 10_000])
def test_prompt_one_below_the_limit_yields_one_token(tokenizer: Tokenizer, pool: int) -> None:
    preprocessor = Preprocessor(tokenizer, tiny_model_info(max_request_len=pool))
    assert build(preprocessor, TokensPrompt([5] * 511)).sampling.max_tokens == 1
    assert build(preprocessor, TokensPrompt([5] * 511), SamplingParams(max_tokens=100)).sampling.max_tokens == 1


@pytest.mark.parametrize("length", [512, 513, 5000])
def test_prompt_at_or_over_the_limit_names_both_numbers(preprocessor: Preprocessor, length: int) -> None:
    description = refusal(preprocessor, TokensPrompt([5] * length))["token_ids.ids"]
    assert str(length) in description
    assert "512" in description


def test_unset_max_tokens_ends_with_the_pool(preprocessor: Preprocessor) -> None:
    assert build(preprocessor, TokensPrompt([5] * 100)).sampling.max_tokens == 300


def test_explicit_max_tokens_that_the_pool_cannot_hold_is_refused(preprocessor: Preprocessor) -> None:
    assert build(preprocessor, TokensPrompt([5] * 100), SamplingParams(max_tokens=300)).sampling.max_tokens == 300
    description = refusal(preprocessor, TokensPrompt([5] * 100), SamplingParams(max_tokens=301))["sampling.max_tokens"]
    assert "401" in description
    assert "400" in description


def test_prompt_that_the_pool_cannot_hold_is_refused(preprocessor: Preprocessor) -> None:
    assert build(preprocessor, TokensPrompt([5] * 399)).sampling.max_tokens == 1
    description = refusal(preprocessor, TokensPrompt([5] * 400))["token_ids.ids"]
    assert description.count("400") == 2


def test_min_tokens_is_capped_with_max_tokens(tokenizer: Tokenizer) -> None:
    preprocessor = Preprocessor(tokenizer, tiny_model_info(max_request_len=512))
    sampling = build(preprocessor, TokensPrompt([5] * 510), SamplingParams(max_tokens=50, min_tokens=40)).sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "text"),
        (TokensPrompt([]), "token_ids.ids"),
        (ChatPrompt([]), "chat.messages"),
        (TextPrompt("lone \ud800"), "text"),
    ],
)
def test_prompts_without_tokens_are_refused(preprocessor: Preprocessor, prompt: Prompt, field: str) -> None:
    assert list(refusal(preprocessor, prompt)) == [field]


@pytest.mark.parametrize("token_id", [512, 2**32 - 1, -1])
def test_ids_outside_the_vocabulary_are_named_in_every_field(preprocessor: Preprocessor, token_id: int) -> None:
    good = TokensPrompt([1])
    assert list(refusal(preprocessor, TokensPrompt([1, token_id, 2]))) == ["token_ids.ids[1]"]
    for sampling, field in (
        (SamplingParams(stop_token_ids=[token_id]), "sampling.stop_token_ids[0]"),
        (SamplingParams(allowed_token_ids=[3, token_id]), "sampling.allowed_token_ids[1]"),
        (SamplingParams(logit_bias={token_id: 1.0}), f"sampling.logit_bias[{token_id}]"),
    ):
        assert list(refusal(preprocessor, good, sampling)) == [field]
    with pytest.raises(InvalidRequest, match="token_ids"):
        preprocessor.detokenize([1, token_id])


def test_the_last_id_of_the_vocabulary_is_taken(preprocessor: Preprocessor) -> None:
    sampling = SamplingParams(stop_token_ids=[511], allowed_token_ids=[511], logit_bias={511: 1.0})
    assert build(preprocessor, TokensPrompt([511]), sampling).stop_token_ids == {511, 2}


def test_a_list_of_bad_ids_is_cut_short(preprocessor: Preprocessor) -> None:
    assert len(refusal(preprocessor, TokensPrompt([9999] * 500))) == 16


def test_eos_stops_unless_ignored(preprocessor: Preprocessor) -> None:
    prompt = TokensPrompt([7])
    assert build(preprocessor, prompt, SamplingParams(stop_token_ids=[9])).stop_token_ids == {9, 2}
    assert build(preprocessor, prompt, SamplingParams(stop_token_ids=[9], ignore_eos=True)).stop_token_ids == {9}


def test_bad_words_match_at_the_start_and_after_a_space(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert len(ids("first")) == len(ids(" first")), "the case needs a word that is as long either way"
    for word in ("first", " first"):
        request = build(preprocessor, TokensPrompt([7]), SamplingParams(bad_words=[word]))
        assert request.bad_words_token_ids == (ids("first"), ids(" first"))
    assert len(ids("zq")) != len(ids(" zq")), "the case needs a word that a space makes longer"
    assert build(preprocessor, TokensPrompt([7]), SamplingParams(bad_words=["zq"])).bad_words_token_ids == (ids("zq"),)
    assert list(refusal(preprocessor, TokensPrompt([7]), SamplingParams(bad_words=["x", "  "]))) == [
        "sampling.bad_words[1]"
    ]


def test_chat_is_rendered_with_the_template(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert list(build(preprocessor, ChatPrompt([("user", "hi")])).prompt_token_ids) == expected
    assert expected[0] == 1, "special tokens of the template are tokens, not text"


def test_a_template_that_fails_refuses_the_conversation(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    description = refusal(Preprocessor(tokenizer, tiny_model_info()), ChatPrompt([("user", "hi")]))["chat"]
    assert "roles must alternate" in description


def test_a_model_without_template_refuses_chat(tmp_path: Path) -> None:
    preprocessor = Preprocessor(tiny_tokenizer(tmp_path, chat_template=None), tiny_model_info())
    assert not preprocessor.has_chat_template
    assert "no chat template" in refusal(preprocessor, ChatPrompt([("user", "hi")]))["chat"]


@pytest.mark.parametrize(("wanted", "is_valid"), [(0, True), (5, True), (6, False), (2**32 - 1, False)])
def test_drafts_are_bounded_by_the_server(preprocessor: Preprocessor, wanted: int, is_valid: bool) -> None:
    speculation = SpeculationOptions(num_speculative_tokens=wanted)

    def build_it() -> Request:
        return preprocessor.build(TokensPrompt([1]), TO_THE_END, request_id="r", speculation=speculation)

    if is_valid:
        resolved = build_it().speculation
        assert (resolved.enabled, resolved.num_speculative_tokens, resolved.metrics) == (True, wanted, "summary")
    else:
        with pytest.raises(InvalidRequest, match=r"speculation\.num_speculative_tokens: must be from 0 to .* 5"):
            build_it()


@pytest.mark.parametrize("method", ["standard", "synthetic"])
def test_what_is_left_open_is_as_the_server_is_configured(tokenizer: Tokenizer, method: str) -> None:
    info = tiny_model_info(rejection_sample_method=method, speculation_metrics="detailed")
    preprocessor = Preprocessor(tokenizer, info)

    def build_it(sampling: SamplingParams, **options: Any) -> SpeculationOptions:
        asked = SpeculationOptions(**options)
        return preprocessor.build(TokensPrompt([1]), sampling, request_id="r", speculation=asked).speculation

    is_synthetic = method == "synthetic"
    unseeded = build_it(SamplingParams())
    assert unseeded == SpeculationOptions(num_speculative_tokens=5, metrics="detailed", is_synthetic=is_synthetic)
    assert build_it(SamplingParams(), metrics="summary").metrics == "summary"
    assert not build_it(SamplingParams(seed=1)).is_synthetic
    assert not build_it(SamplingParams(temperature=0)).is_synthetic


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_request_ids_have_bounds(preprocessor: Preprocessor, request_id: str) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        preprocessor.build(TokensPrompt([1]), TO_THE_END, request_id=request_id)


def test_text_beyond_any_context_is_refused_untokenised(
    preprocessor: Preprocessor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = longest_token(tokenizer)
    assert longest is not None
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode", None)
        assert "characters" in refusal(preprocessor, TextPrompt("x" * (longest * 512 + 1)))["text"]
    # One character less might fit for all we know, so it is counted in tokens.
    assert "tokens, but" in refusal(preprocessor, TextPrompt("x" * (longest * 512)))["text"]


def test_token_text_may_be_a_part_of_a_character(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("😶", add_special_tokens=False)[0]
    assert preprocessor.token_text(first) == "\ufffd"
    assert preprocessor.token_text(2) == "<|im_end|>"


def test_a_grammar_comes_with_its_end(preprocessor: Preprocessor) -> None:
    """Even where EOS is to be ignored: it is then what follows when the grammar allows nothing else."""
    constraint = StructuredOutputsParams(regex="a+")
    sampling = SamplingParams(structured_outputs=constraint, ignore_eos=True, stop_token_ids=[7])
    request = build(preprocessor, TextPrompt("x"), sampling)
    assert request.grammar is not None
    assert request.stop_token_ids == {2, 7}
    assert build(preprocessor, TextPrompt("y"), sampling).grammar is request.grammar
    assert build(preprocessor, TextPrompt("x")).grammar is None


def test_a_bad_grammar_is_refused_by_its_field(preprocessor: Preprocessor) -> None:
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    assert "unclosed group" in refusal(preprocessor, TextPrompt("x"), sampling)["sampling.regex"]


def test_a_grammar_and_synthetic_acceptance_exclude_each_other(tokenizer: Tokenizer) -> None:
    preprocessor = Preprocessor(tokenizer, tiny_model_info(rejection_sample_method="synthetic"))
    constraint = StructuredOutputsParams(json_object=True)
    refused = refusal(preprocessor, TextPrompt("x"), SamplingParams(structured_outputs=constraint))
    assert "synthetic" in refused["sampling.json_object"]
    greedy = SamplingParams(structured_outputs=constraint, temperature=0)  # its drafts are judged by the model
    assert build(preprocessor, TextPrompt("x"), greedy).grammar is not None
    off = SpeculationOptions(enabled=False)
    sampled = SamplingParams(structured_outputs=constraint)
    assert preprocessor.build(TextPrompt("x"), sampled, request_id="r", speculation=off).grammar is not None
