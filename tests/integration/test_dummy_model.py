"""A model that exists as a configuration alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from server import LLM, SamplingParams
from server.config import ModelConfig
from server.errors import InvalidRequest, ModelError
from server.model.loader import LoadedModel, load_model
from tests.tiny_model import build_tiny_model, write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model's config.json by itself."""
    config = (build_tiny_model(tmp_path / "whole") / "config.json").read_text()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(config)
    return bare


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), load_format="dummy", device="cpu", compile="none", kv_cache_memory_bytes=4 << 20) as llm:
        yield llm


def load(folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), load_format="dummy"), torch.device("cpu"), dtype)


def test_token_ids_are_generated_from(llm: LLM) -> None:
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9]}], GREEDY)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
    assert {output.outputs[0].text for output in outputs} == {""}


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(bad_words=("no",))])
def test_text_is_refused_with_the_remedy(llm: LLM, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequest, match=r"the model has no tokenizer: send token ids, or start it with --token"):
        llm.generate("Hello", params)


def test_a_tokenizer_in_the_folder_is_used(folder: Path) -> None:
    write_tokenizer(folder, 512)
    assert load(folder).tokenizer.encode("Hello", add_special_tokens=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_small_finite_and_the_same_each_time(folder: Path, dtype: torch.dtype) -> None:
    state = torch.random.get_rng_state()
    first, second = load(folder, dtype), load(folder, dtype)
    assert torch.equal(state, torch.random.get_rng_state()), "nobody else's random numbers are touched"
    assert first.fingerprint == second.fingerprint
    for (name, one), other in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.dtype is dtype
        assert not one.requires_grad
    assert 0.01 < first.model.model.layers[0].mlp.up_proj.weight.float().std() < 0.03
    assert first.model.model.norm.weight.float().mean() == 1


def test_weights_that_do_not_fit_are_refused_before_they_are_made(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 1 << 36}))
    with pytest.raises(ModelError, match="is too big for cpu"):
        load(folder)


@pytest.mark.parametrize("model", ["smollm2-135m", "/no/such/folder"])
def test_what_is_no_folder_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match=f"--load-format dummy takes a folder with a config.json, and {model} is none"):
        load(model)
