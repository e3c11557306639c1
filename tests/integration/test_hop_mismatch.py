"""Two nodes whose KV must not be mixed, as in a rolling upgrade: the decode node computes the prompt, and says why."""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from clients.disaggregated import DisaggregatedClient
from tests.fakes.hop import settle
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.served_model import served_model
from tests.tiny_model import build_tiny_model

PROMPT = [9, *range(30, 99)]
NUM_TOKENS = 8

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("upgraded"))


def with_other_rope(folder: Path) -> Path:
    """The same weights, read in another way."""
    path = build_tiny_model(folder) / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 5e5}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(params=CONNECTORS)
def kv_config(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, Any]:
    return kv_transfer(request, tmp_path)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("dtype", "dtype bfloat16 there, float32 here"),
        ("weights", "weights "),
        ("rope", "rope "),
        ("layers", "layers 3 there, 2 here"),
        ("format version", "format 2 there, 1 here"),
    ],
)
async def test_the_decode_node_goes_on_by_itself(
    folder: Path,
    kv_config: Mapping[str, Any],
    changed: str,
    told: str,
    policy: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is done about loads that fail: none was begun. And what is held for it is let go at once."""
    other: dict[str, object] = {"dtype": "bfloat16" if changed == "dtype" else "float32"}
    match changed:
        case "weights":
            theirs = build_tiny_model(tmp_path / "other", seed=1)
        case "layers":
            theirs = build_tiny_model(tmp_path / "other", num_layers=3)
        case "rope":
            theirs = with_other_rope(tmp_path / "other")
        case _:
            theirs = folder
    version = patch("server.model.fingerprint.KV_FORMAT_VERSION", 2 if changed == "format version" else 1)
    shared: dict[str, object] = {
        "speculative_config": None,
        "kv_transfer_config": {**kv_config, "kv_load_failure_policy": policy},
    }
    async with AsyncExitStack() as stack:
        with version:
            first = await stack.enter_async_context(served_model(theirs, **shared, **other, role="prefill"))
        second = await stack.enter_async_context(served_model(folder, **shared, role="decode"))
        client = DisaggregatedClient(
            prefill=[first.target], decode=[second.target], min_prompt_tokens=0, remembers_prompts=False
        )
        await stack.enter_async_context(client)
        asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        output = await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, **asked)
        begun, *tokens = output.choices[0].token_ids
        stats = await second.client.stats()
        assert (stats.external_loaded_tokens, stats.prefix_hit_tokens, stats.num_failed_loads) == (0, 0, 0)
        assert stats.prompt_tokens == len(PROMPT)
        assert stats.num_unreadable_handles == 1
        assert told in caplog.text
        alone = await second.client.generate(token_ids=[*PROMPT, begun], max_tokens=NUM_TOKENS - 1, **asked)
        assert tokens == list(alone.choices[0].token_ids)
        for node in (first, second):
            await settle(node.client)
