"""Server processes that hand on to each other and draft, or do not, on each side: whatever drafts, tokens are those of
one node, and where both draft with the same network its KV comes too."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.aio import AsyncClient
from clients.outputs import GenerationOutput
from tests.fakes.engine_under_test import ngram
from tests.fakes.hop import SAMPLINGS, full_tokens, hop_between, ids
from tests.fakes.hop_connectors import CONNECTORS, kv_transfer
from tests.fakes.server_process import ServerProcess, server_processes
from tests.tiny_heads import build_tiny_eagle3
from tests.tiny_model import build_tiny_model

K = 3
METHODS = ("none", "ngram", "draft_model", "eagle3")
LENGTHS = (17, 40, 64, 100, 150)
PROMPTS = [[random.Random(length).randrange(3, 500) for _ in range(length)] for length in LENGTHS]

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
Servers = dict[str, ServerProcess]


def speculative(method: str, target: Path, head: Path) -> dict[str, Any] | None:
    """Of a draft model that is the target: whatever it lacked would cost a draft."""
    match method:
        case "none":
            return None
        case "ngram":
            return ngram(K)
    model = target if method == "draft_model" else head
    return {"method": method, "model": str(model), "num_speculative_tokens": K, "policy": "fixed"}


@pytest.fixture(scope="module", params=CONNECTORS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A prefill node and a decode node of each method."""
    folder = tmp_path_factory.mktemp("hop-drafts")
    transfer = kv_transfer(request, folder)
    target, head = build_tiny_model(folder / "target"), build_tiny_eagle3(folder / "head")
    settings = {
        f"{role} {method}": {
            "model": target,
            "role": role,
            "kv_transfer_config": transfer,
            "speculative_config": speculative(method, target, head),
        }
        for role in ("prefill", "decode")
        for method in METHODS
    }
    with server_processes(folder, settings) as started:
        yield started


def acceptance(outputs: list[GenerationOutput]) -> float:
    """The share of drafts that were accepted."""
    stats = [choice.finished.speculation for output in outputs for choice in output.choices]
    num_drafts = sum(each.num_draft_tokens for each in stats)
    return sum(each.num_accepted_draft_tokens for each in stats) / num_drafts if num_drafts else 0.0


@pytest.mark.parametrize("ours", METHODS)
@pytest.mark.parametrize("theirs", METHODS)
async def test_whatever_drafts_on_either_side(servers: Servers, theirs: str, ours: str) -> None:
    first, second = servers[f"prefill {theirs}"], servers[f"decode {ours}"]
    plain = servers["decode none"]
    options: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "speculation_metrics": "summary"}
    async with hop_between([first.target], [second.target]) as hop, AsyncClient(plain.target) as alone:
        for kind, sampling in SAMPLINGS.items():
            before = await hop.counts()
            salt = f"{theirs} {ours} {kind}"
            asked = [{**options, **sampling, "token_ids": prompt, "cache_salt": salt} for prompt in PROMPTS]
            outputs = [await hop.client.generate(**request) for request in asked]
            counts = await hop.counts() - before
            assert (counts.loaded, counts.failed_loads) == (sum(map(full_tokens, LENGTHS)), 0), second.log
            whole = [{**request, "cache_salt": f"{salt} alone"} for request in asked]
            expected = [await alone.generate(**request) for request in whole]
            assert list(map(ids, outputs)) == list(map(ids, expected))
            if theirs == ours:
                without = [await hop.decode[0].generate(**request) for request in whole]
                assert abs(acceptance(outputs) - acceptance(without)) <= 0.05
                if ours == "draft_model":
                    assert acceptance(outputs) == 1.0
        await hop.settle()
