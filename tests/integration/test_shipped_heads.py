"""The heads that come with Outrider: whose they are, when they are used, and that they draft well."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from proposers.shipped import FOLDER, has_shipped_head, shipped_head
from server.compose import build_core
from server.config import Config, ModelConfig
from server.errors import ModelError
from server.llm import LLM
from server.model.loader import find_model
from server.model.resolve import pull
from server.request import ModelInfo, SamplingParams
from tests.fakes.served_model import SETTINGS
from tests.tiny_heads import build_tiny_eagle3
from tests.tiny_model import build_tiny_model

MOST_NBYTES = 24 * 10**6
HANDWRITTEN = Path(__file__).parents[1] / "data" / "handwritten_prompts.json"
HEADS = sorted(FOLDER.glob("*/*"))


def info_of(model: Path, **settings: object) -> ModelInfo:
    values = {name: value for name, value in SETTINGS.items() if name != "speculative_config"}
    return build_core(Config.from_kwargs(model=str(model), **values, **settings)).engine.model_info


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.parent.name)
def test_each_is_for_the_weights_that_its_folder_is_named_after(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["target_digest"] == folder.name
    assert (folder / "model.safetensors").stat().st_size > 10**6, "a file, not a pointer to one"


def test_they_are_small() -> None:
    assert {folder.parent.name for folder in HEADS} == {"eagle3", "medusa"}
    assert sum(path.stat().st_size for folder in HEADS for path in folder.iterdir()) < MOST_NBYTES


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_method_alone_is_the_shipped_head(method: str) -> None:
    try:
        model = pull("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"no default model here: {error}")
    info = info_of(model, speculative_config={"method": method})
    assert info.speculative_method == method


def test_auto_is_the_head_for_this_model_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = build_tiny_model(tmp_path / "model"), build_tiny_model(tmp_path / "other", seed=7)
    files = find_model(ModelConfig(model=str(model)), torch.device("cpu"), torch.float32)
    heads = tmp_path / "heads"
    build_tiny_eagle3(heads / "eagle3" / files.weights_digest)
    monkeypatch.setattr("server.composition.proposers.has_shipped_head", partial(has_shipped_head, folder=heads))
    monkeypatch.setattr("proposers.head_config.shipped_head", partial(shipped_head, folder=heads))
    for settings in ({}, {"speculative_config": "auto"}):
        info = info_of(model, **settings)
        assert (info.speculative_method, info.num_speculative_tokens) == ("eagle3", 6)
        assert info.rejection_sample_method == "block"
    assert info_of(model, speculative_config="none").speculative_method == "none"
    assert info_of(other).speculative_method == "none"


def test_a_shipped_head_that_is_broken_costs_no_more_than_its_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, heads = build_tiny_model(tmp_path / "model"), tmp_path / "heads"
    files = find_model(ModelConfig(model=str(model)), torch.device("cpu"), torch.float32)
    head = build_tiny_eagle3(heads / "eagle3" / files.weights_digest)
    (head / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    monkeypatch.setattr("server.composition.proposers.has_shipped_head", partial(has_shipped_head, folder=heads))
    monkeypatch.setattr("proposers.head_config.shipped_head", partial(shipped_head, folder=heads))
    assert info_of(model).speculative_method == "none"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("no speculation: the eagle3 head shipped for this model cannot be used: ")
    assert "model.safetensors is broken" in warning
    with pytest.raises(ModelError, match="is broken"):
        info_of(model, speculative_config={"method": "eagle3"})


def test_the_default_model_is_drafted_for_well() -> None:
    """Answers are those without drafts, and steps with drafts bring well over a token each."""
    try:
        pull("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"no default model here: {error}")
    prompts = [prompt["turns"][0] for prompt in json.loads(HANDWRITTEN.read_text())[:2]]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=32)
    answers = []
    for given in (None, {"method": "eagle3", "num_speculative_tokens": 4, "policy": "fixed"}):
        with LLM(
            dtype="float32",
            compile="none",
            max_model_len=512,
            kv_cache_memory_bytes="256MiB",
            speculative_config=given,
        ) as llm:
            answers.append([output.outputs[0] for output in llm.chat(messages, sampling, use_tqdm=False)])
    plain, drafted = answers
    assert [choice.token_ids for choice in drafted] == [choice.token_ids for choice in plain]
    num_steps = sum(choice.speculation.num_spec_steps for choice in drafted)
    num_accepted = sum(choice.speculation.num_accepted_draft_tokens for choice in drafted)
    assert num_steps > 0
    assert num_accepted > 0.6 * num_steps
