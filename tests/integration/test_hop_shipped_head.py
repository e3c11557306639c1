"""The default model on two nodes of which one drafts with the head that comes with Outrider, or both do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.aio import AsyncClient
from server.errors import ModelError
from server.model.resolve import pull
from tests.fakes.hop import SAMPLINGS, full_tokens, hop_between, ids
from tests.fakes.hop_connectors import kv_transfer
from tests.fakes.prompts import load_prompts
from tests.fakes.server_process import ServerProcess, server_processes

LIMIT, NUM_TOKENS, BLOCK_SIZE = 320, 24, 16
NUM_PROMPTS = 8
SPECULATIVE = {
    "plain": None,
    "drafting": {"method": "eagle3", "num_speculative_tokens": 4, "policy": "fixed"},
}

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return pull("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"no default model here: {error}")


@pytest.fixture(scope="module", params=["filesystem", "tcp"])
def servers(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """A prefill node and a decode node of each kind."""
    folder = tmp_path_factory.mktemp("hop-head")
    common: dict[str, Any] = {
        "model": model,
        "max_model_len": LIMIT,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": "192MiB",
        "kv_transfer_config": kv_transfer(request, folder),
    }
    settings = {
        f"{role} {kind}": {**common, "role": role, "speculative_config": speculative}
        for role in ("prefill", "decode")
        for kind, speculative in SPECULATIVE.items()
    }
    with server_processes(folder, settings) as started:
        yield started


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    return load_prompts(AutoTokenizer.from_pretrained(model), LIMIT - NUM_TOKENS)[:NUM_PROMPTS]


@pytest.mark.parametrize("ours", SPECULATIVE)
@pytest.mark.parametrize("theirs", SPECULATIVE)
async def test_tokens_are_those_of_one_node_without_drafts(
    servers: dict[str, ServerProcess], prompts: list[list[int]], theirs: str, ours: str
) -> None:
    first, second, plain = servers[f"prefill {theirs}"], servers[f"decode {ours}"], servers["decode plain"]
    num_accepted = 0
    async with hop_between([first.target], [second.target]) as hop, AsyncClient(plain.target) as alone:
        for kind, sampling in SAMPLINGS.items():
            options: dict[str, Any] = {**sampling, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            asked = [  # some begin alike: salts keep what is loaded for one from the next
                {**options, "token_ids": prompt, "cache_salt": f"{theirs} {ours} {kind} {i}"}
                for i, prompt in enumerate(prompts)
            ]
            before = await hop.counts()
            outputs = [await hop.client.generate(**request) for request in asked]
            counts = await hop.counts() - before
            loaded = sum(full_tokens(len(prompt)) for prompt in prompts)
            assert (counts.loaded, counts.failed_loads) == (loaded, 0)
            expected = [
                await alone.generate(**{**request, "cache_salt": f"{request['cache_salt']} alone"}) for request in asked
            ]
            assert list(map(ids, outputs)) == list(map(ids, expected))
            stats = [choice.finished.speculation for output in outputs for choice in output.choices]
            num_accepted += sum(each.num_accepted_draft_tokens for each in stats)
        await hop.settle()
    assert (num_accepted > 0) == (ours == "drafting")
