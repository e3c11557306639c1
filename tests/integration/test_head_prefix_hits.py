"""A head on the target's hidden states costs no prefix hit: what is cached is as much as without speculation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.request import SamplingParams
from tests.fakes.engine_under_test import EngineUnderTest, engine_on
from tests.tiny_heads import build_tiny_eagle, build_tiny_eagle3
from tests.tiny_model import build_tiny_model

BLOCK = 16
SAMPLING = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LENGTHS = [blocks * BLOCK + more for blocks in (1, 2, 3, 4) for more in (0, 1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "target": build_tiny_model(tmp_path_factory.mktemp("target")),
        "eagle": build_tiny_eagle(tmp_path_factory.mktemp("eagle")),
        "eagle3": build_tiny_eagle3(tmp_path_factory.mktemp("eagle3"), draft_vocab_size=200),
    }


@pytest.fixture(scope="module", params=["eagle", "eagle3", "eagle3 that is told not to drop"])
def engines(
    request: pytest.FixtureRequest, folders: dict[str, Path], device_name: str
) -> Iterator[tuple[EngineUnderTest, EngineUnderTest]]:
    """One with a head, one without speculation."""
    method, _, more = request.param.partition(" ")
    speculation: dict[str, Any] = {"method": method, "model": str(folders[method]), "num_speculative_tokens": 3}
    if more:
        speculation["disable_eagle_block_drop"] = True
    with (
        engine_on(folders["target"], device_name, speculative_config=speculation) as drafting,
        engine_on(folders["target"], device_name) as plain,
    ):
        yield drafting, plain


def ask(engine: EngineUnderTest, prompt: list[int]) -> tuple[int, list[int]]:
    """Cached tokens, and the answer."""
    (outcome,) = engine.generate([prompt], SAMPLING)
    return outcome.num_cached_tokens, outcome.only.token_ids


def test_prompts_of_one_to_four_blocks(engines: tuple[EngineUnderTest, EngineUnderTest]) -> None:
    drafting, plain = engines
    for number, length in enumerate(LENGTHS):
        prompt = [3 + number, *range(50, 49 + length)]
        for engine in engines:
            assert ask(engine, prompt)[0] == 0
        again = ask(drafting, prompt)
        assert again == ask(plain, prompt)
        assert again[0] == (length - 1) // BLOCK * BLOCK, "all full blocks before the last token"
    assert sum(drafting.statistics().draft_tokens_per_position) > 0


def test_turns_of_a_chat(engines: tuple[EngineUnderTest, EngineUnderTest]) -> None:
    drafting, plain = engines
    chat = list(range(100, 120))
    for turn in range(4):
        cached, answer = ask(drafting, chat)
        assert (cached, answer) == ask(plain, chat)
        assert cached == (0 if turn == 0 else (len(chat) - 6) // BLOCK * BLOCK), "all that was computed before"
        chat += [*answer, *range(200 + 5 * turn, 205 + 5 * turn)]
