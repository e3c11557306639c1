"""Settings of heads, and where a head comes from if none is named."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import HostProposer, Proposer, TargetView
from proposers.drafting import NetworkProposer
from proposers.head_config import HeadConfig
from proposers.medusa import MedusaProposer
from proposers.shipped import shipped_head
from server.errors import ConfigError, ModelError
from tests.bench.random_head import write_random_head
from tests.fakes.speculative import speculative_config
from tests.fakes.tiny_target import target_outline, target_view
from tests.tiny_heads import HIDDEN, build_tiny_eagle, build_tiny_eagle3, build_tiny_medusa
from tests.tiny_model import build_tiny_model

BUILDERS: dict[str, Callable[[Path], Path]] = {
    "eagle": build_tiny_eagle,
    "eagle3": build_tiny_eagle3,
    "medusa": build_tiny_medusa,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetView:
    return target_view(build_tiny_model(tmp_path_factory.mktemp("target")), device_name)


def parse(method: str, **settings: object) -> HeadConfig:
    (proposer,) = speculative_config({"method": method, **settings}).proposers
    assert isinstance(proposer, HeadConfig)
    return proposer


def built(settings: HeadConfig, target: TargetView) -> Proposer:
    proposer = settings.build(target)
    assert not isinstance(proposer, HostProposer)
    return proposer


@pytest.mark.parametrize("method", BUILDERS)
def test_a_head_is_built_from_its_settings(tmp_path: Path, target: TargetView, method: str) -> None:
    folder = BUILDERS[method](tmp_path)
    proposer = built(parse(method, model=str(folder), num_speculative_tokens=2), target)
    assert proposer.num_speculative_tokens == 2
    assert proposer.vocabulary is not None, "drafts are drawn unless greedy ones are asked for"
    settings = parse(method, model=str(folder), num_speculative_tokens=2, draft_sample_method="greedy")
    greedy = built(settings, target)
    assert greedy.vocabulary is None
    if method == "medusa":
        assert isinstance(proposer, MedusaProposer)
    else:
        assert isinstance(proposer, NetworkProposer)
        assert proposer.features == ("last" if method == "eagle" else (0, 1))
        edge = HIDDEN * (1 if method == "eagle" else 2)
        assert proposer.block_nbytes == 4 * (16 * 2 * 2 * 16 + edge), "K and V of 16 tokens, and one token's features"
        halved = parse(method, model=str(folder), kv_cache_dtype="bfloat16").build(target)
        assert isinstance(halved, NetworkProposer)
        assert halved.block_nbytes == 2 * 16 * 2 * 2 * 16 + 4 * edge


@pytest.mark.parametrize("method", BUILDERS)
def test_without_a_model_it_is_the_shipped_one(
    tmp_path: Path, target: TargetView, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    assert target.network is not None
    monkeypatch.setattr("proposers.head_config.shipped_head", partial(shipped_head, folder=tmp_path))
    BUILDERS[method](tmp_path / method / target.network.digest)
    settings = parse(method, num_speculative_tokens=2)
    assert settings.build(target).num_speculative_tokens == 2
    outline = target_outline(target)
    settings.check(outline)
    refused = pytest.raises(ConfigError, match=f"^model: there is no {method} head for this model here")
    with refused:
        settings.check(replace(outline, digest=lambda: "1" * 64))
    other = parse("eagle" if method == "medusa" else "medusa")
    with pytest.raises(ConfigError, match=f"^model: there is no {other.method} head"):
        other.check(replace(outline, digest=_fail))


def _fail() -> str:
    pytest.fail("weights are read for a kind of head of which there is none")


def test_a_revision_needs_a_repository(target: TargetView) -> None:
    with pytest.raises(ConfigError, match=r"^revision: is of a Hugging Face repository"):
        parse("eagle3", revision="main").check(target_outline(target))


@pytest.mark.parametrize("method", BUILDERS)
def test_a_target_elsewhere_is_refused(tmp_path: Path, method: str) -> None:
    settings = parse(method, model=str(BUILDERS[method](tmp_path)), num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=f"{method} needs the target in this process"):
        settings.build(TargetView(512, torch.device("cpu"), 4))


def test_an_eagle3_head_is_not_taken_for_an_eagle_head(tmp_path: Path, target: TargetView) -> None:
    with pytest.raises(ModelError, match="holds a head of the kind eagle3, and the method is eagle"):
        parse("eagle", model=str(build_tiny_eagle3(tmp_path))).build(target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_sample_method": "beam"}, "draft_sample_method: must be one of greedy, probabilistic"),
        ({"model": ""}, "model: must be text not empty"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype: must be one of auto, float32, bfloat16, float16, fp8_e4m3"),
        ({"max_model_len": 0}, "max_model_len: must be an integer"),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size: must be an integer"),
        ({"disable_eagle_block_drop": 3}, "disable_eagle_block_drop: must be true or false"),
    ],
    ids=str,
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config.{message}"):
        parse("eagle3", **settings)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_vllm_s_switch_for_lost_blocks_changes_nothing(tmp_path: Path, target: TargetView, method: str) -> None:
    """There are none to lose: the switch is taken so that a configuration of vLLM's goes on working."""
    settings = parse(method, model=str(BUILDERS[method](tmp_path)), disable_eagle_block_drop=True)
    assert settings.build(target).num_speculative_tokens == settings.num_speculative_tokens


def test_a_random_head_fits_its_target(tmp_path: Path, target: TargetView) -> None:
    """What benchmarks take to see what a head that is always wrong costs."""
    assert target.network is not None
    write_random_head(target.network.folder, tmp_path, draft_vocab_size=64)
    settings = parse("eagle3", model=str(tmp_path))
    network = target.network
    deep = replace(network, config=deepcopy(network.config))
    deep.config.num_hidden_layers = 4
    settings.check(target_outline(replace(target, network=deep)))
