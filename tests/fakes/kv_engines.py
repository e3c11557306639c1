"""Engines that exchange KV through a folder, one after the other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.request import SamplingParams
from tests.fakes.device import DEVICE
from tests.fakes.engine_under_test import EngineUnderTest, Outcome, Prompt, engine_on

BLOCK_SIZE = 16
BLOCK_NBYTES = 8192
"""Of the tiny model."""


def files(folder: Path, **more: Any) -> dict[str, Any]:
    """kv_transfer_config of a connector that keeps blocks in files."""
    return {
        "kv_connector": "filesystem",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        **more,
    }


def faulty(folder: Path, **faults: Any) -> dict[str, Any]:
    """The same with failures."""
    return {"kv_connector": "fault", "kv_connector_extra_config": {"store": files(folder), **faults}}


@contextmanager
def kv_engine(model: Path, kv_transfer_config: dict[str, Any] | None, **settings: Any) -> Iterator[EngineUnderTest]:
    """An engine with a connector, whose pool is as it was in the end, without anything else to do."""
    settings = {"kv_transfer_config": kv_transfer_config, "block_size": BLOCK_SIZE, **settings}
    with engine_on(model, DEVICE, **settings) as engine:
        yield engine
        engine.settle()


def fill(model: Path, kv_transfer_config: dict[str, Any], prompts: Sequence[Prompt], **settings: Any) -> None:
    """Have another engine compute prompts and save their blocks."""
    with kv_engine(model, kv_transfer_config, **settings) as engine:
        for outcome in engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0)):
            assert outcome.error is None
        engine.settle()


def num_full(prompt: Sequence[int]) -> int:
    """Tokens of a prompt that can come from elsewhere: not the block in which its last one is."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def tokens(outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Of all choices of requests that did not fail."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [choice.token_ids for outcome in outcomes for choice in outcome.choices]
