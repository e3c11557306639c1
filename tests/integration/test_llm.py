"""The offline API: what a script written for vLLM does with it."""

import asyncio
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from server import LLM, SamplingParams
from server.errors import ConfigError, EngineDead, InvalidRequest, ModelError, RequestFailed
from server.request import SpeculationOptions
from tests.fakes.eventually import eventually
from tests.fakes.thread_watch import no_thread_is_left
from tests.tiny_model import build_tiny_model

POISON = 77


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("llm"), poison_token_id=POISON))


@pytest.fixture(scope="module")
def llm(folder: str, device_name: str) -> Iterator[LLM]:
    with LLM(
        model=folder,
        device=device_name,
        dtype="float32",
        kv_cache_memory_bytes="4MiB",
        max_num_seqs=4,
        max_queued_requests=8,
        compile="none",
    ) as llm:
        yield llm


def test_the_usual_ngram_example(folder: str, device_name: str) -> None:
    """Nothing of it but the import and the model is ours (and what keeps a test quick)."""
    prompts = [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    llm = LLM(
        model=folder,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
        },
        device=device_name,
        compile="none",
    )
    outputs = llm.generate(prompts, sampling_params)

    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt == prompt
        assert len(output.outputs[0].token_ids) <= 16
        assert output.outputs[0].finish_reason in ("length", "stop")
        assert output.outputs[0].text
    llm.close()
    llm.close()


def test_outputs_are_in_the_order_of_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(80, 500) for _ in range(rng.randint(1, 9))]} for _ in range(40)]
    params = [SamplingParams(seed=i, max_tokens=1 + i % 5, ignore_eos=True) for i in range(40)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 5 for i in range(40)]
    assert len({output.request_id for output in outputs}) == 40
    again = llm.generate(prompts[7], params[7])[0]
    assert again.outputs[0].token_ids == outputs[7].outputs[0].token_ids


def test_prompts_of_each_kind(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    text, same, ids = llm.generate(["the dog", {"prompt": "the dog"}, {"prompt_token_ids": [81, 82]}], greedy)
    assert text.prompt == same.prompt == "the dog"
    assert ids.prompt is None
    assert text.outputs[0].token_ids == same.outputs[0].token_ids
    assert llm.generate("the dog", greedy)[0].outputs[0].text == text.outputs[0].text
    assert llm.generate([], greedy) == []


def test_defaults_are_those_of_vllm(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": [81, 82]}, SamplingParams(seed=1, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 16
    assert output.outputs[0].finish_reason == "length"


def test_a_repeated_prompt_is_cached_in_whole_blocks(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 170))}
    greedy = SamplingParams(temperature=0, max_tokens=2)
    first, second = (llm.generate(prompt, greedy)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 64
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_choices_logprobs_and_reasons_arrive(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": [81, 82, 83]}, params)[0]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert all(len(choice.logprobs) == len(choice.token_ids) == 6 for choice in output.outputs)
    assert [position.chosen.token_id for position in output.prompt_logprobs] == [82, 83]
    stop_id = output.outputs[0].token_ids[2]
    stopped = llm.generate(
        {"prompt_token_ids": [81, 82, 83]}, SamplingParams(seed=5, max_tokens=6, stop_token_ids=[stop_id])
    )[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_id)


def test_speculation_may_be_turned_off(folder: str, device_name: str) -> None:
    settings = {"device": device_name, "dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "compile": "none"}
    prompt = {"prompt_token_ids": [81, 82] * 20}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
        "policy": "fixed",
    }
    with LLM(model=folder, speculative_config=ngram, **settings) as llm:
        drafting = llm.generate(prompt, greedy)[0].outputs[0]
        off = llm.generate(prompt, greedy, speculation=SpeculationOptions(enabled=False))[0].outputs[0]
    with LLM(model=folder, speculative_config=None, **settings) as llm:
        never = llm.generate(prompt, greedy)[0].outputs[0]
    assert drafting.speculation.num_draft_tokens > 0
    assert off.speculation.num_draft_tokens == never.speculation.num_draft_tokens == 0
    assert drafting.token_ids == off.token_ids == never.token_ids


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    refused: list[Any] = ["", {"prompt_token_ids": []}, {"prompt_token_ids": [10**6]}, [{"text": "the dog"}], [["a"]]]
    refused += [None, 5, [5], b"a", {"prompt": 5}, {"prompt_token_ids": ["a"]}, {"prompt_token_ids": 5}, "\ud800"]
    for prompts in refused:
        with pytest.raises(InvalidRequest):
            llm.generate(prompts)
    with pytest.raises(InvalidRequest, match="2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequest):
        llm.generate("a", SamplingParams(stop_token_ids=[512]))
    with pytest.raises(InvalidRequest, match=r"bad_words\[0\]: must be valid Unicode"):
        llm.generate("a", SamplingParams(bad_words=["\ud800"]))


def test_options_of_another_type_are_refused_by_name(llm: LLM) -> None:
    others: list[Any] = [{"temperature": 0}, [{"temperature": 0}], [None]]
    for params in others:
        with pytest.raises(InvalidRequest, match="sampling_params: must be a SamplingParams, or a list of them, got"):
            llm.generate("a", params)
    off: Any = False
    with pytest.raises(InvalidRequest, match="speculation: must be a SpeculationOptions, got False"):
        llm.generate("a", speculation=off)


def test_what_an_interrupted_call_asked_for_ends_with_it(llm: LLM) -> None:
    """As by Ctrl-C in a notebook, which goes on with the same LLM."""

    def is_at_work() -> bool:
        return llm._engine.statistics().num_running > 0

    def interrupt() -> None:
        asyncio.run(eventually(is_at_work))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    generated = llm._engine.statistics().generation_tokens
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [81]}] * 32, SamplingParams(max_tokens=500, ignore_eos=True))
    thread.join()
    asyncio.run(eventually(lambda: not is_at_work(), timeout_s=30))
    assert llm._engine.statistics().generation_tokens - generated < 32 * 500


def test_a_request_that_breaks_raises_and_the_next_one_runs(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="NaN"):
        llm.generate([{"prompt_token_ids": [81]}, {"prompt_token_ids": [POISON]}], SamplingParams(max_tokens=200))
    assert llm.generate({"prompt_token_ids": [81]}, SamplingParams(max_tokens=3, ignore_eos=True))


def test_conversations_are_answered_by_the_models_template(llm: LLM, folder: str) -> None:
    """One alone as in a list; all in one batch, each as its ids are."""
    first = [{"role": "user", "content": "hi"}]
    second = [{"role": "system", "content": "be brief"}, *first]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in (first, second)
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    expected = [output.outputs[0].token_ids for output in llm.generate([{"prompt_token_ids": i} for i in ids], params)]
    answers = llm.chat([first, second], params)
    assert [answer.prompt_token_ids for answer in answers] == ids
    assert [answer.outputs[0].token_ids for answer in answers] == expected
    (alone,) = llm.chat(first, params)
    assert (alone.prompt, alone.outputs[0].token_ids) == (None, expected[0])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "chat.messages"),
        ("hi", "messages[0]"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": None}], "messages[1].content"),
    ],
)
def test_messages_that_are_none_are_refused(llm: LLM, messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_closed_one_says_so(folder: str, device_name: str) -> None:
    llm = LLM(model=folder, device=device_name, dtype="float32", kv_cache_memory_bytes="4MiB", compile="none")
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("a")


def test_a_model_that_fails_its_warm_up_leaves_no_thread_behind(tmp_path: Path, device_name: str) -> None:
    with no_thread_is_left(), pytest.raises(ModelError, match="warm-up"):
        LLM(
            model=str(build_tiny_model(tmp_path, poison_token_id=1)),
            device=device_name,
            dtype="float32",
            kv_cache_memory_bytes="4MiB",
        )


def test_wrong_settings_and_models_are_errors(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(model=folder, max_num_seq=4)
    with pytest.raises(ModelError):
        LLM(model=str(tmp_path))
